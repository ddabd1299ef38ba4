"""The sizes of a stack, worked out from settings and the devices' memory."""

import logging

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.kv_layout import DTYPE_BYTES
from jdisagg.core.settings import Settings
from jdisagg.serve import blueprint

GIB = 1 << 30


def drawn(mesh: str, device_bytes: int | None = GIB, **settings) -> blueprint.Blueprint:
    platform = "cpu" if device_bytes is None else "gpu"
    return blueprint.draw(Settings(mesh=mesh, hbm_fraction=1.0, **settings), platform, device_bytes)


def bytes_of(plan: blueprint.Blueprint) -> dict[str, int]:
    """Weights and KV pages of each worker."""
    weights = plan.model.num_params() * DTYPE_BYTES[plan.dtype]
    return {config.worker: weights + config.num_pages * plan.kv.bytes_per_page for config in plan.workers}


def test_a_worker_alone_has_its_devices_memory_but_for_less_than_a_page():
    plan = drawn("prefill:tp2,decode:tp1")
    for worker, devices in (("prefill-0", 2), ("decode-0", 1)):
        assert 0 <= devices * GIB - bytes_of(plan)[worker] < plan.kv.bytes_per_page


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("prefill:tp1@0,decode:tp1@0", {"prefill-0": 0.5, "decode-0": 0.5}),
        ("prefill:2xtp1,decode:tp1@0", {"prefill-0": 0.5, "prefill-1": 1, "decode-0": 0.5}),
        ("prefill:tp1@1,decode:pp2@0", {"prefill-0": 0.5, "decode-0": 1}),  # its stages hold equal parts
    ],
)
def test_workers_that_share_a_device_share_its_memory(mesh, parts):
    plan = drawn(mesh)
    for worker, size in bytes_of(plan).items():
        assert 0 <= parts[worker] * GIB - size < plan.kv.bytes_per_page
    assert sum(bytes_of(plan).values()) <= plan.mesh.num_devices * GIB


def test_too_little_memory_for_two_names_the_worker_and_both_sizes():
    enough_for_one = bytes_of(drawn("colocated:tp1", kv_tokens=2048))["colocated-0"]
    drawn("colocated:tp1", enough_for_one, max_model_len=2048)
    with pytest.raises(ConfigError, match=r"prefill-0: room for 0 KV tokens, but one sequence may have 2048"):
        drawn("prefill:tp1@0,decode:tp1@0", enough_for_one, max_model_len=2048)


def test_sharing_is_warned_of_and_its_absence_is_not(caplog):
    with caplog.at_level(logging.WARNING):
        drawn("prefill:tp1,decode:tp1", None)
    assert not caplog.records
    drawn("prefill:2xtp1,decode:pp3@0", None)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "prefill-0 and decode-0 share device 0",
        "prefill-1 and decode-0 share device 1",
    ]
