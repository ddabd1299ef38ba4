"""The search: arithmetic first, then one simulation of each that it leaves, then more of those that lead.

A candidate is simulated at the rate of the best one so far; only if it keeps the objectives there, its own goodput is
sought (a race). Those that lead their architecture, and the runner-up, are measured with more seeds, all with the same
requests (successive halving; Jamieson and Talwalkar, AISTATS 2016), so that differences are the candidates' own.
Nothing is random but by the problem's seed, and no clock is read: equal inputs, equal answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.sim.planner.limits import Arithmetic, Infeasible, Limits
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.space import Candidate, Kind, Space
from jdisagg.sim.planner.trials import Effort, Trial, highest, try_rate

SLACK = 1.05  # bounds are of mean requests: a workload may do this much better
SHORT = Effort(0.75, 0.5, 0.1, least_ttfts=8, least_devices=16)  # of the race
LONG = Effort(least_requests=400, least_ttfts=20)  # of the finals
SEEDS = 3  # that shortlist are measured with


@dataclass(frozen=True, slots=True)
class Entrant:
    """A candidate that arithmetic leaves in."""

    candidate: Candidate
    limits: Limits
    bound: float  # requests/s a paid device


@dataclass(frozen=True, slots=True)
class Scored:
    """`goodput` in requests/s a paid device; where `exact` is False it is under a rate that was missed."""

    entrant: Entrant
    goodput: float
    exact: bool = True


@dataclass(frozen=True)
class Shortlisted:
    """Measured for long. Goodputs are by seed, requests/s a paid device."""

    entrant: Entrant
    goodputs: tuple[float, ...]
    at_goodput: Trial  # the highest rate tried that held, of the first seed
    above: Trial  # the lowest that did not: what gives way first

    @property
    def candidate(self) -> Candidate:
        return self.entrant.candidate

    @property
    def limits(self) -> Limits:
        return self.entrant.limits

    @property
    def goodput(self) -> float:
        return float(np.mean(self.goodputs))


@dataclass
class Counts:
    """What became of the candidates."""

    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason: arithmetic says no
    pruned: int = 0  # their bound is below the best found
    left: int = 0  # not tried: there were more than `most` of a kind
    tried: int = 0
    runs: int = 0


@dataclass(frozen=True)
class Found:
    """Finalists, best first."""

    shortlist: tuple[Shortlisted, ...]
    counts: Counts
    field: tuple[Entrant, ...]  # all that arithmetic left in, best bound first

    def of(self, *kinds: Kind) -> Shortlisted | None:
        """The best of some architectures."""
        return next((each for each in self.shortlist if each.candidate.kind in kinds), None)


Told = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


@dataclass
class Search:
    """One problem's search. `most`: candidates of one architecture that are simulated at all."""

    problem: Problem
    short: Effort = SHORT
    long: Effort = LONG
    seeds: int = SEEDS
    tolerance: float = 0.03
    most: int = 24
    slack: float = SLACK  # inf: bounds neither prune nor cap, as for runs so short that they only put work off
    told: Told = quiet
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._arithmetic = Arithmetic(self.problem)
        self._trials: dict[tuple[Candidate, Effort, int], dict[float, Trial]] = {}  # by rate

    def over(self, space: Space) -> Found:
        """Raises `Infeasible` where nothing can keep the objectives."""
        entrants = self.enter(space)
        leaders: list[Scored] = []
        for kind in Kind:
            ranked = self.race([each for each in entrants if each.candidate.kind is kind], str(kind))
            leaders += self.refine(space, ranked)[:2]
        leaders.sort(key=lambda scored: -scored.goodput)
        return Found(self.finals(_shortlist(leaders)), self.counts, tuple(entrants))

    # ------------------------------------------------------------ arithmetic

    def enter(self, candidates: Iterable[Candidate]) -> list[Entrant]:
        """Those that arithmetic leaves in, best bound first. Of each disaggregated mesh only the chunk with the best
        bound: chunks matter most where decode waits for them."""
        best: dict[tuple[str, int], Entrant] = {}
        for candidate in candidates:
            self.counts.considered += 1
            entrant = self.entrant(candidate)
            key = (str(candidate.mesh), 0 if candidate.kind is Kind.DISAGGREGATED else candidate.chunk_tokens)
            if entrant and (key not in best or entrant.bound > best[key].bound):
                best[key] = entrant
        if not best:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in self.counts.refused.most_common(3))
            raise Infeasible(f"none of {self.counts.considered} configurations keeps {self._asked}: {reasons}")
        return sorted(best.values(), key=lambda each: -each.bound)

    @property
    def _asked(self) -> str:
        return f"{self.problem.objectives} on {self.problem.devices or 'any'} devices"

    def entrant(self, candidate: Candidate) -> Entrant | None:
        try:
            found = self._arithmetic.limits(candidate)
        except ConfigError as error:
            self.counts.refused[str(error)] += 1
            return None
        if found.bound <= 0:
            self.counts.refused[f"{self.problem.objectives} is kept at no rate"] += 1
            return None
        return Entrant(candidate, found, found.bound / self.problem.paid(candidate))

    # ------------------------------------------------------------ a run each

    def race(self, entrants: list[Entrant], what: str, best: float = 0.0) -> list[Scored]:
        """Best first. An entrant is dropped unseen when even its bound is below the best so far."""
        scored: list[Scored] = []
        self.counts.left += len(entrants[self.most :])
        for index, entrant in enumerate(entrants[: self.most]):
            self.told(what, index, min(len(entrants), self.most))
            if entrant.bound * self.slack <= best:
                self.counts.pruned += 1
                continue
            scored.append(self._against(entrant, best))
            if scored[-1].exact:
                best = max(best, scored[-1].goodput)
        self.told(what, 1, 1)
        return sorted(scored, key=lambda each: -each.goodput)

    def _against(self, entrant: Entrant, best: float) -> Scored:
        """Its goodput if it is above the best so far, else what is left of that."""
        self.counts.tried += 1
        share = self.problem.objectives.share
        if best:
            met = self._trial(entrant, best, self.short).met
            if met < share:
                return Scored(entrant, best * met / share * 0.999, exact=False)
        return Scored(entrant, self._goodput(entrant, best, max(entrant.bound, 1.05 * best), self.short))

    def refine(self, space: Space, ranked: list[Scored]) -> list[Scored]:
        """Other chunks and transfer modes for whoever leads; kept where they gain what runs can tell."""
        if not ranked:
            return ranked
        leader = ranked[0]
        others = [self.entrant(each) for each in space.neighbours(leader.entrant.candidate)]
        tried = self.race([each for each in others if each], f"around {leader.entrant.candidate.mesh}", leader.goodput)
        better = [each for each in tried if each.exact and each.goodput > (1 + self.tolerance) * leader.goodput]
        return [*better[:1], *ranked]

    def _goodput(self, entrant: Entrant, low: float, high: float, effort: Effort, seed: int = 0) -> float:
        """A rate a device."""
        share = self.problem.objectives.share
        sustained = entrant.limits.sustained / self.problem.paid(entrant.candidate)

        def holds(rate: float) -> bool:
            return rate <= sustained * self.slack and self._trial(entrant, rate, effort, seed).met >= share

        return highest(holds, low, high, self.tolerance)

    def _trial(self, entrant: Entrant, per_device: float, effort: Effort, seed: int = 0) -> Trial:
        known = self._trials.setdefault((entrant.candidate, effort, seed), {})
        if per_device not in known:
            self.counts.runs += 1
            rate = per_device * self.problem.paid(entrant.candidate)
            known[per_device] = try_rate(self.problem, entrant.candidate, rate, effort, seed)
        return known[per_device]

    # ------------------------------------------------------------ more seeds

    def finals(self, leaders: list[Scored]) -> tuple[Shortlisted, ...]:
        """Measured with the same seeds each, best first."""
        measured = []
        for index, leader in enumerate(leaders):
            self.told("shortlist", index, len(leaders))
            measured.append(self.measure(leader))
        self.told("shortlist", 1, 1)
        return tuple(sorted((each for each in measured if each.goodput > 0), key=lambda each: -each.goodput))

    def measure(self, leader: Scored) -> Shortlisted:
        """Goodput by seed, sought near what the race said."""
        entrant = leader.entrant
        goodputs = tuple(self._near(entrant, leader.goodput, seed) for seed in range(self.seeds))
        share = self.problem.objectives.share
        trials = sorted(self._trials[entrant.candidate, self.long, 0].values(), key=lambda trial: trial.rate_rps)
        kept = [trial for trial in trials if trial.met >= share] or trials[:1]
        missed = [trial for trial in trials if trial.met < share] or trials[-1:]
        return Shortlisted(entrant, goodputs, kept[-1], missed[0])

    def _near(self, entrant: Entrant, near: float, seed: int) -> float:
        share, effort = self.problem.objectives.share, self.long
        if self._trial(entrant, near, effort, seed).met >= share:
            return self._goodput(entrant, near, 1.06 * near, effort, seed)
        low = 0.9 * near
        if self._trial(entrant, low, effort, seed).met >= share:
            return self._goodput(entrant, low, near, effort, seed)
        return self._goodput(entrant, 0.0, low, effort, seed)


def _shortlist(leaders: list[Scored]) -> list[Scored]:
    """The best of each architecture, and the best two of all."""
    chosen = leaders[:2]
    for kind in Kind:
        first = next((each for each in leaders if each.entrant.candidate.kind is kind), None)
        if first and first not in chosen:
            chosen.append(first)
    return chosen
