"""What a search means: whether to disaggregate, by how much, and which resource each of the shortlist runs out of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jdisagg.core.worker_config import Role
from jdisagg.sim.planner.limits import RESOURCES, Limits
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.search import Found, Shortlisted
from jdisagg.sim.planner.space import Kind, devices_of

FIRST_TOKEN = ("prefill", "queue", "memory")  # what makes first tokens late: without a reservation no prompt starts
LATER_TOKENS = ("decode", "link", "memory")


@dataclass(frozen=True, slots=True)
class Gain:
    """Of one shortlisted over another, relative; `noise` is what runs of another seed may differ by."""

    mean: float
    noise: float

    @property
    def told_apart(self) -> bool:
        return self.mean > self.noise


def gain(one: Shortlisted, other: Shortlisted, tolerance: float) -> Gain:
    """Seed by seed: both saw the same requests. Two standard errors, or the bisections' own tolerance if greater."""
    ratios = np.array(one.goodputs) / np.maximum(other.goodputs, 1e-12) - 1.0
    spread = 2 * float(ratios.std(ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return Gain(float(ratios.mean()), max(spread, tolerance))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The winner and the runner-up; `lines` say it in words."""

    winner: Shortlisted
    runner_up: Shortlisted | None
    disaggregate: bool
    lines: tuple[str, ...]


def recommend(problem: Problem, found: Found, tolerance: float) -> Recommendation:
    """Disaggregation has to win by more than noise: it is the more complicated of the two."""
    split, whole = found.of(Kind.DISAGGREGATED), found.of(Kind.SINGLE, Kind.REPLICATED)
    assert split or whole, "a search that found nothing has raised"
    if not split or not whole:
        winner = found.shortlist[0]
        lines = [_alone(problem, winner)]
    else:
        over = gain(split, whole, tolerance)
        winner = split if over.told_apart else whole
        lines = [_told_apart(problem, split, whole, over)]
    rest = [each for each in found.shortlist if each is not winner]
    if rest:
        explained = split is not None and whole is not None and rest[0] in (split, whole)
        lines.append(_second(problem, winner, rest[0], explained))
    return Recommendation(winner, rest[0] if rest else None, winner is split, tuple(lines))


def _alone(problem: Problem, winner: Shortlisted) -> str:
    if winner.candidate.kind is Kind.DISAGGREGATED:
        return f"disaggregate: no worker of both roles keeps {problem.objectives}"
    if problem.devices == 1:
        return "do not disaggregate: there is 1 device, and two pools need 2"
    return f"do not disaggregate: no pair of pools on {problem.devices} devices keeps {problem.objectives}"


def _told_apart(problem: Problem, split: Shortlisted, whole: Shortlisted, over: Gain) -> str:
    rates = f"{total(problem, split):.3g} requests/s within the objectives against {total(problem, whole):.3g}"
    if over.told_apart:
        return (
            f"disaggregate: {split.candidate.mesh} carries {rates} of {whole.candidate.mesh}, {over.mean:+.0%}"
            f" (noise {over.noise:.0%}); there, {why(problem, whole)}"
        )
    return (
        f"do not disaggregate: the best pair of pools, {split.candidate.mesh}, carries {rates} of"
        f" {whole.candidate.mesh}, {over.mean:+.0%} (noise {over.noise:.0%}); {why(problem, split)}"
    )


def _second(problem: Problem, winner: Shortlisted, second: Shortlisted, explained: bool) -> str:
    """`explained`: the line above has said what binds it."""
    less = 1.0 - second.goodput / winner.goodput
    words = f"{less:.0%} less" if less > 0 else f"{-less:.0%} more, which is noise"
    return f"runner-up: {second.candidate}, {words}" + ("" if explained else f": {why(problem, second)}")


def total(problem: Problem, shortlisted: Shortlisted) -> float:
    """Requests a second of all its devices."""
    return shortlisted.goodput * problem.paid(shortlisted.candidate)


# ---------------------------------------------------------------------- which resource binds


def binding(shortlisted: Shortlisted) -> str:
    """The scarcest resource among those that make late what was late just above the goodput."""
    above = shortlisted.above
    names = FIRST_TOKEN if above.first_in_time <= above.steps_in_time else LATER_TOKENS
    rates = shortlisted.limits.rates()
    return min(names, key=lambda name: rates[name])


def why(problem: Problem, shortlisted: Shortlisted) -> str:
    """One sentence from numbers."""
    name = binding(shortlisted)
    return f"{RESOURCES[name]} binds: {_SENTENCES[name](problem, shortlisted)}"


def _prefill(problem: Problem, shortlisted: Shortlisted) -> str:
    limits, objectives, above = shortlisted.limits, problem.objectives, shortlisted.above
    pool = shortlisted.candidate.mesh.pools[0]
    return (
        f"a prompt takes {1e3 * limits.prompt_device_s:.3g} ms of a device, so {devices_of(pool)} of them do"
        f" {limits.prefill:.3g} a second at most, and at {above.rate_rps:.3g} {above.first_in_time:.0%} of first tokens"
        f" came within {1e3 * objectives.ttft_s:g} ms{_spare(shortlisted)}"
    )


def _decode(problem: Problem, shortlisted: Shortlisted) -> str:
    limits, objectives, above = shortlisted.limits, problem.objectives, shortlisted.above
    between = ", with prompts between them" if shortlisted.candidate.kind is not Kind.DISAGGREGATED else ""
    return (
        f"steps{between} read weights and KV within {1e3 * objectives.tpot_s:g} ms up to {limits.decode:.3g} a second,"
        f" and at {above.rate_rps:.3g} {above.steps_in_time:.0%} of the requests kept it{_spare(shortlisted)}"
    )


def _memory(problem: Problem, shortlisted: Shortlisted) -> str:
    context = problem.workload.means.context_tokens
    return (
        f"pages are full at {shortlisted.limits.memory:.3g} requests/s with {context:,.0f} tokens a sequence"
        f"{_spare(shortlisted)}"
    )


def _link(problem: Problem, shortlisted: Shortlisted) -> str:
    tokens = problem.workload.means.input_tokens
    return f"the KV of {tokens:,.0f} tokens a prompt fills the ports at {shortlisted.limits.link:.3g} requests/s"


_SENTENCES = {"prefill": _prefill, "queue": _prefill, "decode": _decode, "memory": _memory, "link": _link}


def _spare(shortlisted: Shortlisted) -> str:
    """How busy the other pool is meanwhile."""
    busy = shortlisted.at_goodput.busy
    if Role.COLOCATED in busy:
        return ""
    return f" (at its goodput prefill works {busy[Role.PREFILL]:.0%} of the time, decode {busy[Role.DECODE]:.0%})"


# ---------------------------------------------------------------------- the asked rate


@dataclass(frozen=True, slots=True)
class Headroom:
    """At an asked rate. `share` is of it that the winner could take besides; negative where it cannot take it."""

    asked_rps: float
    share: float
    devices: int  # that would do, by goodput a device


def headroom(problem: Problem, winner: Shortlisted, asked_rps: float) -> Headroom:
    devices = max(1, math.ceil(asked_rps / winner.goodput - 1e-9))
    return Headroom(asked_rps, total(problem, winner) / asked_rps - 1.0, devices)


def bounds_in_words(limits: Limits) -> str:
    """Every resource's rate, least first."""
    rates = sorted(limits.rates().items(), key=lambda row: row[1])
    return ", ".join(f"{RESOURCES[name]} {rate:.3g}" for name, rate in rates if rate < math.inf)
