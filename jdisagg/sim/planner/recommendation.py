"""What a search means: whether to disaggregate, by how much, and which resource each of the shortlist runs out of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role
from jdisagg.sim.arithmetic import PoolPrices, pool_prices
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.planner.limits import RESOURCES, Estimate, Limits
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.search import BoundedCandidate, Counts, Found, Search, Shortlisted
from jdisagg.sim.planner.space import Candidate, Kind, Space, devices_of

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


# Would the answer be another if the question were a little different? The link halved, the objectives moved.

CHALLENGERS = 2  # of each architecture, besides the shortlist


@dataclass(frozen=True, slots=True)
class Varied:
    """goodput: of the old winner under the new question; best: whoever wins then, and its goodput."""

    name: str
    goodput: float
    winner: Candidate | None
    best: float
    changed: bool


def vary(
    found: Found, winner: Shortlisted, space: Space, questions: Mapping[str, Problem], like: Search
) -> tuple[list[Varied], Counts]:
    """Each of the questions, with one seed: the winner against the shortlist and the best bounds of each kind."""
    counts = Counts()
    return [_varied(name, problem, found, winner, space, like, counts) for name, problem in questions.items()], counts


def _varied(
    name: str, problem: Problem, found: Found, winner: Shortlisted, space: Space, like: Search, counts: Counts
) -> Varied:
    search = Search(problem, like.short, like.long, 1, like.tolerance, like.most, like.slack, like.on_progress, counts)
    feasible = _challengers(search, found, winner, space)
    own = [each for each in feasible if each.candidate == winner.candidate]
    if not feasible:
        return Varied(name, 0.0, None, 0.0, True)
    goodput = search.race(own, name)[0].goodput if own else 0.0
    others = [each for each in feasible if each.candidate != winner.candidate]
    better = [each for each in search.race(others, name, goodput * (1 + like.tolerance)) if each.exact]
    if better:
        return Varied(name, goodput, better[0].bounded.candidate, better[0].goodput, True)
    return Varied(name, goodput, winner.candidate, goodput, False)


def _challengers(search: Search, found: Found, winner: Shortlisted, space: Space) -> list[BoundedCandidate]:
    """Best bound first."""
    try:
        feasible = search.with_limits(space)
    except ConfigError:
        return []
    shortlist = {each.candidate for each in found.shortlist}
    chosen = [each for each in feasible if each.candidate in shortlist]
    missing = shortlist - {each.candidate for each in chosen}
    chosen += [each for each in map(search.bounded, sorted(missing, key=str)) if each]
    for kind in Kind:
        new = [each for each in feasible if each.candidate.kind is kind and each.candidate not in shortlist]
        chosen += new[:CHALLENGERS]
    return sorted(chosen, key=lambda each: -each.bound)


# The plan as `jdisagg.launch` takes it: a TOML file of settings, each in its group, and why in comments.


def settings_of(candidate: Candidate, given: ClusterSpec) -> dict[str, Any]:
    """What was simulated, by the names of `Settings`."""
    prefill = next(each for each in given.workers if each.role.prefills)
    decode = next(each for each in given.workers if each.role.decodes)
    found: dict[str, Any] = {
        "mesh": str(candidate.mesh),
        "max_model_len": decode.max_model_len,
        "max_num_seqs": decode.num_slots,
        "max_num_batched_tokens": prefill.prefill_buckets[-1],
        "max_chunk_seqs": prefill.max_chunk_seqs,
        "page_size": decode.page_size,
        "steps_in_flight": decode.steps_in_flight,
        "reserve_tokens": decode.reserve_tokens,
        "mixed_steps": "on" if decode.mixed_steps else "off",
    }
    if candidate.kind is Kind.DISAGGREGATED:
        found["transfer"] = str(candidate.transfer)
    if given.routing is not None:
        found["routing"] = str(given.routing)
    return found


def as_policy(settings: Mapping[str, Any], why: Sequence[str]) -> str:
    """TOML text. Raises ConfigError for a setting that cannot be."""
    known = {each.name: each for each in fields(Settings)}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"no setting {', '.join(unknown)} among those of jdisagg.launch")
    Settings(**settings).check()
    groups: dict[str, list[str]] = {}
    for name, value in settings.items():
        groups.setdefault(known[name].metadata["group"], []).append(f"{name} = {json.dumps(value)}")
    lines = [f"# {line}" for line in why]
    for group, rows in groups.items():
        lines += ["", f"[{group}]", *rows]
    return "\n".join(lines) + "\n"


# USD a million tokens of a candidate: each pool's hours over the tokens that it serves within the objectives.
#
# The first output token is a prefill product: it is counted there. Idle devices are paid by both pools alike. A
# worker of both roles is split by the share of its busy time that prompts take, so that architectures compare.

HOUR_S = 3600.0


def token_prices(problem: Problem, shortlisted: Shortlisted, rate_rps: float, usd_per_hour: float) -> PoolPrices:
    """At `rate_rps` requests a second, with every paid device at `usd_per_hour`."""
    means = problem.workload.means
    usd_per_s = usd_per_hour / HOUR_S * problem.paid(shortlisted.candidate)
    share = prefill_share(shortlisted)
    later_tokens = max(means.output_tokens - 1.0, 1e-9)
    return pool_prices(
        share * usd_per_s,
        (1 - share) * usd_per_s,
        0.0,
        rate_rps * means.input_tokens,
        rate_rps * later_tokens,
    )


def prefill_share(shortlisted: Shortlisted) -> float:
    """Of the devices in use, or of their busy time where they do both."""
    candidate = shortlisted.candidate
    if candidate.kind is Kind.DISAGGREGATED:
        return devices_of(candidate.mesh.pools[0]) / candidate.devices
    busy_devices = shortlisted.at_goodput.busy[Role.COLOCATED] * candidate.devices
    return min(1.0, shortlisted.at_goodput.rate_rps * shortlisted.limits.prompt_device_s / max(busy_devices, 1e-9))


# What the planner says, as tables and lines for a terminal.


def shortlist(problem: Problem, found: Found, usd_per_hour: float, asked_rps: float) -> Table:
    """Goodput, what the first seed's run at it was like, and prices at the asked rate or at the goodput."""
    table = Table(title=f"best of each architecture, {problem.objectives}", box=box.SIMPLE_HEAD)
    table.add_column("mesh, tokens of a chunk, KV leaves by", overflow="fold")
    for name in ("req/s", "a device", "TTFT, TPOT ms", "busy", "$/M in, out"):
        table.add_column(name, justify="right")
    for each in found.shortlist:
        table.add_row(*_row(problem, each, usd_per_hour, asked_rps))
    return table


def _row(problem: Problem, each: Shortlisted, usd_per_hour: float, asked_rps: float) -> list[str]:
    at, carried = each.at_goodput, total(problem, each)
    candidate = each.candidate
    leaves = f", {candidate.transfer}" if candidate.kind is Kind.DISAGGREGATED else ""
    spread = (max(each.goodputs) - min(each.goodputs)) / 2 / each.goodput
    prices = "not stated"
    if usd_per_hour:
        found = token_prices(problem, each, min(asked_rps or carried, carried), usd_per_hour)
        prices = f"{found.uncached_input_tokens:.3f} {found.output_tokens:.3f}"
    return [
        f"{candidate.mesh}, {candidate.chunk_tokens}{leaves}",
        f"{carried:.3g} ±{spread:.0%}",
        f"{each.goodput:.3g}",
        f"{1e3 * at.ttft_s:,.0f} {1e3 * at.tpot_s:,.1f}",
        " ".join(f"{share:.0%}" for share in at.busy.values()),
        prices,
    ]


def counted(counts: Counts) -> list[str]:
    """What became of all candidates."""
    refused = sum(counts.refused.values())
    lines = [
        f"{counts.considered:,} configurations: {refused:,} refused by arithmetic, {counts.pruned:,} under the best by"
        f" their bound, {counts.left:,} behind the best bounds and not tried, {counts.tried:,} simulated in"
        f" {counts.runs:,} runs"
    ]
    return lines + [f"  {count:,} x {reason}" for reason, count in counts.refused.most_common(3)]


def room(found: Headroom) -> str:
    if found.share >= 0:
        return f"at {found.asked_rps:g} requests/s: {found.share:.0%} of headroom; {found.devices} devices would do"
    return f"at {found.asked_rps:g} requests/s: {-found.share:.0%} too few; it takes about {found.devices} devices"


def varied(rows: Sequence[Varied]) -> Table:
    table = Table(title="if the question were another (one seed)")
    for name in ("", "the plan, requests/s a device", "does another win?"):
        table.add_column(name)
    for row in rows:
        if row.winner is None:
            other = "nothing keeps the objectives"
        elif row.changed:
            other = f"yes: {row.winner}, {row.best:.3g}"
        else:
            other = "no"
        table.add_row(row.name, f"{row.goodput:.3g}", other)
    return table


def bounds(problem: Problem, feasible: Sequence[BoundedCandidate], most: int = 12) -> Table:
    """What arithmetic alone says."""
    table = Table(title=f"upper bounds by arithmetic, {problem.objectives}")
    for name in ("configuration", "requests/s", "what binds, requests/s each"):
        table.add_column(name)
    for each in feasible[:most]:
        table.add_row(str(each.candidate), f"{each.limits.bound:.3g}", bounds_in_words(each.limits))
    return table


def replicas(found: Sequence[Estimate], rate_rps: float, most: int = 6) -> Table:
    table = Table(title=f"replicas for {rate_rps:g} requests/s by throughput (Dynamo's formulas), fewest devices first")
    for name in ("configuration", "devices"):
        table.add_column(name)
    for each in found[:most]:
        table.add_row(str(each.candidate.mesh), str(each.devices))
    return table
