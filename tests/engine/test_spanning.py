"""Machines whose meshes span processes: real ones, joined to one JAX world."""

from functools import cache

import pytest

from tests.engine.scenes import tp2
from tests.engine.stacks import CONFIG
from tests.engine.worlds import told_by_world

pytestmark = pytest.mark.slow


@cache
def expected() -> list[list[int]]:
    """By one process, with a device each for prefill and decode shards."""
    return tp2()


# One device each: also the groups of tests/serve/cluster/test_groups.py.
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.hostile), 2])
def test_a_mesh_over_two_processes_gives_the_tokens_of_one_process(devices: int):
    assert told_by_world("tp2", devices=devices) == [expected()] * 2


def test_each_process_reads_its_own_shards_alone():
    """Of tensor parallel shards half of every matrix, and what each shard has whole: norms and, of 97 tokens, tables.
    Of a ring half of the layers, and its rows of the tables."""
    row, layers = 4 * CONFIG.hidden_size, CONFIG.num_layers
    norms, table = row * (2 * layers + 1), row * CONFIG.vocab_size
    matrices = 4 * layers * CONFIG.layer_params()
    shard = matrices // 2 + norms + 2 * table
    stages = [matrices // 2 + row * (layers + 1) + 2 * row * rows for rows in (49, 48)]
    assert told_by_world("bytes_read") == [[shard, stage] for stage in stages]
