"""A worker that is slower than its like is given less: its pace is measured, and `cache_aware` weighs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster import PATIENT
from jdisagg.sim.cluster_spec import FREE_LINK, by_roofline, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.shared import simulated
from tests.sim.test_scaled import even


def served_by(routing: Routing, slow: str) -> Counter[str]:
    """Requests of each worker in its role, where `slow` stands on an older chip than its like."""
    shape = Model(model("llama3-8b"), "bfloat16")
    mesh = MeshSpec.parse("prefill:2xtp1,decode:2xtp1")
    costs = by_roofline(lambda tp: Roofline(shape, hardware("b200"), tp))
    given = cluster_spec(mesh, plain_settings(4200, max_num_seqs=64), costs, FREE_LINK)
    costs = given.costs | {WorkerId(slow): Roofline(shape, hardware("a100"), 1)}
    cluster = simulated(replace(given, costs=costs), router=replace(PATIENT, routing=routing))
    outcome = cluster.run(even(400, 60.0, (1500, 100)))
    assert all(each.is_served for each in outcome.records)
    return Counter(name for each in outcome.records for name in (each.prefill_worker, each.decode_worker))


@pytest.mark.parametrize(("slow", "quick"), [("decode-1", "decode-0"), ("prefill-1", "prefill-0")])
def test_cache_aware_gives_the_slower_of_two_workers_less(slow: str, quick: str):
    served = served_by(Routing.CACHE_AWARE, slow)
    assert 0 < served[slow] < served[quick] / 2
    equal = served_by(Routing.ROUND_ROBIN, slow)
    assert equal[slow] == equal[quick]
