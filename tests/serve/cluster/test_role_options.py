"""What workers of a cluster's processes can become: the mesh's workers, for which all processes are warm, or colocated
ones; and what is answered for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.role_options import options_json, options_of, read_options
from jdisagg.serve.deploy.deployment import WorkerShapes, resolve_deployment


def options(mesh: str, worker: str, num_processes: int = 1) -> WorkerShapes:
    settings = Settings(mesh=mesh, max_model_len=256)
    deployment = resolve_deployment(settings, "cpu", None)
    (config,) = [each for each in deployment.workers if each.worker == worker]
    own = {config.worker: replace(config, worker=WorkerId(f"{worker}-1a2b3c"))}
    (found,) = options_of(deployment, settings, own, num_processes).values()
    assert {each.config.worker for each in found.able.values()} == {f"{worker}-1a2b3c"}
    return found


def test_a_worker_becomes_what_the_mesh_has_on_as_many_devices_or_colocated():
    assert list(options("prefill:2xtp2,decode:pp2", "prefill-1").able) == [
        "prefill:tp2", "decode:pp2", "colocated:pp2", "colocated:tp2",
    ]  # fmt: skip
    assert list(options("prefill:tp1,decode:pp2", "decode-0").able) == ["decode:pp2", "colocated:pp2", "colocated:tp2"]


def test_a_cut_that_is_not_the_meshs_is_refused_because_the_others_are_not_warm_for_it():
    found = options("prefill:2xtp2,decode:pp2", "prefill-1")
    with pytest.raises(ConfigError, match="decode:tp2 is none of --mesh=prefill:2xtp2,decode:pp2, for which the other"):
        found.find("decode", "tp2")
    with pytest.raises(ConfigError, match="prefill is none of what it can be"):
        options("prefill:tp1,decode:pp2", "decode-0").find("prefill", "")


@pytest.mark.parametrize(
    ("mesh", "num_processes", "says"),
    [
        ("prefill:tp1,decode:ring2", 1, "decode-0-1a2b3c stands beside a ring: its role changes by starting it again"),
        ("prefill:tp1,decode:tp2", 2, "decode-0-1a2b3c is a group of 2 processes: its role changes by starting it"),
    ],
)
def test_a_ring_and_a_group_stay_what_they_are_and_can_be_called_back(mesh: str, num_processes: int, says: str):
    found = options(mesh, "decode-0", num_processes)
    for role in ("prefill", "colocated"):
        with pytest.raises(ConfigError, match=says):
            found.find(role, "")
    assert found.find("decode", "").config.worker == "decode-0-1a2b3c"


def test_what_is_told_of_it_to_another_process_is_what_it_is():
    found = options("prefill:2xtp2,decode:pp2", "prefill-1")
    read = read_options(options_json(found), WorkerId("prefill-1-1a2b3c"))
    assert {name: each.config for name, each in read.able.items()} == {
        name: each.config for name, each in found.able.items()
    }
    assert (read.num_devices, read.impossible, read.usual) == (2, found.impossible, found.usual)
