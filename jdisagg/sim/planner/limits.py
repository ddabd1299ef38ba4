"""Upper bounds of a candidate's rate by arithmetic, without simulation.

Each resource has a rate of mean requests that it sustains: prefill's devices, the queue before them (Lindley's
recursion with the workload's own prompts), decode steps short enough for the TPOT objective, pages for KV, and
ports. The least is an upper bound, up to the error of using means; a simulation adds the cost of bursts and of
waiting.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.worker.slots import MOST_GAP_S
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.cost_models import CostModel
from jdisagg.sim.fast_forward import SimulatedSequence
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.space import Kind, PlanCandidate, devices_of

SAMPLE = 256  # prompts by which prefill is measured
STEPS = 12  # of a bisection: a rate to one part in 4,000
PROMPTS_A_WORKER = 100  # for which the queue is computed
T = TypeVar("T")
PLAIN = SamplingParams(max_tokens=1)
RESOURCES = {
    "prefill": "prefill compute",
    "queue": "the queue for prefill",
    "decode": "decode bandwidth",
    "memory": "KV memory",
    "link": "the link",
}


class InfeasibleError(ConfigError):
    """Raised for a candidate that misses an objective or has no room even without a queue."""


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """Requests per second of a whole candidate; inf if a resource never binds."""

    prefill: float
    queue: float  # with the first token in time for the required share
    decode: float  # with steps short enough for TPOT; for colocated workers with prefill between them
    memory: float
    link: float
    prompt_device_s: float  # device-seconds per mean prompt
    step_s: float  # of one sequence, at the batch of `decode`

    def rates(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in RESOURCES}

    @property
    def sustained(self) -> float:
        """Returns the rate that devices and ports sustain; a short run above it only postpones work."""
        return min(self.prefill, self.link)

    @property
    def bound(self) -> float:
        return min(self.rates().values())

    @property
    def binding(self) -> str:
        """Returns the resource with the lowest rate."""
        rates = self.rates()
        return min(rates, key=lambda name: rates[name])


class CapacityModel:
    """Computes the limits of many candidates; the limits of a worker shape are computed once for all meshes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prefills: dict[Hashable, PrefillCapacity] = {}
        self._decodes: dict[Hashable, DecodeCapacity] = {}
        self._rates: dict[Hashable, float] = {}
        self._carried: dict[Hashable, tuple[float, float]] = {}

    def limits(self, candidate: PlanCandidate) -> CapacityLimits:
        """Returns a candidate's limits. Raises `InfeasibleError` with what is needed and what there is, or ConfigError
        if the candidate cannot be built."""
        given = self.problem.build(candidate)
        first, last = candidate.mesh.pools[0], candidate.mesh.pools[-1]
        first_key, prefill = self._prefill(given, first)
        last_key, decode = self._decode(given, last)
        objectives = self.problem.objectives
        _check_unloaded(objectives, prefill, decode)
        shared = prefill if first.role is Role.COLOCATED else None
        carried, step_s = self._cached(
            self._carried, (last_key, first_key if shared else None), lambda: decode.most(objectives.tpot_s, shared)
        )
        queue = self._cached(
            self._rates,
            (first_key, first.count, last_key if shared else None),
            lambda: _queue_limit(objectives, prefill, first.count, decode if shared else None),
        )
        return CapacityLimits(
            prefill=first.count / prefill.mean_s,
            queue=queue,
            decode=last.count * carried,
            memory=last.count * decode.held(shared),
            link=_link_limit(given, prefill.cost, self.problem.workload),
            prompt_device_s=prefill.mean_s * first.pp * first.tp,
            step_s=step_s,
        )

    def _prefill(self, given: ClusterSpec, pool: PoolSpec) -> tuple[Hashable, PrefillCapacity]:
        config = next(each for each in given.workers if each.role is pool.role)
        key = (pool.pp, pool.tp, config)
        return key, self._cached(
            self._prefills, key, lambda: PrefillCapacity(given.costs[config.worker], config, self.problem.workload)
        )

    def _decode(self, given: ClusterSpec, pool: PoolSpec) -> tuple[Hashable, DecodeCapacity]:
        config = next(each for each in given.workers if each.role is pool.role)
        key = (pool.pp, pool.tp, config)
        return key, self._cached(
            self._decodes, key, lambda: DecodeCapacity(given.costs[config.worker], config, self.problem.workload)
        )

    @staticmethod
    def _cached(cached: dict[Hashable, T], key: Hashable, compute: Callable[[], T]) -> T:
        if key not in cached:
            cached[key] = compute()
        return cached[key]


def _check_unloaded(objectives: Objectives, prefill: PrefillCapacity, decode: DecodeCapacity) -> None:
    """Raises `InfeasibleError` if one request alone misses an objective."""
    first_s = float(np.quantile(prefill.alone_s, objectives.share))
    if first_s > objectives.ttft_s:
        raise InfeasibleError(
            f"an unloaded TTFT of {1e3 * first_s:.3g} ms is over the objective of {1e3 * objectives.ttft_s:.3g} ms"
        )
    step_s = decode.step_s(1)
    if step_s > objectives.tpot_s:
        raise InfeasibleError(
            f"an unloaded TPOT of {1e3 * step_s:.3g} ms is over the objective of {1e3 * objectives.tpot_s:.3g} ms"
        )


class PrefillCapacity:
    """Seconds of one worker's prompts: alone, and as their share of full plans."""

    def __init__(self, cost: CostModel, config: WorkerConfig, workload: WorkloadSpec) -> None:
        self.cost, self.config = cost, config
        lengths = workload.lengths.sample(SAMPLE, 0).input_tokens.tolist()
        self.chunks = np.array([math.ceil(tokens / config.prefill_buckets[-1]) for tokens in lengths])
        self.alone_s = np.array([self._alone_s(n) for n in lengths])
        packed_sum_s = sum(self._seconds(plan) for plan in self._packed(lengths))
        alone_sums_s = np.array([sum(self._seconds([piece]) for piece in self._pieces(n)) for n in lengths])
        share = min(1.0, packed_sum_s / float(alone_sums_s.sum()))
        self.service_s = alone_sums_s * share / config.pipeline_stages  # per stage: the others run other plans
        self.mean_s = float(self.service_s.mean())

    def _alone_s(self, tokens: int) -> float:
        """Returns the seconds of one prompt; each stage runs another chunk, and the last chunk passes all stages."""
        seconds = [self._seconds([piece]) for piece in self._pieces(tokens)]
        stages = self.config.prefill_stages
        return (sum(seconds) + (stages - 1) * seconds[-1]) / stages

    def _pieces(self, tokens: int) -> list[tuple[int, int]]:
        """Returns (first, stop) of each chunk."""
        size = self.config.prefill_buckets[-1]
        return [(first, min(first + size, tokens)) for first in range(0, tokens, size)]

    def _packed(self, lengths: list[int]) -> list[list[tuple[int, int]]]:
        """Returns the plans of a saturated worker: prompts in order, cut where a plan is full."""
        size = room = self.config.prefill_buckets[-1]
        plans, plan = [], []
        for tokens in lengths:
            first = 0
            while first < tokens:
                stop = min(tokens, first + room)
                plan.append((first, stop))
                room, first = room - (stop - first), stop
                if not room or len(plan) == self.config.max_chunk_seqs:
                    plans, plan, room = [*plans, plan], [], size
        return [*plans, plan] if plan else plans

    def _seconds(self, pieces: list[tuple[int, int]]) -> float:
        chunks = tuple(
            PrefillChunk(
                RequestId("r"),
                cast(tuple[int, ...], SimulatedSequence(stop - first)),
                first,
                (),
                last=True,
                sampling=PLAIN,
            )
            for first, stop in pieces
        )
        return self.cost.prefill_s(PrefillChunks(chunks, self.config.prefill_buckets[-1], 1))


def _queue_limit(
    objectives: Objectives, prefill: PrefillCapacity, workers: int, decode: DecodeCapacity | None
) -> float:
    """Returns the highest rate at which `share` of the prompts are in time, first come first served on `workers`."""
    count = SAMPLE + PROMPTS_A_WORKER * workers
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0, count))
    service_s, alone_s, chunks = (
        np.resize(column, count) for column in (prefill.service_s, prefill.alone_s, prefill.chunks)
    )

    def in_time(rate: float) -> bool:
        step_s = decode.loaded_step_s(rate / workers, prefill) if decode else 0.0
        if step_s == math.inf:
            return False
        steps = chunks * step_s  # colocated: each chunk waits for a decode step
        waits = _waits(arrivals / rate, service_s + steps, workers)
        return float((waits + alone_s + steps <= objectives.ttft_s).mean()) >= objectives.share

    return _highest(in_time, workers / prefill.mean_s)


def _waits(arrivals: np.ndarray, service_s: np.ndarray, workers: int) -> np.ndarray:
    """Returns the seconds before each prompt begins. The method is Lindley's recursion (1952), for several servers that
    of Kiefer and Wolfowitz."""
    free, waits = [0.0] * workers, np.empty(len(arrivals))
    for index, (at_s, service) in enumerate(zip(arrivals.tolist(), service_s.tolist(), strict=True)):
        begins_s = max(at_s, heapq.heappop(free))
        waits[index] = begins_s - at_s
        heapq.heappush(free, begins_s + service)
    return waits


class DecodeCapacity:
    """One worker's decode steps. By Little's law a rate r keeps r x outputs x TPOT sequences in it."""

    def __init__(self, cost: CostModel, config: WorkerConfig, workload: WorkloadSpec) -> None:
        self.cost, self.config = cost, config
        self.means = workload.means

    def step_s(self, batch: float) -> float:
        """Returns the seconds of one microbatch of `batch` sequences through all stages. With several steps per
        dispatch, they are those of one step of the longest dispatch, which on one stage is limited by the gap between
        tokens."""
        active, steps = tuple(range(max(1, round(batch)))), self.config.decode.steps_per_dispatch
        if self.config.is_multi_step:
            steps = max(1, min(steps, int(MOST_GAP_S / self._dispatch_step_s(active, 1))))
        return self._dispatch_step_s(active, steps)

    def _dispatch_step_s(self, active: tuple[int, ...], steps: int) -> float:
        plan = DecodeRows(0, active, 1, widths=(steps,) * len(active) if steps > 1 else (), turns=steps > 1)
        return self.cost.decode_s(plan, round(len(active) * self.means.context_tokens)) / steps

    def _tpot_s(self, rate: float, batch: float, shared: PrefillCapacity | None) -> float:
        """Returns a step's seconds divided by the share of time that prefill leaves on the same devices."""
        left_share = 1.0 - (rate * shared.mean_s if shared else 0.0)
        return self.step_s(batch) / left_share if left_share > 0 else math.inf

    def most(self, tpot_s: float, shared: PrefillCapacity | None) -> tuple[float, float]:
        """Returns the highest rate whose batch keeps steps within `tpot_s`, and the step's seconds there."""
        stages = self.config.num_microbatches
        slots = self.config.num_slots / stages

        def is_in_time(rate: float) -> bool:
            batch = min(slots, rate * self.means.output_tokens * tpot_s / stages)
            return self._tpot_s(rate, batch, shared) <= tpot_s

        most = self.config.num_slots / (self.means.output_tokens * self.step_s(slots))
        ceiling = max(most, 1.0 / (self.means.output_tokens * self.step_s(1)))
        rate = min(_highest(is_in_time, 2 * ceiling), ceiling)
        return rate, self.step_s(min(slots, rate * self.means.output_tokens * tpot_s / stages))

    def held(self, shared: PrefillCapacity | None) -> float:
        """Returns the rate at which the pages are full; a prompt's reservation holds the mean context of its steps."""
        room = self.config.num_pages * self.config.page_size / self.means.context_tokens
        stages = self.config.num_microbatches
        seconds = self.means.output_tokens * self.step_s(min(room, self.config.num_slots) / stages)
        prompt_s = float(shared.mean_s) * room if shared else 0.0  # every step of the resident sequences' prompts
        return room / (seconds + prompt_s)

    def loaded_step_s(self, rate: float, shared: PrefillCapacity) -> float:
        """Returns the seconds of a decode step between two chunks at the batch of `rate`; inf if it is too high."""
        tpot_s, stages = self.step_s(1), self.config.num_microbatches
        for _ in range(20):
            batch = rate * self.means.output_tokens * tpot_s / stages
            if batch > self.config.num_slots or tpot_s == math.inf:
                return math.inf
            tpot_s = self._tpot_s(rate, batch, shared)
        return self.step_s(rate * self.means.output_tokens * tpot_s / stages) if tpot_s < math.inf else math.inf


def _link_limit(given: ClusterSpec, cost: CostModel, workload: WorkloadSpec) -> float:
    """Returns the bandwidth of the senders' or receivers' ports, the smaller, over the bytes of a mean prompt."""
    tokens = round(workload.means.input_tokens)
    pages = (0,) * given.workers[0].pages_for(tokens)
    whole = KVTransfer(Attempt(RequestId("r"), 0), WorkerId("a"), WorkerId("b"), pages, pages, tokens)
    limit = math.inf
    for way, role in (("out", Role.PREFILL), ("in", Role.DECODE)):
        ports = [
            given.links.bytes_per_s.get((way, each.worker), math.inf) for each in given.workers if each.role is role
        ]
        if ports:
            limit = min(limit, sum(ports) / cost.transfer_bytes(whole))
    return limit


def _highest(holds: Callable[[float], bool], ceiling: float) -> float:
    """Returns the highest rate at which `holds` is true, a property that fails above some rate; at most `ceiling`."""
    if holds(ceiling):
        return ceiling
    low, high = 0.0, ceiling
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# Replica counts from throughputs and correction factors: the formulas of NVIDIA Dynamo's SLA planner, with its names.
#
# A correction factor is the observed over the expected value. Throughputs are tokens per second and device; `*_gpus`
# are devices of one engine. The formulas have no queue and no pages: a first estimate.


def prefill_replicas(
    rate_rps: float, isl: float, prefill_thpt_per_gpu: float, prefill_engine_gpus: int, p_correction_factor: float = 1.0
) -> int:
    """Returns the prefill engines for a rate; the correction factor can only lower the load."""
    load = rate_rps * isl * min(1.0, p_correction_factor)
    return max(1, math.ceil(load / prefill_thpt_per_gpu / prefill_engine_gpus))


def decode_replicas(rate_rps: float, osl: float, decode_thpt_per_gpu: float, decode_engine_gpus: int) -> int:
    """Returns the decode engines for a rate. The throughput is that at `corrected_itl` and the mean tokens that a step
    reads (in Dynamo isl + osl / 2)."""
    return max(1, math.ceil(rate_rps * osl / decode_thpt_per_gpu / decode_engine_gpus))


def corrected_itl(itl_s: float, d_correction_factor: float = 1.0) -> float:
    """Returns the step time to aim at if steps take `d_correction_factor` times the expected time."""
    if not d_correction_factor > 0:
        raise ConfigError(f"a correction factor of {d_correction_factor:g} must be above 0")
    return itl_s / d_correction_factor


@dataclass(frozen=True, slots=True)
class Estimate:
    """The engines of one pair of worker shapes that carry a rate."""

    candidate: PlanCandidate

    @property
    def devices(self) -> int:
        return self.candidate.devices


def estimates(
    problem: Problem,
    shapes: Iterable[PlanCandidate],
    rate_rps: float,
    p_correction_factor: float = 1.0,
    d_correction_factor: float = 1.0,
) -> list[Estimate]:
    """Returns the engines of each pair of shapes (disaggregated candidates, counts ignored), fewest devices first.
    Throughputs are those of the candidate's costs. Pairs that cannot be built are left out."""
    objectives = problem.objectives
    aimed = replace(objectives, tpot_s=corrected_itl(objectives.tpot_s, d_correction_factor))
    arithmetic = CapacityModel(replace(problem, objectives=aimed))
    pairs = {_pair(shape): None for shape in shapes if shape.kind is Kind.DISAGGREGATED}
    found = [_estimate(problem, arithmetic, pair, rate_rps, p_correction_factor) for pair in pairs]
    return sorted((each for each in found if each), key=lambda each: each.devices)


def _pair(shape: PlanCandidate) -> PlanCandidate:
    pools = tuple(replace(pool, count=1) for pool in shape.mesh.pools)
    return replace(shape, mesh=MeshSpec(pools))


def _estimate(
    problem: Problem, arithmetic: CapacityModel, pair: PlanCandidate, rate_rps: float, p_correction_factor: float
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
