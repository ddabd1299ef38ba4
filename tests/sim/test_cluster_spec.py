"""Pools of unlike devices, and hosts whose workers share a NIC."""

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import Role
from jdisagg.serve.deploy.chosen_sizes import Devices, page_of, sizes_of
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import Hosts, Sizes, by_device, cluster_spec, devices_of
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.links import DomainLinks
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson

SHAPE = Model(model("llama3-8b"))
WORK = poisson(Trace(np.zeros(30), np.full(30, 4000), np.full(30, 20)), 20.0)


def pools(text: str, **more) -> dict[str, float]:
    """Mean seconds by metric, of two prefill workers and two that decode."""
    cost_of = by_device(devices_of(text), lambda chip, tp: Roofline(SHAPE, chip, tp))
    cluster = simulated(cluster_spec(MeshSpec.parse("prefill:2xtp1,decode:2xtp1"), Sizes(8192), cost_of, **more))
    outcome = cluster.run(WORK)
    cluster.check_all_ended()
    assert len(outcome.served) == len(WORK)
    return {metric: float(outcome.values(metric).mean()) for metric in ("TTFT", "TPOT")}


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("h100", "h100", "h100"),
        ("h100,decode:a100", "h100", "a100"),
        ("prefill:h200, decode:xeon8480", "h200", "xeon8480"),
    ],
)
def test_devices_are_said_for_all_or_by_role(text, prefill, decode):
    found = devices_of(text)
    assert (found[Role.PREFILL].name, found[Role.DECODE].name) == (prefill, decode)


@pytest.mark.parametrize("text", ["h100,a100", "encode:h100", "decode:h100,decode:a100", "h1000", ""])
def test_devices_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError):
        devices_of(text)


def test_a_long_prompts_chunks_are_in_all_prefill_stages_at_once():
    """Eight chunks through two stages: nine halves of a chunk's time, not sixteen; one chunk gains nothing."""
    found = dict[tuple[str, int], float]()
    for mesh in ("prefill:tp1,decode:tp1", "prefill:pp2,decode:tp1"):
        for tokens in (1024, 8192):
            cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
            sizes = Sizes(16384, chunk_tokens=1024)
            cluster = simulated(cluster_spec(MeshSpec.parse(mesh), sizes, cost_of))
            outcome = cluster.run(Trace(np.zeros(1), np.full(1, tokens), np.full(1, 2)))
            found[mesh, tokens] = float(outcome.values("TTFT").mean())
    one, two = "prefill:tp1,decode:tp1", "prefill:pp2,decode:tp1"
    assert found[two, 1024] == pytest.approx(found[one, 1024], rel=0.02)
    assert found[two, 8192] == pytest.approx(9 / 16 * found[one, 8192], rel=0.05)


def test_an_older_decode_pool_slows_decoding_and_not_prompts():
    new, mixed = pools("h100"), pools("h100,decode:a100")
    assert mixed["TPOT"] > 1.3 * new["TPOT"]
    assert mixed["TTFT"] == pytest.approx(new["TTFT"], rel=0.05)


def test_a_cpus_memory_holds_more_kv():
    cost_of = by_device(devices_of("h100,decode:xeon8480"), lambda chip, tp: Roofline(SHAPE, chip, tp))
    prefill, decode = cluster_spec(MeshSpec.parse("prefill:tp1,decode:tp1"), Sizes(8192), cost_of).workers
    assert decode.num_pages > 5 * prefill.num_pages


def test_a_shared_nic_slows_what_its_workers_ship_and_a_network_that_is_off_slows_nothing():
    """Two hosts of two workers each: those of a kind stand together."""
    free, apart, shared = (pools("h100", **more) for more in ({}, {"port_bytes_per_s": 5e9}, {"hosts": Hosts(2, 5e9)}))
    assert free["TPOT"] < apart["TPOT"] < shared["TPOT"]
    assert pools("h100", hosts=Hosts(4, 5e9))["TPOT"] == pytest.approx(free["TPOT"]), "one host: no NIC is crossed"


def test_hosts_take_workers_in_the_meshs_order():
    cost = Roofline(SHAPE, devices_of("h100")[Role.DECODE])
    mesh = MeshSpec.parse("prefill:2xtp1,decode:2xtp1")
    links = cluster_spec(mesh, Sizes(8192), lambda _: (cost, 9999), hosts=Hosts(3, 1.0)).links
    assert isinstance(links, DomainLinks)
    assert links.places[WorkerId("prefill-1")] == links.places[WorkerId("decode-0")] == ("host-0",)
    assert links.places[WorkerId("decode-1")] == ("host-1",)


def steps_per_dispatch(mesh: str, devices: str = "h100", *, chosen: bool = False) -> dict[str, int]:
    cost_of = by_device(devices_of(devices), lambda chip, tp: Roofline(SHAPE, chip, tp))
    found = cluster_spec(MeshSpec.parse(mesh), Sizes(8192, by_device=chosen), cost_of).workers
    return {each.worker: each.decode.steps_per_dispatch for each in found}


def test_workers_take_the_turns_that_a_run_on_their_devices_would():
    assert steps_per_dispatch("prefill:tp1,decode:tp1", chosen=True) == {"prefill-0": 1, "decode-0": 32}
    assert steps_per_dispatch("prefill:tp1,decode:pp2tp1", chosen=True)["decode-0"] == 1, (
        "several stages take single steps"
    )
    assert steps_per_dispatch("colocated:tp1", chosen=True) == {"colocated-0": 8}
    assert steps_per_dispatch("prefill:tp1,decode:tp1", "xeon8480", chosen=True)["decode-0"] == 1, (
        "it has no data sheet"
    )
    assert steps_per_dispatch("prefill:tp1,decode:tp1")["decode-0"] == 1


def test_the_host_is_paid_once_a_dispatch_and_all_else_turn_by_turn():
    cost, rows = Roofline(SHAPE, devices_of("h100")[Role.DECODE]), tuple(range(4))
    steps = sum(cost.decode_s(DecodeRows(0, rows, 1), 4000 + 4 * turn) for turn in range(1, 9))
    dispatch = cost.decode_s(DecodeRows(0, rows, 1, widths=(8,) * 4, turns=True), 4000 + 4 * 8)
    assert steps - dispatch == pytest.approx(7 * cost.host_s, rel=1e-6)


def test_turns_bring_tokens_sooner_where_nobody_is_about_to_come():
    def tpot_s(*, chosen: bool = False) -> float:
        cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
        cluster = simulated(
            cluster_spec(MeshSpec.parse("prefill:tp1,decode:tp1"), Sizes(8192, by_device=chosen), cost_of)
        )
        outcome = cluster.run(Trace(np.zeros(2), np.full(2, 64), np.full(2, 300)))
        cluster.check_all_ended()
        return float(outcome.values("TPOT").mean())

    assert tpot_s(chosen=True) < tpot_s() - 0.5e-3, "of a millisecond of the host's a step, most is paid once"


@pytest.mark.parametrize(("device", "page", "tokens", "prompts"), [("h100", 32, 2048, 32), ("v5p", 32, 1024, 16)])
def test_a_page_and_a_steps_tokens_that_nobody_said_are_those_that_a_run_would_choose(
    device: str, page: int, tokens: int, prompts: int
):
    mesh, chip = MeshSpec.parse("prefill:2xtp1,decode:pp2tp1"), CHIPS[device]
    cost_of = by_device(devices_of(device), lambda chip, tp: Roofline(SHAPE, chip, tp))
    found = Sizes(8192, page_size=0, chunk_tokens=0, by_device=True).chosen(mesh, cost_of)
    devices = Devices(chip.platform, chip, None)
    kv = KVLayout.of(SHAPE.config, 1, "bfloat16", chip.platform == "tpu")
    size = page_of(Settings(), mesh, devices, kv, 8192)
    room = dict.fromkeys((each.worker for each in mesh.workers()), None)
    run = sizes_of(Settings(), SHAPE.config, mesh, devices, size, 8192, room)
    assert (found.page_size, found.chunk_tokens, found.max_chunk_seqs) == (page, tokens, prompts)
    assert (size.value, run.max_num_batched_tokens, run.max_chunk_seqs) == (page, tokens, prompts)


def test_sizes_that_somebody_said_stay_and_a_device_without_a_sheet_has_the_simulators_own():
    mesh = MeshSpec.parse("prefill:tp1,decode:tp1")
    cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
    said = Sizes(8192, page_size=512, chunk_tokens=1000, by_device=True)
    assert said.chosen(mesh, cost_of) == said
    cost_of = by_device(devices_of("xeon8480"), lambda chip, tp: Roofline(SHAPE, chip, tp))
    found = Sizes(8192, page_size=0, chunk_tokens=0, by_device=True).chosen(mesh, cost_of)
    assert found == Sizes(8192, by_device=True)
