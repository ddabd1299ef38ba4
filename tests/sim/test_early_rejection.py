"""Requests that state objectives, simulated: over a cluster's limit, refusing early serves more of them in time."""

import numpy as np
import pytest

from jdisagg.sim.outcome import SLO, Outcome
from jdisagg.sim.traces import Trace, poisson
from tests.sim.test_cluster import cluster

MESH, NUMBER = "prefill:tp2,decode:tp1", 150


def steady(rate_rps: float) -> Trace:
    return poisson(Trace(np.zeros(NUMBER), np.full(NUMBER, 512), np.full(NUMBER, 32)), rate_rps, 0)


def both(rate_rps: float, slo: SLO) -> tuple[Outcome, Outcome]:
    """All taken, and not."""
    work = steady(rate_rps)
    return cluster(MESH, work).run(work), cluster(MESH, work).run(work, asks=slo)


def test_where_all_are_in_time_nobody_is_refused():
    for outcome in both(4.0, SLO(1.0, 0.1)):
        assert outcome.attainment(1.0, 0.1) == 1.0


@pytest.mark.parametrize("rate_rps", [40.0, 60.0])
def test_above_what_a_cluster_can_do_more_are_in_time_where_others_are_refused(rate_rps: float):
    everybody, chosen = both(rate_rps, SLO(0.5, 0.1))
    before, after = (outcome.attainment(0.5, 0.1) for outcome in (everybody, chosen))
    assert before < 0.5 and after > 1.5 * before
    known_s = min(record.end_s for record in chosen.served)  # before the first end nobody is refused
    taken = [record for record in chosen.served if record.arrival_s > known_s]
    assert sum(record.meets(0.5, 0.1) for record in taken) >= 0.9 * len(taken) > 0, "who is taken is in time"


def test_a_pace_that_nobody_has_is_refused_to_all_but_those_before_it_is_known():
    _, chosen = both(10.0, SLO(10.0, 1e-4))
    known_s = min(record.end_s for record in chosen.served)
    assert {record.reason for record in chosen.records if record.arrival_s > known_s + 0.01} == {"rejected"}
