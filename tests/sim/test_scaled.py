"""Simulated workers change their roles: what a flip costs, and that it loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.scaling import Scaling
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import FREE_LINK, by_roofline, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.scaled import FlipCosts, ScaledCluster
from jdisagg.sim.traces import Trace, one_after_another

SCALING = Scaling(price_s=4.0, horizon_s=120.0, steady_s=5.0, rest_s=10.0)
D2 = WorkerId("decode-2")


def cluster(scaling: Scaling | None, costs: FlipCosts | None = None, mesh: str = "prefill:1xtp1,decode:3xtp1"):
    shape = Model(model("llama3-70b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("b200"), tp))
    given = cluster_spec(MeshSpec.parse(mesh), plain_settings(4200, max_num_seqs=4), cost_of, FREE_LINK)
    costs = costs or FlipCosts(2.0, 2.0)
    return ScaledCluster(given.workers, given.costs, given.links, scaling=scaling, flip_costs=costs)


def even(requests: int, seconds: float, tokens: tuple[int, int]) -> Trace:
    times = np.linspace(0.0, seconds, requests)
    return Trace(times, np.full(requests, tokens[0]), np.full(requests, tokens[1]))


def test_a_flip_takes_its_drain_and_its_change_and_every_request_ends():
    house = cluster(None, FlipCosts(0.5, 3.0))
    house._at(2.0, WorkerId("autoscaler"), None)
    house._look = lambda event: house.flip(D2, Role.PREFILL)
    outcome = house.run(even(40, 10.0, (500, 60)))
    house.check_all_ended()
    assert len(outcome.served) == 40 and house.workers[D2].config.role is Role.PREFILL
    began_s, joined_s = house.away_s[D2]
    assert began_s == pytest.approx(2.0, abs=0.01) and 3.0 <= joined_s - began_s < 3.6


def test_load_that_turns_to_prompts_turns_workers_to_prefill_and_back():
    prompts, outputs = even(220, 60.0, (4000, 2)), even(60, 60.0, (100, 300))
    house = cluster(SCALING)
    outcome = house.run(one_after_another([prompts, outputs], 1.0))
    house.check_all_ended()
    assert len(outcome.served) == 280
    flips = [(look.at_s, flip.role) for look in house.looks for flip in look.flips]
    assert flips and flips[0][1] is Role.PREFILL
    assert any(role is Role.DECODE for at_s, role in flips if at_s > 60.0)
    assert all(look.prefills and look.decodes for look in house.looks)
    alone = cluster(None).run(one_after_another([prompts, outputs], 1.0))
    assert outcome.attainment(2.0, 0.2) > alone.attainment(2.0, 0.2)


def test_equal_runs_flip_alike():
    course = even(120, 40.0, (4000, 2))
    runs = [cluster(SCALING) for _ in range(2)]
    for each in runs:
        each.run(course)
    assert runs[0].looks == runs[1].looks and any(look.flips for look in runs[0].looks)
