"""The planner against DistServe's placements (Zhong et al., OSDI 2024, table 3), from its published coefficients.

Fits, lengths, memory ("parked"), numbers of requests and the rest are those of `test_distserve`. OPT-13B: whatever four
devices can hold, at the objectives of DistServe's own repository (200 / 100 ms). The placement with the highest goodput
a device must be theirs. Runs of so few requests carry more than devices can for long, so bounds by arithmetic neither
prune nor cap here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.core.mesh_spec import WorkerMesh
from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster_spec import FREE_LINK, ClusterSpec, cluster_spec, published
from jdisagg.sim.cost_models import CostModel, distserve_kv_tokens
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.search import RunBudget, SearchRun
from jdisagg.sim.planner.space import CandidateSource, PlanCandidate
from tests.published.full_files import full_file
from tests.published.gates import hold, in_order
from tests.published.test_distserve import FIELDS, LENGTHS, REQUESTS_PER_GPU, SIZES, sharegpt

SEEDS = 3


@pytest.fixture
def lengths(request: pytest.FixtureRequest) -> Path:
    return full_file(request, LENGTHS)


def parked(model: str, candidate: PlanCandidate) -> ClusterSpec:
    """Costs as published; decode workers hold what prefill's would park, too."""
    cost_of, places = published(model), candidate.mesh.workers()
    prefills = [each for each in places if each.role is Role.PREFILL]
    room = sum(distserve_kv_tokens(model, each.tp, each.pp) for each in prefills)
    decodes = len(places) - len(prefills)

    def with_room(place: WorkerMesh) -> tuple[CostModel, int]:
        cost, tokens = cost_of(place)
        return cost, tokens + (room // decodes if place.role is Role.DECODE else 0)

    return cluster_spec(candidate.mesh, SIZES["DistServe"], with_room, FREE_LINK, **FIELDS["DistServe"])


def best_placements(path: Path, model: str, objectives: Objectives, candidates: list[PlanCandidate]) -> list[tuple]:
    """(mesh, goodput a device), best first; of those that were not the best, what they were known to be under."""
    effort = RunBudget(requests_per_device=REQUESTS_PER_GPU[model])
    problem = Problem(WorkloadSpec(sharegpt(path)), objectives, lambda candidate: parked(model, candidate))
    search = SearchRun(
        problem, short=replace(effort, seeds=SEEDS), tolerance=0.02, most=len(candidates), slack=math.inf
    )
    ranked = search.race(search.with_limits(candidates), model)
    print(f"\n{model}: {search.counts}")
    for each in ranked[:6]:
        print(f"  {each.bounded.candidate.mesh} {'' if each.is_exact else 'under '}{each.goodput:.3g}")
    return [(str(each.bounded.candidate.mesh), each.goodput) for each in ranked]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_best_placement_of_opt_13b_on_four_devices_is_distserves(lengths):
    among = [each for each in CandidateSource(4, (1, 2, 4), (1, 2), (2048,), fill=False) if len(each.mesh.pools) > 1]
    ranked = best_placements(lengths, "opt-13b", Objectives(0.2, 0.1), among)
    theirs = "prefill:tp2,decode:tp1"
    hold(in_order("DistServe table 3: OPT-13B within 4 GPUs, 200/100 ms", theirs, ranked[0][0], ranked[0][0] == theirs))
