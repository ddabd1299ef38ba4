"""The search: bounds by arithmetic first, then one simulation of each remaining candidate, then more of the leaders.

A candidate is simulated at the rate of the best one so far. Its own goodput is searched only if it meets the
objectives there (a race). The leaders of each architecture and the runner-up are measured with more seeds, all with
the same requests (successive halving; Jamieson and Talwalkar, AISTATS 2016), so that differences are the candidates'
own. All randomness comes from the problem's seed, and no clock is read: equal inputs give equal answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.outcome import Outcome, Record
from jdisagg.sim.planner.limits import CapacityLimits, CapacityModel, InfeasibleError
from jdisagg.sim.planner.problem import Objectives, Problem
from jdisagg.sim.planner.space import CandidateSource, Kind, PlanCandidate
from jdisagg.sim.shared import simulated

# One simulated run of a candidate and its attainment. Rates are requests per second.

MOST_STEPS = 40  # of a bisection, which its tolerance ends long before


Shares = tuple[float, float, float, float, float]  # met, first in time, steps in time, TTFT and TPOT at the share


@dataclass(frozen=True, slots=True)
class Window:
    """The requests of a run: those arriving from `first_s` to `last_s` count; the clock stops at `until_s`."""

    requests: int
    first_s: float = 0.0
    last_s: float = math.inf
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class RunBudget:
    """The length of a simulation. A stay is the time of a mean request that just meets its objectives.

    A cluster fills for `fill` stays and is measured for `stays` of them (and `least_requests`). Requests still
    arrive while the last measured ones run, so that neither an empty start nor an empty end flatters it. With
    `requests_per_device`, as in published runs, that many requests count instead, to their ends.
    """

    fill: float = 1.0
    stays: float = 1.0
    tail: float = 0.5
    least_requests: int = 200
    least_ttfts: float = 0.0  # in TTFT objectives: a slowly growing queue takes that long to show
    least_devices: int = 1 << 30  # of the simulated part; this many: the whole candidate
    requests_per_device: float = 0.0
    seeds: int = 1  # runs whose mean is a trial's result

    def window(self, problem: Problem, devices: int, rate_rps: float) -> Window:
        if self.requests_per_device:
            return Window(max(1, round(self.requests_per_device * devices)))
        objectives = problem.objectives
        stay_s = objectives.ttft_s + problem.workload.means.output_tokens * objectives.tpot_s
        first_s = self.fill * stay_s
        least_s = max(self.least_requests / rate_rps, self.least_ttfts * objectives.ttft_s)
        last_s = first_s + max(self.stays * stay_s, least_s)
        until_s = last_s + max(self.tail * stay_s, 1.01 * objectives.ttft_s)
        return Window(max(1, math.ceil(until_s * rate_rps)), first_s, last_s, until_s)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result at one rate. Shares are of the counted requests; unfinished ones are judged as far as they came."""

    rate_rps: float  # of the whole candidate
    met: float
    first_in_time: float
    steps_in_time: float
    ttft_s: float  # at the required share
    tpot_s: float
    busy: dict[Role, float]


def try_rate(problem: Problem, candidate: PlanCandidate, rate_rps: float, effort: RunBudget, seed: int) -> TrialResult:
    """Simulates a part of the candidate at its share of the rate, or all of it if the effort requires all devices."""
    part, parts = candidate.part(effort.least_devices)
    share_rps = rate_rps / parts
    window = effort.window(problem, part.devices, share_rps)
    runs = [_run(problem, part, share_rps, window, seed + each) for each in range(effort.seeds)]
    met, first, steps, ttft_s, tpot_s = (float(mean) for mean in np.mean([shares for shares, _ in runs], axis=0))
    busy = {role: float(np.mean([each[role] for _, each in runs])) for role in runs[0][1]}
    return TrialResult(rate_rps, met, first, steps, ttft_s, tpot_s, busy)


def _run(
    problem: Problem, part: PlanCandidate, rate_rps: float, window: Window, seed: int
) -> tuple[Shares, dict[Role, float]]:
    given = problem.build(part)
    cluster = simulated(given)
    outcome = cluster.run(problem.workload.at(rate_rps, window.requests, problem.seed + seed), window.until_s)
    counted = [each for each in outcome.records if window.first_s <= each.arrival_s <= window.last_s]
    end_s = min(window.until_s, cluster.now_s)
    return _shares(counted, problem.objectives, end_s), _busy(part, outcome, cluster)


def _shares(records: list[Record], objectives: Objectives, end_s: float) -> Shares:
    if not records:
        return 0.0, 0.0, 0.0, math.inf, math.inf
    ttft = np.array([_ttft_s(record, end_s) for record in records])
    tpot = np.array([_tpot_s(record, end_s) for record in records])
    first, steps = ttft <= objectives.ttft_s, tpot <= objectives.tpot_s
    ttft_s, tpot_s = (_quantile(each, objectives.share) for each in (ttft, tpot))
    return float((first & steps).mean()), float(first.mean()), float(steps.mean()), ttft_s, tpot_s


def _quantile(values: np.ndarray, share: float) -> float:
    """Returns numpy's quantile, but inf next to an infinite value, for which numpy warns and returns nan."""
    ordered = np.sort(values)
    above = ordered[math.ceil(share * (len(ordered) - 1))]
    return math.inf if math.isinf(above) else float(np.quantile(ordered, share))


def _ttft_s(record: Record, end_s: float) -> float:
    """Returns the TTFT, or the time so far if there is no first token; inf for a rejected request."""
    if record.emitted_tokens:
        return record.ttft_s
    return math.inf if record.ends else end_s - record.arrival_s


def _tpot_s(record: Record, end_s: float) -> float:
    """Returns the TPOT of the tokens so far, or the time since the first token if the second is missing."""
    if record.ends and not record.is_served:
        return math.inf
    is_waiting = record.emitted_tokens == 1 and not record.ends
    return end_s - record.first_s if is_waiting else record.tpot_s


def _busy(part: PlanCandidate, outcome: Outcome, cluster: Cluster) -> dict[Role, float]:
    """Returns the mean busy share of each role's workers over the simulated time."""
    stretch = outcome.span_s / cluster.now_s if cluster.now_s else 0.0
    roles: dict[Role, list[float]] = {}
    for place in part.mesh.workers():
        roles.setdefault(place.role, []).append(min(1.0, stretch * outcome.busy[str(place.worker)]))
    return {role: float(np.mean(shares)) for role, shares in roles.items()}


def highest(holds: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """Returns the highest rate that holds, to `tolerance`; `low` is known to hold (0 always does). `high` is assumed
    not to hold. It is tried only if all rates below it did, and then the search continues above it."""
    for _ in range(MOST_STEPS):
        top = high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        if high < top or not holds(high):
            break
        low, high = high, 1.2 * high
    return low


SLACK = 1.05  # bounds are for mean requests: a workload may do this much better
SHORT = RunBudget(0.75, 0.5, 0.1, least_ttfts=8, least_devices=16)  # for the race
LONG = RunBudget(least_requests=400, least_ttfts=20)  # for the finals
SEEDS = 3  # with which the shortlist is measured


@dataclass(frozen=True, slots=True)
class BoundedCandidate:
    """A candidate that arithmetic does not exclude, with its limits."""

    candidate: PlanCandidate
    limits: CapacityLimits
    bound: float  # requests/s per paid device


@dataclass(frozen=True, slots=True)
class RaceResult:
    """A candidate's goodput in requests/s per paid device. If not `is_exact`, the goodput only lies below a rate that
    was missed."""

    bounded: BoundedCandidate
    goodput: float
    is_exact: bool = True


@dataclass(frozen=True)
class ShortlistEntry:
    """A candidate measured in long runs. Goodputs are by seed, in requests/s per paid device."""

    bounded: BoundedCandidate
    goodputs: tuple[float, ...]
    at_goodput: TrialResult  # the highest tried rate that held, of the first seed
    above: TrialResult  # the lowest tried rate that did not: it shows what gives way first

    @property
    def candidate(self) -> PlanCandidate:
        return self.bounded.candidate

    @property
    def limits(self) -> CapacityLimits:
        return self.bounded.limits

    @property
    def goodput(self) -> float:
        return float(np.mean(self.goodputs))


@dataclass
class SearchStats:
    """The numbers of candidates by what happened to them."""

    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason, refused by arithmetic
    pruned: int = 0  # their bound is below the best goodput
    left: int = 0  # not tried, as there were more than `most` of a kind
    tried: int = 0
    runs: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the shortlist, best first."""

    shortlist: tuple[ShortlistEntry, ...]
    counts: SearchStats
    field: tuple[BoundedCandidate, ...]  # all that arithmetic does not exclude, best bound first

    def of(self, *kinds: Kind) -> ShortlistEntry | None:
        """Returns the best candidate of these architectures."""
        return next((each for each in self.shortlist if each.candidate.kind in kinds), None)


OnProgress = Callable[[str, int, int], None]  # called with the stage, the number done and the total


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignores progress reports entirely."""


@dataclass
class SearchRun:
    """One problem's search. `most`: candidates of one architecture that are simulated."""

    problem: Problem
    short: RunBudget = SHORT
    long: RunBudget = LONG
    seeds: int = SEEDS
    tolerance: float = 0.03
    most: int = 24
    slack: float = SLACK  # inf: bounds neither prune nor cap, for runs so short that they only postpone work
    on_progress: OnProgress = no_progress
    counts: SearchStats = field(default_factory=SearchStats)

    def __post_init__(self) -> None:
        self._arithmetic = CapacityModel(self.problem)
        self._trials: dict[tuple[PlanCandidate, RunBudget, int], dict[float, TrialResult]] = {}  # by rate

    def over(self, space: CandidateSource) -> SearchResult:
        """Searches the space. Raises `InfeasibleError` if no candidate can meet the objectives."""
        feasible = self.with_limits(space)
        leaders: list[RaceResult] = []
        for kind in Kind:
            ranked = self.race([each for each in feasible if each.candidate.kind is kind], str(kind))
            leaders += self.refine(space, ranked)[:2]
        leaders.sort(key=lambda scored: -scored.goodput)
        return SearchResult(self.measure_all(_shortlist(leaders)), self.counts, tuple(feasible))

    def with_limits(self, candidates: Iterable[PlanCandidate]) -> list[BoundedCandidate]:
        """Returns the candidates that arithmetic does not exclude, best bound first. Of each disaggregated mesh only
        the chunk size with the best bound is kept; chunk sizes matter most if decode waits for them."""
        best: dict[tuple[str, int, int], BoundedCandidate] = {}
        for candidate in candidates:
            self.counts.considered += 1
            bounded = self.bounded(candidate)
            chunk = 0 if candidate.kind is Kind.DISAGGREGATED else candidate.chunk_tokens
            key = (str(candidate.mesh), candidate.domain_devices, chunk)
            if bounded and (key not in best or bounded.bound > best[key].bound):
                best[key] = bounded
        if not best:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in self.counts.refused.most_common(3))
            raise InfeasibleError(f"none of {self.counts.considered} configurations keeps {self._asked}: {reasons}")
        return sorted(best.values(), key=lambda each: -each.bound)

    @property
    def _asked(self) -> str:
        return f"{self.problem.objectives} on {self.problem.devices or 'any'} devices"

    def bounded(self, candidate: PlanCandidate) -> BoundedCandidate | None:
        try:
            found = self._arithmetic.limits(candidate)
        except ConfigError as error:
            self.counts.refused[str(error)] += 1
            return None
        if found.bound <= 0:
            self.counts.refused[f"{self.problem.objectives} is kept at no rate"] += 1
            return None
        return BoundedCandidate(candidate, found, found.bound / self.problem.paid(candidate))

    def race(self, feasible: list[BoundedCandidate], what: str, best: float = 0.0) -> list[RaceResult]:
        """Simulates candidates, best first. A candidate whose bound is below the best goodput is skipped."""
        scored: list[RaceResult] = []
        self.counts.left += len(feasible[self.most :])
        for index, bounded in enumerate(feasible[: self.most]):
            self.on_progress(what, index, min(len(feasible), self.most))
            if bounded.bound * self.slack <= best:
                self.counts.pruned += 1
                continue
            scored.append(self._against(bounded, best))
            if scored[-1].is_exact:
                best = max(best, scored[-1].goodput)
        self.on_progress(what, 1, 1)
        return sorted(scored, key=lambda each: -each.goodput)

    def _against(self, bounded: BoundedCandidate, best: float) -> RaceResult:
        """Returns the candidate's goodput if it is above the best so far, else an estimate below that."""
        self.counts.tried += 1
        share = self.problem.objectives.share
        if best:
            met = self._trial(bounded, best, self.short).met
            if met < share:
                return RaceResult(bounded, best * met / share * 0.999, is_exact=False)
        return RaceResult(bounded, self._goodput(bounded, best, max(bounded.bound, 1.05 * best), self.short))

    def refine(self, space: CandidateSource, ranked: list[RaceResult]) -> list[RaceResult]:
        """Tries other chunk sizes and transfer modes of the leader; keeps one that gains more than the tolerance."""
        if not ranked:
            return ranked
        leader = ranked[0]
        others = [self.bounded(each) for each in space.neighbours(leader.bounded.candidate)]
        tried = self.race([each for each in others if each], f"around {leader.bounded.candidate.mesh}", leader.goodput)
        better = [each for each in tried if each.is_exact and each.goodput > (1 + self.tolerance) * leader.goodput]
        return [*better[:1], *ranked]

    def _goodput(self, bounded: BoundedCandidate, low: float, high: float, effort: RunBudget, seed: int = 0) -> float:
        """Searches the goodput, a rate per device."""
        share = self.problem.objectives.share
        sustained = bounded.limits.sustained / self.problem.paid(bounded.candidate)

        def holds(rate: float) -> bool:
            return rate <= sustained * self.slack and self._trial(bounded, rate, effort, seed).met >= share

        return highest(holds, low, high, self.tolerance)

    def _trial(self, bounded: BoundedCandidate, per_device: float, effort: RunBudget, seed: int = 0) -> TrialResult:
        trials = self._trials.setdefault((bounded.candidate, effort, seed), {})
        if per_device not in trials:
            self.counts.runs += 1
            rate = per_device * self.problem.paid(bounded.candidate)
            trials[per_device] = try_rate(self.problem, bounded.candidate, rate, effort, seed)
        return trials[per_device]

    def measure_all(self, leaders: list[RaceResult]) -> tuple[ShortlistEntry, ...]:
        """Measures the leaders with the same seeds each, best first."""
        measured = []
        for index, leader in enumerate(leaders):
            self.on_progress("shortlist", index, len(leaders))
            measured.append(self.measure(leader))
        self.on_progress("shortlist", 1, 1)
        return tuple(sorted((each for each in measured if each.goodput > 0), key=lambda each: -each.goodput))

    def measure(self, leader: RaceResult) -> ShortlistEntry:
        """Measures the goodput by seed, near the race's result."""
        bounded = leader.bounded
        goodputs = tuple(self._goodput_near(bounded, leader.goodput, seed) for seed in range(self.seeds))
        share = self.problem.objectives.share
        trials = sorted(self._trials[bounded.candidate, self.long, 0].values(), key=lambda trial: trial.rate_rps)
        held = [trial for trial in trials if trial.met >= share] or trials[:1]
        missed = [trial for trial in trials if trial.met < share] or trials[-1:]
        return ShortlistEntry(bounded, goodputs, held[-1], missed[0])

    def _goodput_near(self, bounded: BoundedCandidate, estimate: float, seed: int) -> float:
        share, effort = self.problem.objectives.share, self.long
        if self._trial(bounded, estimate, effort, seed).met >= share:
            return self._goodput(bounded, estimate, 1.06 * estimate, effort, seed)
        low = 0.9 * estimate
        if self._trial(bounded, low, effort, seed).met >= share:
            return self._goodput(bounded, low, estimate, effort, seed)
        return self._goodput(bounded, 0.0, low, effort, seed)


def _shortlist(leaders: list[RaceResult]) -> list[RaceResult]:
    """Returns the best of each architecture, and the best two of all."""
    chosen = leaders[:2]
    for kind in Kind:
        first = next((each for each in leaders if each.bounded.candidate.kind is kind), None)
        if first and first not in chosen:
            chosen.append(first)
    return chosen
