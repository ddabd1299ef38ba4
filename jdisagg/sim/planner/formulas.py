"""Replica counts from throughputs and correction factors: the formulas of NVIDIA Dynamo's SLA planner, by their names.

A correction factor is what was observed over what was expected. Throughputs are tokens a second and device; `*_gpus`
are devices of one engine. They know no queue and no page: a first estimate, not an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.sim.planner.limits import Arithmetic
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.space import Candidate, Kind, devices_of


def prefill_replicas(
    rate_rps: float, isl: float, prefill_thpt_per_gpu: float, prefill_engine_gpus: int, p_correction_factor: float = 1.0
) -> int:
    """A prompt that waits no longer than expected needs no more engines: the factor only ever lowers the load."""
    load = rate_rps * isl * min(1.0, p_correction_factor)
    return max(1, math.ceil(load / prefill_thpt_per_gpu / prefill_engine_gpus))


def decode_replicas(rate_rps: float, osl: float, decode_thpt_per_gpu: float, decode_engine_gpus: int) -> int:
    """The throughput is that at `corrected_itl` and the mean tokens that a step reads (there: isl + osl / 2)."""
    return max(1, math.ceil(rate_rps * osl / decode_thpt_per_gpu / decode_engine_gpus))


def corrected_itl(itl_s: float, d_correction_factor: float = 1.0) -> float:
    """The step time to aim at, where steps turn out `d_correction_factor` times as long as expected."""
    if not d_correction_factor > 0:
        raise ConfigError(f"a correction factor of {d_correction_factor:g} must be above 0")
    return itl_s / d_correction_factor


@dataclass(frozen=True, slots=True)
class Estimate:
    """Engines of one pair of shapes that carry a rate."""

    candidate: Candidate

    @property
    def devices(self) -> int:
        return self.candidate.devices


def estimates(
    problem: Problem,
    shapes: Iterable[Candidate],
    rate_rps: float,
    p_correction_factor: float = 1.0,
    d_correction_factor: float = 1.0,
) -> list[Estimate]:
    """Of each pair of shapes (a disaggregated candidate, its counts ignored) as many as the formulas say; fewest
    devices first. Throughputs are those of the candidate's costs. Pairs that cannot be built are left out."""
    objectives = problem.objectives
    aimed = replace(objectives, tpot_s=corrected_itl(objectives.tpot_s, d_correction_factor))
    arithmetic = Arithmetic(replace(problem, objectives=aimed))
    pairs = {_pair(shape): None for shape in shapes if shape.kind is Kind.DISAGGREGATED}
    found = [_estimate(problem, arithmetic, pair, rate_rps, p_correction_factor) for pair in pairs]
    return sorted((each for each in found if each), key=lambda each: each.devices)


def _pair(shape: Candidate) -> Candidate:
    pools = tuple(replace(pool, count=1) for pool in shape.mesh.pools)
    return replace(shape, mesh=MeshSpec(pools))


def _estimate(
    problem: Problem, arithmetic: Arithmetic, pair: Candidate, rate_rps: float, p_correction_factor: float
) -> Estimate | None:
    try:
        limits = arithmetic.limits(pair)
    except ConfigError:
        return None
    means, (prefill, decode) = problem.workload.means, pair.mesh.pools
    prefill_thpt, decode_thpt = limits.prefill * means.input_tokens, limits.decode * means.output_tokens
    if not decode_thpt:
        return None
    prefills = prefill_replicas(
        rate_rps, means.input_tokens, prefill_thpt / devices_of(prefill), devices_of(prefill), p_correction_factor
    )
    decodes = decode_replicas(rate_rps, means.output_tokens, decode_thpt / devices_of(decode), devices_of(decode))
    return Estimate(replace(pair, mesh=_of(prefill, prefills, decode, decodes)))


def _of(prefill: PoolSpec, prefills: int, decode: PoolSpec, decodes: int) -> MeshSpec:
    return MeshSpec((replace(prefill, count=prefills), replace(decode, count=decodes)))
