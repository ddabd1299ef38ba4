"""Which workers may be a group of processes, and how many devices each of these holds."""

from __future__ import annotations

import pytest

from jdisagg.cluster.membership import GroupRank
from jdisagg.core.errors import MeshError
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.group.member import devices_each, worker_of

TWO = GroupRank("g", 0, 2, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("mesh", "role", "devices"),
    [
        ("prefill:tp4,decode:tp1", "prefill", 2),
        ("prefill:tp1,decode:ring2", "decode", 1),
        ("prefill:tp1,decode:ring4tp2", "decode", 4),
    ],
)
def test_tensor_parallel_workers_and_rings_may_span_processes(mesh: str, role: str, devices: int):
    assert devices_each(Settings(mesh=mesh, role=role, router="r:1"), TWO) == devices


@pytest.mark.parametrize(
    ("mesh", "role", "says"),
    [
        ("prefill:tp1,decode:pp2", "decode", "write decode:ring2$"),
        ("prefill:pp2tp2,decode:tp1", "prefill", "the 2 stages of prefill-0 .* write prefill:tp4$"),
        ("prefill:tp1,decode:pp4tp2", "decode", "the 4 stages of decode-0 .* write decode:ring4tp2$"),
        ("prefill:tp1,decode:2xring2", "decode", "has 2 workers of --role=decode, and a group is one"),
    ],
)
def test_what_one_process_must_hold_is_refused_with_what_to_write(mesh: str, role: str, says: str):
    with pytest.raises(MeshError, match=says):
        worker_of(Settings(mesh=mesh, role=role, router="r:1"))


def test_devices_that_do_not_split_evenly_are_refused_with_both_numbers():
    with pytest.raises(MeshError, match=r"the 3 devices of .* over --group_size=2"):
        devices_each(Settings(mesh="prefill:tp1,decode:ring3", role="decode", router="r:1"), TWO)
