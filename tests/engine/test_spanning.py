"""Machines whose meshes span processes: real ones, joined to one JAX world."""

from functools import cache

import pytest

from tests.engine.scenes import bytes_read, tp2
from tests.engine.stacks import CONFIG
from tests.engine.worlds import told_by_world

pytestmark = pytest.mark.slow


@cache
def expected() -> list[list[int]]:
    """By one process, with a device each for prefill and decode shards."""
    return tp2()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mesh_over_two_processes_gives_the_tokens_of_one_process(devices: int):
    assert told_by_world("tp2", devices=devices) == [expected()] * 2


def test_each_process_reads_its_own_shards_alone():
    """Norms are whole on every shard, and the embedding is wherever a table is looked up by shards of heads."""
    told, alone = told_by_world("bytes_read"), bytes_read()
    norm, table = 4 * CONFIG.hidden_size, 4 * CONFIG.vocab_size * CONFIG.hidden_size
    whole = norm * (2 * CONFIG.num_layers + 1) + table
    assert sum(tp for tp, _ in told) == alone[0] and all(tp < (alone[0] + whole) // 2 + norm for tp, _ in told)
    assert sum(ring for _, ring in told) == alone[1]
    assert all(abs(ring - alone[1] // 2) <= table // 16 for _, ring in told)
