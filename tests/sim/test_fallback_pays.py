"""--colocated_fallback=auto against off, on equal hardware in virtual time: what is predicted comes true."""

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import cluster_spec, plain_settings, published
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.traces import Trace, poisson

MIXED = MeshSpec.parse("prefill:tp1,decode:tp1,colocated:tp1")
LOTS = np.random.default_rng(0)
LENGTHS = Trace(np.zeros(60), LOTS.integers(50, 1500, 60), LOTS.integers(20, 300, 60))


def served(rate_rps: float, link_bytes_per_s: float, *, fallback: bool) -> Outcome:
    settings = plain_settings(2048, max_num_batched_tokens=512)
    given = cluster_spec(MIXED, settings, published("opt-13b"), link_bytes_per_s)
    config = replace(PATIENT, colocated_fallback=fallback)
    cluster = Cluster(given.workers, given.costs, given.links, router=config)
    outcome = cluster.run(poisson(LENGTHS, rate_rps, 1))
    cluster.check_all_ended()
    return outcome


def latency_s(outcome: Outcome) -> float:
    return float(np.mean([record.end_s - record.arrival_s for record in outcome.records]))


def colocated_share(outcome: Outcome) -> float:
    return float(np.mean([record.prefill_worker.startswith("colocated") for record in outcome.records]))


@pytest.mark.parametrize(("link_bytes_per_s", "gain"), [(1e9, 0.15), (25e9, 0.01)], ids=["slow link", "fast link"])
def test_fallback_shortens_the_mean_latency(link_bytes_per_s, gain):
    """On a link that a 13B model's KV fills, by more than on one that it does not."""
    off, auto = (served(1.0, link_bytes_per_s, fallback=fallback) for fallback in (False, True))
    assert colocated_share(off) == 0 < colocated_share(auto) < 1
    assert latency_s(auto) < (1 - gain) * latency_s(off)


def test_a_slower_link_sends_more_to_the_colocated_worker():
    slow, fast = (colocated_share(served(1.0, link, fallback=True)) for link in (1e9, 25e9))
    assert slow > fast
