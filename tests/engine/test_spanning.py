"""Machines whose meshes span processes: real ones, joined to one JAX world."""

from functools import cache

import pytest

from tests.engine.scenes import tp2
from tests.engine.worlds import told_by_world

pytestmark = pytest.mark.slow


@cache
def expected() -> list[list[int]]:
    """By one process, with a device each for prefill and decode shards."""
    return tp2()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mesh_over_two_processes_gives_the_tokens_of_one_process(devices: int):
    assert told_by_world("tp2", devices=devices) == [expected()] * 2
