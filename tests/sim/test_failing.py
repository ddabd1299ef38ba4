"""Simulated workers are lost and come back: what it costs, and that nothing else is lost with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import ClusterSpec, by_roofline, cluster_spec, devices_of, plain_settings, with_tiers
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.failing import FailingCluster, LossSchedule, describe_losses, drawn_losses, failing
from jdisagg.sim.hardware import hardware
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.tiers import TierSpec, tier_speeds
from jdisagg.sim.traces import Trace

P0, D0, D1 = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-1")
MESH = MeshSpec.parse("prefill:2xtp1,decode:2xtp1")


def spec() -> ClusterSpec:
    shape = Model(model("llama3-70b"), "bfloat16")
    costs = by_roofline(lambda tp: Roofline(shape, hardware("b200"), tp))
    return cluster_spec(MESH, plain_settings(4200, max_num_seqs=16), costs, 10e9)


def trace(requests: int, seconds: float) -> Trace:
    times = np.linspace(0.0, seconds, requests)
    return Trace(times, np.full(requests, 1500), np.full(requests, 120))


def run(losses: Sequence[tuple[float, WorkerId]], noticed_s: float = 1.0, back_s: float = 6.0, requests: int = 60):
    cluster = failing(spec(), LossSchedule(losses, noticed_s, back_s))
    outcome = cluster.run(trace(requests, requests / 2))
    cluster.check_all_ended()
    return cluster, outcome


def latency_s(outcome: Outcome) -> float:
    return sum(record.latency_s for record in outcome.records)


def test_without_losses_it_is_the_cluster_that_loses_nobody():
    _, outcome = run([])
    steady = FailingCluster.__bases__[0](spec().workers, spec().costs, spec().links, message_s=spec().message_s)
    assert latency_s(outcome) == latency_s(steady.run(trace(60, 30.0)))


@pytest.mark.parametrize("worker", [P0, D0])
def test_who_is_lost_costs_time_and_no_request(worker):
    cluster, outcome = run([(10.0, worker)])
    assert cluster.lost == [(10.0, worker)] and worker in cluster.workers
    assert len(outcome.served) == 60 and all(record.emitted_tokens == 120 for record in outcome.records)
    assert latency_s(outcome) > latency_s(run([])[1])
    assert "1 workers were lost (" in describe_losses(cluster)


@pytest.mark.parametrize("at_s", np.linspace(9.0, 11.0, 13))
def test_a_worker_may_be_lost_at_any_moment(at_s):
    """Of steps, of transfers and of messages."""
    for worker in (P0, D0):
        assert len(run([(float(at_s), worker)], requests=25)[1].served) == 25


def test_what_is_noticed_later_and_who_comes_back_later_costs_more():
    costs = [latency_s(run([(10.0, D0)], *late)[1]) for late in ((0.1, 0.1), (3.0, 0.1), (3.0, 30.0))]
    assert costs == sorted(costs) and len(set(costs)) == 3


def test_all_of_a_role_are_waited_for():
    cluster, outcome = run([(10.0, D0), (10.5, D1), (10.6, D1), (25.0, D0)])
    assert [name for _, name in cluster.lost] == [D0, D1, D0], "who is away is not lost again"
    assert len(outcome.served) == 60


def test_losses_are_drawn_at_the_rate_that_is_asked_for_and_the_same_for_a_seed():
    workers = spec().workers
    drawn = drawn_losses(workers, 100.0, 10_000.0, seed=1)
    assert 320 < len(drawn) < 480 and drawn == sorted(drawn) == drawn_losses(workers, 100.0, 10_000.0, seed=1)
    assert {name for _, name in drawn} == {config.worker for config in workers}
    assert drawn != drawn_losses(workers, 100.0, 10_000.0, seed=2)


def test_tiers_are_refused_by_name():
    given = with_tiers(spec(), TierSpec(tier_speeds(MESH, devices_of("b200"), {}), 0), 1000, 0)
    with pytest.raises(ConfigError, match="--lost_every_s: neither shared cores nor tiers"):
        failing(given, LossSchedule([]))
