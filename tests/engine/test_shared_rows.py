"""Pages whose K and V share a row, as TPUs hold heads of 64 and less: other bytes, the same tokens."""

import jax
import pytest

from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from tests.engine.stacks import CONFIG, HALVES, SOURCE, generate, open_machine, open_ring, tokens_of, warm_pair

PROMPTS = [tuple(2 + (7 * index + place) % 90 for place in range(length)) for index, length in enumerate((5, 19, 40))]
TOKENS = 6


def tiled_machine(role: Role, devices: slice, **sizes) -> MeshExecutor:
    machine = open_machine(role, HALVES, jax.devices()[devices], tiled=True, **sizes)
    assert machine.layer_groups[0].kv.pools[0].shape[2:] == (1, 8, 2 * CONFIG.head_dim)
    return machine


def test_they_are_handed_over_and_read_as_pages_of_two_rows_are():
    wanted = tokens_of(generate(*warm_pair(2, 2), PROMPTS, TOKENS))
    source, destination = tiled_machine(Role.PREFILL, slice(2)), tiled_machine(Role.DECODE, slice(6, 8), pp=2)
    assert tokens_of(generate(source, destination, PROMPTS, TOKENS)) == wanted


@pytest.mark.slow
def test_a_ring_reads_them_too():
    wanted = tokens_of(generate(*warm_pair(2, 2), PROMPTS, TOKENS))
    source, ring = tiled_machine(Role.PREFILL, slice(2)), open_ring(2, 1, CONFIG, SOURCE, tiled=True)
    assert tokens_of(generate(source, ring, PROMPTS, TOKENS)) == wanted
