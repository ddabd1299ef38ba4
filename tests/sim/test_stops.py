"""Answers of unforeseen length: they end where the trace says, and nobody was told before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.core.request import FinishReason
from jdisagg.core.router_config import Reserving
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.traces import Trace, poisson
from tests.sim.test_cluster import cluster

LENGTHS = np.array([1, 2, 30, 7, 64, 3] * 20)
WORK = poisson(Trace(np.zeros(120), np.full(120, 300), LENGTHS), 50.0, 0)


def little_room(reserve: Reserving) -> Cluster:
    """Of pages for eight requests, were they as long as they may be."""
    given = cluster("prefill:tp2,decode:tp1", Trace(WORK.arrival_s, WORK.input_tokens, np.full(120, 512)))
    workers = [worker.config for worker in given.workers.values()]
    size = workers[0].page_size
    small = [replace(each, num_pages=8 * (812 // size)) if each.role.decodes else each for each in workers]
    return Cluster(small, given.costs, router=replace(PATIENT, reserve=reserve))


@pytest.mark.parametrize("reserve", Reserving)
def test_an_answer_ends_where_its_trace_says_whatever_it_asked_for(reserve: Reserving):
    run = little_room(reserve)
    outcome = run.run(WORK, limit=500)
    run.check_all_ended()
    assert [record.told_tokens for record in outcome.records] == LENGTHS.tolist()
    assert {record.reason for record in outcome.records} == {FinishReason.STOP}


def test_the_calendar_lets_more_run_at_once_than_may_grow_to_their_limit():
    """Once it has seen how long answers get, it promises places that early would not have given."""
    early, calendar = (little_room(reserve).run(WORK, limit=500) for reserve in (Reserving.EARLY, Reserving.CALENDAR))
    assert calendar.span_s < 0.8 * early.span_s
    assert np.median(calendar.values("TTFT")) < 0.8 * np.median(early.values("TTFT"))
