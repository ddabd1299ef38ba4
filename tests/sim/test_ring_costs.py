"""What a ring's dispatch costs: ticks counted by hand, the links that it goes over, and clusters that have one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, Schedule
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import Role
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import FREE_LINK, by_roofline, cluster_spec, plain_settings, published
from jdisagg.sim.cost_models import Model, RingRoofline, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.measured import cluster_spec_of
from jdisagg.sim.planner.space import CandidateSource
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson
from tests.sim.profiles import LATENCY_S, profile, step_s

H100, SHAPE = hardware("h100"), Model(model("llama3-8b"))
WORK = poisson(Trace(np.zeros(40), np.full(40, 300), np.full(40, 37)), 20.0)
RING = "prefill:tp1,decode:ring2"


def dispatch(batch: int, turns: int) -> DecodeRows:
    return DecodeRows(0, tuple(range(batch)), 1, widths=(turns,) * batch, turns=True)


def ring(pp: int = 2, tp: int = 1, host_devices: int = 0, **chip: float) -> RingRoofline:
    return RingRoofline(Roofline(SHAPE, replace(H100, **chip), tp), pp, host_devices)


def free_links(pp: int) -> RingRoofline:
    return ring(pp, link_bytes_per_s=1e30, nic_bytes_per_s=1e30, collective_s=0.0)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("turns", [1, 8])
def test_a_dispatch_is_its_ticks_each_a_stage_of_one_microbatch(pp: int, turns: int):
    cost, context = free_links(pp), 64 * 1000
    stage_s = (cost.stages.decode_s(dispatch(64 // pp, 1), context // pp) - cost.stages.host_s) / pp
    ends = context + 64 * (turns - 1) // 2  # tokens are counted when the last turn is over
    found_s = cost.decode_s(dispatch(64, turns), ends)
    assert found_s == pytest.approx(cost.stages.host_s + (turns * pp + pp - 1) * stage_s, rel=1e-3)


def test_more_turns_a_dispatch_make_a_token_cheaper_and_never_as_cheap_as_without_a_bubble():
    cost, context = free_links(4), 64 * 1000
    a_token = [cost.decode_s(dispatch(64, turns), context) / turns for turns in (1, 4, 8, 64)]
    assert a_token == sorted(a_token, reverse=True)
    stages_s = cost.stages.decode_s(dispatch(16, 1), context // 4) - cost.stages.host_s
    assert a_token[-1] > stages_s


def test_layers_that_do_not_divide_are_padded():
    three, four = free_links(3), free_links(4)  # 32 layers: 11 places for 10.67, and 8 for 8
    share = three.decode_s(dispatch(12, 1), 12) - three.stages.host_s
    even = 5 * (three.stages.decode_s(dispatch(4, 1), 4) - three.stages.host_s) / 3
    assert share == pytest.approx(even * 33 / 32)
    assert four.decode_s(dispatch(12, 1), 12) > 0


def test_a_tick_over_hosts_pays_the_nic_for_what_goes_between_them():
    near, far = ring(2, 4), ring(2, 4, host_devices=4)
    row, logits = SHAPE.row_bytes(8), 8 * SHAPE.config.vocab_size * 4
    nic = H100.nic_bytes_per_s * H100.link
    between_s = (row / 4 + row + row + logits / 4 / 2) / nic  # sums over all and over columns, the hop, the gather
    inside_s = (2 * row * 3 / 4 + logits * 3 / 4) / (H100.link_bytes_per_s * H100.link)
    assert far.links_s(8) == pytest.approx(4 * H100.collective_s + between_s + inside_s)
    assert far.links_s(8) > near.links_s(8) > 4 * H100.collective_s
    assert ring(2, 4, host_devices=8).links_s(8) == near.links_s(8)


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("turns", [1, 8])
def test_every_request_ends_with_the_tokens_it_asked_for(turns: int, fast_forward: bool):
    cost_of = by_roofline(lambda tp: Roofline(SHAPE, H100, tp))
    settings = plain_settings(4096, max_num_seqs=512, multi_step=turns)
    cluster = simulated(
        cluster_spec(MeshSpec.parse(RING), settings, cost_of, FREE_LINK),
        fast_forward=fast_forward,
    )
    outcome = cluster.run(WORK)
    cluster.check_all_ended()
    assert [each.output_tokens for each in outcome.served] == [37] * len(WORK)


def test_a_lone_request_takes_its_dispatches():
    """A first token, 36 more: four dispatches of 8 and one of 4, each as long as its cost."""
    work = Trace(np.zeros(1), np.full(1, 300), np.full(1, 37))
    settings = plain_settings(4096, max_num_seqs=512, multi_step=8)
    given = cluster_spec(MeshSpec.parse(RING), settings, by_roofline(lambda tp: Roofline(SHAPE, H100, tp)), FREE_LINK)
    cost = given.costs[given.workers[-1].worker]
    turns = [8, 8, 8, 8, 4]
    expected = sum(cost.decode_s(dispatch(1, each), 300) for each in turns)
    (served,) = simulated(given).run(work).served
    assert served.end_s - served.first_s == pytest.approx(expected, rel=0.02)


def test_what_was_not_measured_as_a_ring_is_not_priced_as_one():
    place = MeshSpec.parse(RING).workers()[-1]
    with pytest.raises(ConfigError, match="decode-0 is a ring of 2; only stages were measured: say pp2"):
        published("opt-13b")(place)


def test_a_profiled_rings_turns_lie_between_those_that_were_timed():
    made = profile(RING)
    given = cluster_spec_of(made, MeshSpec.parse(RING))
    cost = given.costs[given.workers[-1].worker]
    assert cost.decode_s(dispatch(2, 1), 64) == pytest.approx(step_s(2, 32))
    assert cost.decode_s(dispatch(2, 8), 64) == pytest.approx(8 * step_s(2, 32))
    assert cost.decode_s(dispatch(2, 4), 64) == pytest.approx(4 * step_s(2, 32))
    outcome = simulated(given).run(poisson(Trace(np.zeros(9), np.full(9, 20), np.full(9, 12)), 5.0))
    assert len(outcome.served) == 9 and LATENCY_S > 0
    with pytest.raises(ConfigError, match=r"decode-0 is decode:pp2tp1; the profile is of .*decode:ring2tp1"):
        cluster_spec_of(made, MeshSpec.parse("prefill:tp1,decode:pp2"))


def test_the_space_has_rings_where_they_are_asked_for_and_of_decode_workers_alone():
    meshes = {str(each.mesh) for each in CandidateSource(4, schedules=tuple(Schedule), chunks=(512,))}
    assert {"prefill:2xtp1,decode:ring2", "prefill:2xtp1,decode:pp2"} <= meshes
    assert not any("ring" in str(each.mesh) for each in CandidateSource(4, chunks=(512,)))
    assert all(
        pool.role is Role.DECODE for each in meshes for pool in MeshSpec.parse(each).pools if "ring" in str(pool)
    )
