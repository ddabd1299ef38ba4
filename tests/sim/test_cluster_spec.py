"""Pools of unlike devices, and hosts whose workers share a NIC."""

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.core.default_sizes import Devices, choose_page_size, choose_sizes
from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import Role
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import FREE_LINK, Hosts, by_device, cluster_spec, devices_of, plain_settings, published
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.links import DomainLinks
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson

SHAPE = Model(model("llama3-8b"))
WORK = poisson(Trace(np.zeros(30), np.full(30, 4000), np.full(30, 20)), 20.0)


def pools(text: str, **more) -> dict[str, float]:
    """Mean seconds by metric, of two prefill workers and two that decode."""
    cost_of = by_device(devices_of(text), lambda chip, tp: Roofline(SHAPE, chip, tp))
    more = {"port_bytes_per_s": FREE_LINK, **more}
    mesh, settings = MeshSpec.parse("prefill:2xtp1,decode:2xtp1"), plain_settings(8192, max_num_seqs=256)
    cluster = simulated(cluster_spec(mesh, settings, cost_of, **more))
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
            sizes = plain_settings(16384, max_num_seqs=256, max_num_batched_tokens=1024)
            cluster = simulated(cluster_spec(MeshSpec.parse(mesh), sizes, cost_of, FREE_LINK))
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
    mesh, settings = MeshSpec.parse("prefill:tp1,decode:tp1"), plain_settings(8192, max_num_seqs=256)
    prefill, decode = cluster_spec(mesh, settings, cost_of, FREE_LINK).workers
    assert decode.num_pages > 5 * prefill.num_pages


def test_a_shared_nic_slows_what_its_workers_ship_and_a_network_that_is_off_slows_nothing():
    """Two hosts of two workers each: those of a kind stand together."""
    free, apart, shared = (pools("h100", **more) for more in ({}, {"port_bytes_per_s": 5e9}, {"hosts": Hosts(2, 5e9)}))
    assert free["TPOT"] < apart["TPOT"] < shared["TPOT"]
    assert pools("h100", hosts=Hosts(4, 5e9))["TPOT"] == pytest.approx(free["TPOT"]), "one host: no NIC is crossed"


def test_hosts_take_workers_in_the_meshs_order():
    cost = Roofline(SHAPE, devices_of("h100")[Role.DECODE])
    mesh = MeshSpec.parse("prefill:2xtp1,decode:2xtp1")
    links = cluster_spec(mesh, plain_settings(8192), lambda _: (cost, 9999), FREE_LINK, Hosts(3, 1.0)).links
    assert isinstance(links, DomainLinks)
    assert links.places[WorkerId("prefill-1")] == links.places[WorkerId("decode-0")] == ("host-0",)
    assert links.places[WorkerId("decode-1")] == ("host-1",)


def settings_of(*, chosen: bool) -> Settings:
    """The server's own, or with constants in place of what devices ask for."""
    return Settings(max_model_len=8192) if chosen else plain_settings(8192, max_num_seqs=256)


def steps_per_dispatch(mesh: str, devices: str = "h100", *, chosen: bool = False) -> dict[str, int]:
    cost_of = by_device(devices_of(devices), lambda chip, tp: Roofline(SHAPE, chip, tp))
    found = cluster_spec(MeshSpec.parse(mesh), settings_of(chosen=chosen), cost_of, FREE_LINK).workers
    return {each.worker: each.decode.steps_per_dispatch for each in found}


def test_workers_take_the_steps_per_dispatch_that_a_run_on_their_devices_would():
    assert steps_per_dispatch("prefill:tp1,decode:tp1", chosen=True) == {"prefill-0": 1, "decode-0": 32}
    assert steps_per_dispatch("prefill:tp1,decode:pp2tp1", chosen=True)["decode-0"] == 1
    assert steps_per_dispatch("prefill:tp1,decode:ring2", chosen=True)["decode-0"] == 8
    assert steps_per_dispatch("colocated:tp1", chosen=True) == {"colocated-0": 8}
    assert steps_per_dispatch("prefill:tp1,decode:tp1", "xeon8480", chosen=True)["decode-0"] == 1, "it is a CPU"
    assert steps_per_dispatch("prefill:tp1,decode:tp1")["decode-0"] == 1


def test_the_host_is_paid_once_a_dispatch_and_all_else_turn_by_turn():
    cost, rows = Roofline(SHAPE, devices_of("h100")[Role.DECODE]), tuple(range(4))
    steps = sum(cost.decode_s(DecodeRows(0, rows, 1), 4000 + 4 * turn) for turn in range(1, 9))
    dispatch = cost.decode_s(DecodeRows(0, rows, 1, widths=(8,) * 4, turns=True), 4000 + 4 * 8)
    assert steps - dispatch == pytest.approx(7 * cost.host_s, rel=1e-6)


def test_turns_bring_tokens_sooner_where_nobody_is_about_to_come():
    def tpot_s(*, chosen: bool = False) -> float:
        cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
        mesh = MeshSpec.parse("prefill:tp1,decode:tp1")
        cluster = simulated(cluster_spec(mesh, settings_of(chosen=chosen), cost_of, FREE_LINK))
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
    found = cluster_spec(mesh, Settings(max_model_len=8192), cost_of, FREE_LINK).workers[0]
    devices = Devices(chip.platform, chip, None)
    kv = KVLayout.of(SHAPE.config, 1, "bfloat16", chip.platform == "tpu")
    size = choose_page_size(Settings(), mesh, devices, kv, 8192)
    room = dict.fromkeys((each.worker for each in mesh.workers()), None)
    run = choose_sizes(Settings(), SHAPE.config, mesh, (devices, devices), size, 8192, room)
    assert (found.page_size, found.prefill_buckets[-1], found.max_chunk_seqs) == (page, tokens, prompts)
    assert (size.value, run.max_num_batched_tokens, run.max_chunk_seqs) == (page, tokens, prompts)


def test_sizes_that_settings_say_stay_and_costs_of_no_device_have_constants():
    mesh = MeshSpec.parse("prefill:tp1,decode:pp2tp1")
    cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
    said = Settings(max_model_len=8192, page_size=512, max_num_batched_tokens=1000, max_num_seqs=10)
    (_, decode) = cluster_spec(mesh, said, cost_of, FREE_LINK).workers
    assert (decode.page_size, decode.num_slots) == (512, 10)
    prefill, decode = cluster_spec(mesh, Settings(max_model_len=2048), published("opt-13b"), FREE_LINK).workers
    assert (prefill.page_size, prefill.prefill_buckets, prefill.max_chunk_seqs) == (16, (2048,), 64)
    assert decode.num_slots == 2 * 256


def test_a_worker_in_another_role_is_what_the_mesh_would_have_there():
    mesh = MeshSpec.parse("prefill:tp1,decode:tp1")
    cost_of = by_device(devices_of("h100"), lambda chip, tp: Roofline(SHAPE, chip, tp))
    given = cluster_spec(mesh, Settings(max_model_len=8192), cost_of, FREE_LINK)
    prefill, decode = given.workers
    assert given.in_role is not None
    for one, other in ((prefill, decode), (decode, prefill)):
        flipped = given.in_role(one, other.role)
        flipped.check()
        assert flipped == replace(other, worker=one.worker)
