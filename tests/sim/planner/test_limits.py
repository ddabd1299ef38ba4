"""Bounds by arithmetic: each resource's own formula, and no simulation does better."""

import math
from dataclasses import replace

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.sim.planner.limits import CapacityModel, InfeasibleError
from jdisagg.sim.planner.problem import Objectives
from tests.sim.planner.cases import Lines, candidate, problem, search


def limits(asked, mesh: str, chunk_tokens: int = 512):
    return CapacityModel(asked).limits(candidate(mesh, chunk_tokens))


def test_prefill_carries_what_its_devices_compute():
    found = limits(problem("mix:1024+20"), "prefill:2xtp1,decode:tp1")
    assert found.prefill == pytest.approx(2 / (2 * (1e-3 + 512e-4)))
    assert found.prompt_device_s == pytest.approx(2e-3 + 1024e-4)
    hasty = limits(problem("mix:1024+20", objectives=Objectives(0.15, 0.03)), "prefill:2xtp1,decode:tp1")
    assert hasty.queue < 0.9 * hasty.prefill and hasty.binding == "queue"


def test_prefill_stages_carry_as_much_as_workers_of_their_own_and_answer_long_prompts_sooner():
    asked = problem("mix:1024+20")
    apart, staged = (limits(asked, mesh) for mesh in ("prefill:2xtp1,decode:tp1", "prefill:pp2,decode:tp1"))
    assert staged.prefill == pytest.approx(apart.prefill)
    hasty = problem("mix:1024+20", objectives=Objectives(0.09, 0.03))  # two chunks of 52 ms, or three halves
    assert limits(hasty, "prefill:pp2,decode:tp1").queue > 0
    with pytest.raises(InfeasibleError, match="unloaded TTFT"):
        limits(hasty, "prefill:2xtp1,decode:tp1")


def test_decode_carries_its_slots_where_steps_are_short_enough():
    found = limits(problem("mix:1000+20"), "prefill:tp1,decode:2xtp1")
    assert found.decode == pytest.approx(2 * 64 / (20 * 10e-3), rel=1e-3)


def test_prompts_between_steps_cost_a_worker_of_both_roles_its_decode():
    split, whole = (limits(problem("mix:1000+20"), mesh) for mesh in ("prefill:tp1,decode:tp1", "colocated:tp1"))
    assert whole.decode == pytest.approx((1 - 10 / 30) / (1000e-4 + 2e-3), rel=0.02)  # steps of 10 ms within 30
    assert whole.decode < split.decode / 10


def test_pages_bound_the_sequences_that_are_held():
    found = limits(problem("mix:1000+20", kv_tokens=10_100), "prefill:tp1,decode:tp1")
    assert found.memory == pytest.approx(10 / (20 * 10e-3), rel=0.01)


def test_the_narrower_side_of_the_link_counts():
    asked = problem("mix:1000+20", device_bytes_per_s=5e6)
    assert limits(asked, "prefill:2xtp1,decode:tp1").link == pytest.approx(5.0)
    assert limits(asked, "prefill:2xtp1,decode:tp2").link == pytest.approx(10.0)
    assert limits(asked, "colocated:2xtp1").link == math.inf
    assert limits(asked, "prefill:2xtp1,decode:tp1").binding == "link"


def test_objectives_that_one_request_alone_misses_are_refused_with_both_values():
    with pytest.raises(InfeasibleError, match=r"TTFT of 102 ms is over the objective of 50 ms"):
        limits(problem(objectives=Objectives(0.05, 0.03)), "prefill:tp1,decode:tp1")
    with pytest.raises(InfeasibleError, match=r"TPOT of 10 ms is over the objective of 5 ms"):
        limits(problem(objectives=Objectives(1.0, 0.005)), "prefill:tp1,decode:tp1")
    with pytest.raises(ConfigError, match="weights"):
        limits(problem(kv_tokens=0), "colocated:tp1")


@pytest.mark.parametrize("mesh", ["prefill:tp1,decode:tp1", "colocated:2xtp1"])
def test_no_simulation_beats_its_bound(mesh):
    asked = replace(problem("mix:1000+5,300+8", lines=Lines(step_s=5e-3)), devices=0)
    trying = search(asked, seeds=1)
    bounded = trying.bounded(candidate(mesh))
    assert bounded
    (scored,) = trying.race([bounded], "one")
    assert 0.5 * bounded.bound < scored.goodput <= 1.05 * bounded.bound
