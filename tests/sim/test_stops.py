"""Answers of unforeseen length: they end where the trace says, and nobody was told before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.core.request import FinishReason
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.traces import Trace, poisson
from tests.sim.test_cluster import cluster

LENGTHS = np.array([1, 2, 30, 7, 64, 3] * 20)
WORK = poisson(Trace(np.zeros(120), np.full(120, 300), LENGTHS), 50.0, 0)


def small_cluster(reserve_tokens: int) -> Cluster:
    """Returns a cluster with pages for eight requests of the longest output."""
    given = cluster("prefill:tp2,decode:tp1", Trace(WORK.arrival_s, WORK.input_tokens, np.full(120, 512)))
    workers = [worker.config for worker in given.workers.values()]
    size = workers[0].page_size
    small = [
        replace(each, num_pages=8 * (812 // size), reserve_tokens=reserve_tokens) if each.role.decodes else each
        for each in workers
    ]
    return Cluster(small, given.costs)


@pytest.mark.parametrize("reserve_tokens", [16, 512])
def test_an_answer_ends_where_its_trace_says_whatever_it_asked_for(reserve_tokens: int):
    run = small_cluster(reserve_tokens)
    outcome = run.run(WORK, limit=500)
    run.check_all_ended()
    assert [record.emitted_tokens for record in outcome.records] == LENGTHS.tolist()
    assert {record.reason for record in outcome.records} == {FinishReason.STOP}


def test_a_short_reserve_lets_more_run_at_once_than_may_grow_to_their_limit():
    long, short = (small_cluster(tokens).run(WORK, limit=500) for tokens in (512, 16))
    assert short.span_s < 0.8 * long.span_s
    assert np.median(short.values("TTFT")) < 0.8 * np.median(long.values("TTFT"))
