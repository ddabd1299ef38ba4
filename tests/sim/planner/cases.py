"""A small world for the planner: straight lines for costs, a workload of one or two kinds of request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, WorkerMesh
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.cluster_spec import plain_settings
from jdisagg.sim.cost_models import Contexts, Times
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.search import RunBudget, SearchRun
from jdisagg.sim.planner.space import CandidateBuilder, PlanCandidate
from jdisagg.sim.traces.workloads import read_workload

TOKEN_BYTES = 1000.0
QUICK = RunBudget(0.5, 0.5, 0.1, least_requests=60)


@dataclass(frozen=True, slots=True)
class Lines:
    """`tp` devices do a plan's tokens `tp` times as fast; a step costs the same however many take part."""

    tp: int = 1
    prompt_token_s: float = 1e-4
    step_s: float = 10e-3

    def prefill_s(self, plan: PrefillChunks) -> float:
        return 1e-3 + self.prompt_token_s * plan.num_tokens / self.tp

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        return self.step_s / self.tp

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return np.full(context_tokens.shape, self.step_s / self.tp, np.float64)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return TOKEN_BYTES * transfer.num_tokens


PATIENT, LINES = Objectives(1.0, 0.03), Lines()


def problem(
    text: str = "mix:1000+6",
    devices: int = 4,
    objectives: Objectives = PATIENT,
    lines: Lines = LINES,
    kv_tokens: int = 200_000,
    device_bytes_per_s: float = 0.0,
) -> Problem:
    """`kv_tokens` of one device; weights want at least 1 of them."""

    def cost_of(place: WorkerMesh) -> tuple[Lines, int]:
        tokens = kv_tokens * place.tp * place.pp
        if tokens < 1:
            raise ConfigError("100 bytes of weights, over 0")
        return replace(lines, tp=place.tp), tokens

    lengths = read_workload(text)
    longest = int((lengths.input_tokens + lengths.output_tokens).max())
    builder = CandidateBuilder(plain_settings(longest, max_num_seqs=64), cost_of, device_bytes_per_s)
    return Problem(WorkloadSpec(lengths), objectives, builder.build, devices)


def candidate(mesh: str, chunk_tokens: int = 512) -> PlanCandidate:
    return PlanCandidate(MeshSpec.parse(mesh), chunk_tokens)


def search(asked: Problem, seeds: int = 1) -> SearchRun:
    return SearchRun(asked, QUICK, QUICK, seeds, 0.08)
