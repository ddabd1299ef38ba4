"""What a candidate could carry at best, by arithmetic alone: no event is simulated.

Each resource says how many requests a second it lets through in a steady state of mean requests: prefill's devices,
the queue before them (Lindley's recursion with the workload's own prompts), decode steps short enough for the TPOT
objective, pages for KV, and ports. The least of them is an upper bound up to the means' slack: a simulation adds what
bursts and waits for one another cost.
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
from jdisagg.sim.planner.problem import Objectives, Problem, Workload
from jdisagg.sim.planner.space import Candidate, Kind, devices_of

SAMPLE = 256  # prompts by which prefill is judged
STEPS = 12  # of a bisection: a rate to one part in 4,000
PROMPTS_A_WORKER = 100  # that the queue is watched for
T = TypeVar("T")
PLAIN = SamplingParams(max_tokens=1)
RESOURCES = {
    "prefill": "prefill compute",
    "queue": "the queue for prefill",
    "decode": "decode bandwidth",
    "memory": "KV memory",
    "link": "the link",
}


class Infeasible(ConfigError):
    """A candidate that misses an objective, or has no room, before any queue forms."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests a second of a whole candidate; inf where a resource never binds."""

    prefill: float
    queue: float  # with the first token in time for the asked share
    decode: float  # with steps short enough for TPOT; of colocated workers, with prefill between them
    memory: float
    link: float
    prompt_device_s: float  # device-seconds that a mean prompt takes
    step_s: float  # of one sequence, at the batch of `decode`

    def rates(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in RESOURCES}

    @property
    def sustained(self) -> float:
        """What devices and ports can do for ever: a short run that does more has only put work off."""
        return min(self.prefill, self.link)

    @property
    def bound(self) -> float:
        return min(self.rates().values())

    @property
    def binding(self) -> str:
        """The resource that says the bound."""
        rates = self.rates()
        return min(rates, key=lambda name: rates[name])


class Arithmetic:
    """Limits of many candidates. What a shape of worker can do is worked out once, whatever the mesh it is part of."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prefills: dict[Hashable, Prefill] = {}
        self._decodes: dict[Hashable, Decode] = {}
        self._rates: dict[Hashable, float] = {}
        self._carried: dict[Hashable, tuple[float, float]] = {}

    def limits(self, candidate: Candidate) -> Limits:
        """Raises `Infeasible` with what is needed and what there is, or ConfigError where nothing can be built."""
        given = self.problem.build(candidate)
        first, last = candidate.mesh.pools[0], candidate.mesh.pools[-1]
        first_key, prefill = self._prefill(given, first)
        last_key, decode = self._decode(given, last)
        objectives = self.problem.objectives
        _check_unloaded(objectives, prefill, decode)
        shared = prefill if first.role is Role.COLOCATED else None
        carried, step_s = self._once(
            self._carried, (last_key, first_key if shared else None), lambda: decode.most(objectives.tpot_s, shared)
        )
        queue = self._once(
            self._rates,
            (first_key, first.count, last_key if shared else None),
            lambda: _queue_limit(objectives, prefill, first.count, decode if shared else None),
        )
        return Limits(
            prefill=first.count / prefill.mean_s,
            queue=queue,
            decode=last.count * carried,
            memory=last.count * decode.held(shared),
            link=_link_limit(given, prefill.cost, self.problem.workload),
            prompt_device_s=prefill.mean_s * first.pp * first.tp,
            step_s=step_s,
        )

    def _prefill(self, given: ClusterSpec, pool: PoolSpec) -> tuple[Hashable, Prefill]:
        config = next(each for each in given.workers if each.role is pool.role)
        key = (pool.pp, pool.tp, config)
        return key, self._once(
            self._prefills, key, lambda: Prefill(given.costs[config.worker], config, self.problem.workload)
        )

    def _decode(self, given: ClusterSpec, pool: PoolSpec) -> tuple[Hashable, Decode]:
        config = next(each for each in given.workers if each.role is pool.role)
        key = (pool.pp, pool.tp, config)
        return key, self._once(
            self._decodes, key, lambda: Decode(given.costs[config.worker], config, self.problem.workload)
        )

    @staticmethod
    def _once(known: dict[Hashable, T], key: Hashable, work_out: Callable[[], T]) -> T:
        if key not in known:
            known[key] = work_out()
        return known[key]


def _check_unloaded(objectives: Objectives, prefill: Prefill, decode: Decode) -> None:
    """One request alone: nothing that is asked of many can be better."""
    first_s = float(np.quantile(prefill.alone_s, objectives.share))
    if first_s > objectives.ttft_s:
        raise Infeasible(
            f"an unloaded TTFT of {1e3 * first_s:.3g} ms is over the objective of {1e3 * objectives.ttft_s:.3g} ms"
        )
    step_s = decode.step_s(1)
    if step_s > objectives.tpot_s:
        raise Infeasible(
            f"an unloaded TPOT of {1e3 * step_s:.3g} ms is over the objective of {1e3 * objectives.tpot_s:.3g} ms"
        )


# ---------------------------------------------------------------------- prefill


class Prefill:
    """One worker's prompts: seconds of each alone, and of its place in full plans."""

    def __init__(self, cost: CostModel, config: WorkerConfig, workload: Workload) -> None:
        self.cost, self.config = cost, config
        lengths = workload.lengths.sample(SAMPLE, 0).input_tokens.tolist()
        self.chunks = np.array([math.ceil(tokens / config.prefill_buckets[-1]) for tokens in lengths])
        self.alone_s = np.array([self._alone_s(n) for n in lengths])
        packed_s = sum(self._seconds(plan) for plan in self._packed(lengths))
        whole_s = np.array([sum(self._seconds([piece]) for piece in self._pieces(n)) for n in lengths])
        share = min(1.0, packed_s / float(whole_s.sum()))
        self.service_s = whole_s * share / config.pipeline_stages  # a stage's: others work on other plans
        self.mean_s = float(self.service_s.mean())

    def _alone_s(self, tokens: int) -> float:
        """Of prefill stages each is at another chunk, and the last chunk goes through all of them."""
        seconds = [self._seconds([piece]) for piece in self._pieces(tokens)]
        stages = self.config.prefill_stages
        return (sum(seconds) + (stages - 1) * seconds[-1]) / stages

    def _pieces(self, tokens: int) -> list[tuple[int, int]]:
        """(first, stop) of each chunk."""
        size = self.config.prefill_buckets[-1]
        return [(first, min(first + size, tokens)) for first in range(0, tokens, size)]

    def _packed(self, lengths: list[int]) -> list[list[tuple[int, int]]]:
        """Plans as a worker with more than enough to do fills them: prompts in order, cut where a plan is full."""
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


def _queue_limit(objectives: Objectives, prefill: Prefill, workers: int, decode: Decode | None) -> float:
    """Highest rate at which `share` of the prompts are through in time, first come first served on `workers`."""
    count = SAMPLE + PROMPTS_A_WORKER * workers
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0, count))
    service_s, alone_s, chunks = (
        np.resize(column, count) for column in (prefill.service_s, prefill.alone_s, prefill.chunks)
    )

    def in_time(rate: float) -> bool:
        step_s = decode.loaded_step_s(rate / workers, prefill) if decode else 0.0
        if step_s == math.inf:
            return False
        steps = chunks * step_s  # colocated: each chunk waits for a step of decode
        waits = _waits(arrivals / rate, service_s + steps, workers)
        return float((waits + alone_s + steps <= objectives.ttft_s).mean()) >= objectives.share

    return _highest(in_time, workers / prefill.mean_s)


def _waits(arrivals: np.ndarray, service_s: np.ndarray, workers: int) -> np.ndarray:
    """Seconds before each prompt begins: Lindley's recursion (1952), for several servers (Kiefer and Wolfowitz)."""
    free, waits = [0.0] * workers, np.empty(len(arrivals))
    for index, (at_s, takes_s) in enumerate(zip(arrivals.tolist(), service_s.tolist(), strict=True)):
        begins_s = max(at_s, heapq.heappop(free))
        waits[index] = begins_s - at_s
        heapq.heappush(free, begins_s + takes_s)
    return waits


# ---------------------------------------------------------------------- decode


class Decode:
    """One worker's steps. By Little's law a rate r keeps r x outputs x TPOT sequences in it."""

    def __init__(self, cost: CostModel, config: WorkerConfig, workload: Workload) -> None:
        self.cost, self.config = cost, config
        self.means = workload.means

    def step_s(self, batch: float) -> float:
        """Of one microbatch of `batch` sequences, through all stages; a turn of the longest dispatch, of one stage of
        the longest within the gap."""
        active, turns = tuple(range(max(1, round(batch)))), self.config.decode.steps_per_dispatch
        if self.config.is_multi_step:
            turns = max(1, min(turns, int(MOST_GAP_S / self._turn_s(active, 1))))
        return self._turn_s(active, turns)

    def _turn_s(self, active: tuple[int, ...], turns: int) -> float:
        plan = DecodeRows(0, active, 1, widths=(turns,) * len(active) if turns > 1 else (), turns=turns > 1)
        return self.cost.decode_s(plan, round(len(active) * self.means.context_tokens)) / turns

    def _tpot_s(self, rate: float, batch: float, shared: Prefill | None) -> float:
        """A step, stretched by the share of the time that prefill takes on the same devices."""
        left = 1.0 - (rate * shared.mean_s if shared else 0.0)
        return self.step_s(batch) / left if left > 0 else math.inf

    def most(self, tpot_s: float, shared: Prefill | None) -> tuple[float, float]:
        """Highest rate whose batch keeps steps within `tpot_s`, and the step there."""
        stages = self.config.num_microbatches
        slots = self.config.num_slots / stages

        def short(rate: float) -> bool:
            batch = min(slots, rate * self.means.output_tokens * tpot_s / stages)
            return self._tpot_s(rate, batch, shared) <= tpot_s

        most = self.config.num_slots / (self.means.output_tokens * self.step_s(slots))
        ceiling = max(most, 1.0 / (self.means.output_tokens * self.step_s(1)))
        rate = min(_highest(short, 2 * ceiling), ceiling)
        return rate, self.step_s(min(slots, rate * self.means.output_tokens * tpot_s / stages))

    def held(self, shared: Prefill | None) -> float:
        """Rate at which its pages are full. A prompt's reservations are held for the mean context of its steps."""
        room = self.config.num_pages * self.config.page_size / self.means.context_tokens
        stages = self.config.num_microbatches
        seconds = self.means.output_tokens * self.step_s(min(room, self.config.num_slots) / stages)
        prompt_s = float(shared.mean_s) * room if shared else 0.0  # every step of the residents' prompts
        return room / (seconds + prompt_s)

    def loaded_step_s(self, rate: float, shared: Prefill) -> float:
        """A decode step between two chunks, at the batch that `rate` keeps; inf where the rate cannot be kept."""
        tpot_s, stages = self.step_s(1), self.config.num_microbatches
        for _ in range(20):
            batch = rate * self.means.output_tokens * tpot_s / stages
            if batch > self.config.num_slots or tpot_s == math.inf:
                return math.inf
            tpot_s = self._tpot_s(rate, batch, shared)
        return self.step_s(rate * self.means.output_tokens * tpot_s / stages) if tpot_s < math.inf else math.inf


# ---------------------------------------------------------------------- link


def _link_limit(given: ClusterSpec, cost: CostModel, workload: Workload) -> float:
    """Ports of all senders, or of all receivers, over the bytes of a mean prompt."""
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
    """The highest rate that holds, of a property that rates lose for good; `ceiling` where it never does."""
    if holds(ceiling):
        return ceiling
    low, high = 0.0, ceiling
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# Replica counts from throughputs and correction factors: the formulas of NVIDIA Dynamo's SLA planner, by their
# names.
#
# A correction factor is what was observed over what was expected. Throughputs are tokens a second and device;
# `*_gpus` are devices of one engine. They know no queue and no page: a first estimate, not an answer.


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
