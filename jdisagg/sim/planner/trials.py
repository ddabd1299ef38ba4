"""One simulated run of a candidate, and what it says of the objectives. Rates are requests a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.outcome import Outcome, Record
from jdisagg.sim.planner.problem import Objectives, Problem
from jdisagg.sim.planner.space import Candidate
from jdisagg.sim.shared import simulated

MOST_STEPS = 40  # of a bisection: tolerances end it long before


Shares = tuple[float, float, float, float, float]  # met, first in time, steps in time, TTFT and TPOT at the share


@dataclass(frozen=True, slots=True)
class Window:
    """So many requests arrive; those from `first_s` to `last_s` count; the clock stops at `until_s`."""

    requests: int
    first_s: float = 0.0
    last_s: float = math.inf
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is simulated. A stay is how long a mean request takes that just keeps its objectives.

    A cluster fills for `fill` stays, is judged for `stays` of them (and `least_requests`), and is still asked for more
    while the last of those are on their way: neither an empty start nor an empty end flatters it. With
    `requests_per_device`, as published runs were made, all of so many requests count instead, to their ends.
    """

    fill: float = 1.0
    stays: float = 1.0
    tail: float = 0.5
    least_requests: int = 200
    least_ttfts: float = 0.0  # objectives for the first token: a queue that only just grows takes that long to show
    least_devices: int = 1 << 30  # of the part that is simulated; so many: all of a candidate
    requests_per_device: float = 0.0
    seeds: int = 1  # runs that a trial is the mean of

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
class Trial:
    """What came of one rate. Shares are of the requests that count; those late and on their way are judged as far as
    they came."""

    rate_rps: float  # of the whole candidate
    met: float
    first_in_time: float
    steps_in_time: float
    ttft_s: float  # at the asked share
    tpot_s: float
    busy: dict[Role, float]


def try_rate(problem: Problem, candidate: Candidate, rate_rps: float, effort: Effort, seed: int) -> Trial:
    """A part of the candidate at its share of the rate; all of it where the effort asks for all devices."""
    part, parts = candidate.part(effort.least_devices)
    share_rps = rate_rps / parts
    window = effort.window(problem, part.devices, share_rps)
    runs = [_run(problem, part, share_rps, window, seed + each) for each in range(effort.seeds)]
    met, first, steps, ttft_s, tpot_s = (float(mean) for mean in np.mean([shares for shares, _ in runs], axis=0))
    busy = {role: float(np.mean([each[role] for _, each in runs])) for role in runs[0][1]}
    return Trial(rate_rps, met, first, steps, ttft_s, tpot_s, busy)


def _run(
    problem: Problem, part: Candidate, rate_rps: float, window: Window, seed: int
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
    """As numpy's, but infinite beside an infinite one, where numpy warns and says that it is no number."""
    ordered = np.sort(values)
    above = ordered[math.ceil(share * (len(ordered) - 1))]
    return math.inf if math.isinf(above) else float(np.quantile(ordered, share))


def _ttft_s(record: Record, end_s: float) -> float:
    """At least as long as has passed, where there is no first token yet; infinite for whoever was turned away."""
    if record.told_tokens:
        return record.ttft_s
    return math.inf if record.ends else end_s - record.arrival_s


def _tpot_s(record: Record, end_s: float) -> float:
    """Of the tokens told; of a second one that is still out, what has passed."""
    if record.ends and not record.served:
        return math.inf
    waits = record.told_tokens == 1 and not record.ends
    return end_s - record.first_s if waits else record.tpot_s


def _busy(part: Candidate, outcome: Outcome, cluster: Cluster) -> dict[Role, float]:
    """Mean over the workers of each role, of the time that was simulated."""
    stretch = outcome.span_s / cluster.now_s if cluster.now_s else 0.0
    roles: dict[Role, list[float]] = {}
    for place in part.mesh.workers():
        roles.setdefault(place.role, []).append(min(1.0, stretch * outcome.busy[str(place.worker)]))
    return {role: float(np.mean(shares)) for role, shares in roles.items()}


def highest(holds: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The highest rate that holds, to `tolerance`, where `low` is known to hold (0 always does).

    `high` is believed not to hold: it is tried only where all below it did, and then the search goes on above it.
    """
    for _ in range(MOST_STEPS):
        top = high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        if high < top or not holds(high):
            break
        low, high = high, 1.2 * high
    return low
