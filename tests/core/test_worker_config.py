"""The server and the simulator configure the same workers from the same settings.

Both are told --kv_tokens here: without it the simulator's room follows from `cost_models.MEMORY_SHARE` and the server's
from --hbm_fraction and the weights as they are loaded. Prompts have named blocks here: without names no request could
find a prefix, and the simulator keeps none.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from jdisagg.commands.sim import build, declare
from jdisagg.core.hardware import CHIPS
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Ring, Stages, WorkerConfig
from jdisagg.serve.deploy.deployment import resolve_deployment
from jdisagg.sim.traces import Trace

LONGEST, KV_TOKENS = 2048, 1 << 16
MAY_DIFFER = {
    "forced_tokens": "only the server reads grammars, and only where llguidance is installed",
}
MESHES = [
    "prefill:tp2,decode:pp2",
    "prefill:tp1,decode:tp1",
    "prefill:pp2,decode:tp2",
    "prefill:tp1,decode:ring2",
    "prefill:2xtp1,decode:3xtp1",
    "prefill:2xtp1,decode:2xpp2tp1,colocated:pp2tp1",
    "colocated:tp1",
    "colocated:2xpp2tp1",
]
PLATFORMS = {"cpu": "xeon8480", "h100": "h100", "v5p": "v5p"}
SAID = {
    "nothing": {},
    "sizes": {"max_num_seqs": 24, "max_num_batched_tokens": 1024, "page_size": 64, "reserve_tokens": 48},
    "other ways": {"mixed_steps": "off", "transfer": "whole"},
    "tiers": {"dram_tokens": 5000, "peer_fetch": True},
}


def served(folder: str, mesh: str, device: str, said: dict) -> tuple[WorkerConfig, ...]:
    chip = CHIPS.get(device)
    settings = Settings(
        model=folder,
        mesh=mesh,
        load_format="random",
        dtype="bfloat16",
        max_model_len=LONGEST,
        kv_tokens=KV_TOKENS,
        **said,
    )
    settings.check()
    platform, memory = (chip.platform, chip.memory_bytes) if chip else ("cpu", None)
    return resolve_deployment(settings, platform, memory, chip=chip).workers


def simulated(folder: str, mesh: str, device: str, said: dict) -> tuple[WorkerConfig, ...]:
    values = declare()
    asked = {"model": folder, "mesh": mesh, "hardware": PLATFORMS[device], "kv_tokens": KV_TOKENS, **said}
    values(["sim", *(f"--{name}={value}" for name, value in asked.items())])
    named = Trace(np.zeros(1), np.array([LONGEST - 8]), np.array([8]), ((1,),), LONGEST)
    return build(values, named).workers


def assert_alike(folder: str, mesh: str, device: str, said: dict) -> None:
    live, virtual = served(folder, mesh, device, said), simulated(folder, mesh, device, said)
    assert [each.worker for each in live] == [each.worker for each in virtual]
    names = [each.name for each in fields(WorkerConfig) if each.name not in MAY_DIFFER]
    for one, other in zip(live, virtual, strict=True):
        one.check()
        other.check()
        assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}


@pytest.mark.parametrize("device", PLATFORMS)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_simulator_has_the_workers_that_the_server_would_have(mesh: str, device: str):
    assert_alike("", mesh, device, {})


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("mesh", ["prefill:tp2,decode:pp2", "colocated:tp1"])
def test_settings_mean_the_same_to_both(mesh: str, said: str):
    assert_alike("", mesh, "h100", SAID[said])


@pytest.mark.parametrize(
    ("mesh", "device", "decode"),
    [
        ("prefill:tp1,decode:tp1", "cpu", Stages(1, 1)),
        ("prefill:tp1,decode:tp1", "h100", Stages(1, 32)),
        ("colocated:tp1", "h100", Stages(1, 8)),
        ("prefill:tp1,decode:pp2", "h100", Stages(2, 1)),
        ("prefill:tp1,decode:ring2", "cpu", Ring(2, 8)),
    ],
)
def test_decode_steps_per_dispatch_follow_from_stages_and_devices(mesh: str, device: str, decode: Stages | Ring):
    assert served("", mesh, device, {})[-1].decode == decode


def test_stages_take_several_steps_per_dispatch_only_where_settings_say_so():
    (prefill, decode) = served("", "prefill:tp1,decode:pp2", "h100", {"multi_step": 4})
    assert (prefill.decode, decode.decode) == (Stages(), Stages(2, 4))
    assert decode.num_microbatches == 1 and decode.stage_batches == 2 and not decode.stage_admission
    assert served("", "prefill:tp1,decode:pp2", "h100", {"multi_step": 4, "speculative": "ngram"})[-1].decode == Stages(
        2
    )
