"""Interprets a search: whether to disaggregate, by how much, and which resource binds each shortlisted candidate."""

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
from jdisagg.sim.planner.limits import RESOURCES, CapacityLimits, Estimate
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.search import BoundedCandidate, SearchResult, SearchRun, SearchStats, ShortlistEntry
from jdisagg.sim.planner.space import CandidateSource, Kind, PlanCandidate, devices_of

# resources that delay first tokens: without a reservation no prompt starts
FIRST_TOKEN = ("prefill", "queue", "memory")
LATER_TOKENS = ("decode", "link", "memory")


@dataclass(frozen=True, slots=True)
class GainEstimate:
    """The relative gain of one shortlisted candidate over another; `noise` is the difference expected between seeds."""

    mean: float
    noise: float

    @property
    def is_significant(self) -> bool:
        return self.mean > self.noise


def gain(one: ShortlistEntry, other: ShortlistEntry, tolerance: float) -> GainEstimate:
    """Compares goodputs seed by seed, on the same requests. The noise is two standard errors, or the tolerance of the
    bisection if greater."""
    ratios = np.array(one.goodputs) / np.maximum(other.goodputs, 1e-12) - 1.0
    spread = 2 * float(ratios.std(ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return GainEstimate(float(ratios.mean()), max(spread, tolerance))


@dataclass(frozen=True, slots=True)
class RecommendedPlan:
    """The winner and the runner-up; `lines` explain the choice."""

    winner: ShortlistEntry
    runner_up: ShortlistEntry | None
    should_disaggregate: bool
    lines: tuple[str, ...]


def recommend(problem: Problem, found: SearchResult, tolerance: float) -> RecommendedPlan:
    """Recommends a candidate. Disaggregation must win by more than noise, as it is the more complicated of the two."""
    disaggregated, colocated = found.of(Kind.DISAGGREGATED), found.of(Kind.SINGLE, Kind.REPLICATED)
    assert disaggregated or colocated, "a search that found nothing has raised"
    if not disaggregated or not colocated:
        winner = found.shortlist[0]
        lines = [_only_architecture(problem, winner)]
    else:
        margin = gain(disaggregated, colocated, tolerance)
        winner = disaggregated if margin.is_significant else colocated
        lines = [_comparison(problem, disaggregated, colocated, margin)]
    rest = [each for each in found.shortlist if each is not winner]
    if rest:
        explained = disaggregated is not None and colocated is not None and rest[0] in (disaggregated, colocated)
        lines.append(_second(problem, winner, rest[0], explained))
    return RecommendedPlan(winner, rest[0] if rest else None, winner is disaggregated, tuple(lines))


def _only_architecture(problem: Problem, winner: ShortlistEntry) -> str:
    if winner.candidate.kind is Kind.DISAGGREGATED:
        return f"disaggregate: no worker of both roles keeps {problem.objectives}"
    if problem.devices == 1:
        return "do not disaggregate: there is 1 device, and two pools need 2"
    return f"do not disaggregate: no pair of pools on {problem.devices} devices keeps {problem.objectives}"


def _comparison(
    problem: Problem, disaggregated: ShortlistEntry, colocated: ShortlistEntry, margin: GainEstimate
) -> str:
    rates = (
        f"{total(problem, disaggregated):.3g} requests/s within the objectives against {total(problem, colocated):.3g}"
    )
    if margin.is_significant:
        return (
            f"disaggregate: {disaggregated.candidate.mesh} carries {rates} of {colocated.candidate.mesh},"
            f" {margin.mean:+.0%} (noise {margin.noise:.0%}); there, {why(problem, colocated)}"
        )
    return (
        f"do not disaggregate: the best pair of pools, {disaggregated.candidate.mesh}, carries {rates} of"
        f" {colocated.candidate.mesh}, {margin.mean:+.0%} (noise {margin.noise:.0%});"
        f" {why(problem, disaggregated)}"
    )


def _second(problem: Problem, winner: ShortlistEntry, second: ShortlistEntry, explained: bool) -> str:
    """Returns the sentence on the runner-up; `explained`: the line above has named the binding resource."""
    less = 1.0 - second.goodput / winner.goodput
    words = f"{less:.0%} less" if less > 0 else f"{-less:.0%} more, which is noise"
    return f"runner-up: {second.candidate}, {words}" + ("" if explained else f": {why(problem, second)}")


def total(problem: Problem, shortlisted: ShortlistEntry) -> float:
    """Returns the requests per second of all its devices."""
    return shortlisted.goodput * problem.paid(shortlisted.candidate)


def binding(shortlisted: ShortlistEntry) -> str:
    """Returns the scarcest resource among those behind the missed objective just above the goodput."""
    above = shortlisted.above
    names = FIRST_TOKEN if above.first_in_time <= above.steps_in_time else LATER_TOKENS
    rates = shortlisted.limits.rates()
    return min(names, key=lambda name: rates[name])


def why(problem: Problem, shortlisted: ShortlistEntry) -> str:
    """Returns one sentence on the binding resource with its numbers."""
    name = binding(shortlisted)
    return f"{RESOURCES[name]} binds: {_SENTENCES[name](problem, shortlisted)}"


def _prefill(problem: Problem, shortlisted: ShortlistEntry) -> str:
    limits, objectives, above = shortlisted.limits, problem.objectives, shortlisted.above
    pool = shortlisted.candidate.mesh.pools[0]
    return (
        f"a prompt takes {1e3 * limits.prompt_device_s:.3g} ms of a device, so {devices_of(pool)} of them do"
        f" {limits.prefill:.3g} a second at most, and at {above.rate_rps:.3g} {above.first_in_time:.0%} of first tokens"
        f" came within {1e3 * objectives.ttft_s:g} ms{_spare(shortlisted)}"
    )


def _decode(problem: Problem, shortlisted: ShortlistEntry) -> str:
    limits, objectives, above = shortlisted.limits, problem.objectives, shortlisted.above
    between = ", with prompts between them" if shortlisted.candidate.kind is not Kind.DISAGGREGATED else ""
    return (
        f"steps{between} read weights and KV within {1e3 * objectives.tpot_s:g} ms up to {limits.decode:.3g} a second,"
        f" and at {above.rate_rps:.3g} {above.steps_in_time:.0%} of the requests kept it{_spare(shortlisted)}"
    )


def _memory(problem: Problem, shortlisted: ShortlistEntry) -> str:
    context = problem.workload.means.context_tokens
    return (
        f"pages are full at {shortlisted.limits.memory:.3g} requests/s with {context:,.0f} tokens a sequence"
        f"{_spare(shortlisted)}"
    )


def _link(problem: Problem, shortlisted: ShortlistEntry) -> str:
    tokens = problem.workload.means.input_tokens
    return f"the KV of {tokens:,.0f} tokens a prompt fills the ports at {shortlisted.limits.link:.3g} requests/s"


_SENTENCES = {"prefill": _prefill, "queue": _prefill, "decode": _decode, "memory": _memory, "link": _link}


def _spare(shortlisted: ShortlistEntry) -> str:
    """Returns a remark on how busy the two pools are at the goodput."""
    busy = shortlisted.at_goodput.busy
    if Role.COLOCATED in busy:
        return ""
    return f" (at its goodput prefill works {busy[Role.PREFILL]:.0%} of the time, decode {busy[Role.DECODE]:.0%})"


@dataclass(frozen=True, slots=True)
class SpareCapacity:
    """The capacity left at a requested rate. `share`: the winner's spare capacity relative to that rate; negative if it
    cannot carry the rate."""

    asked_rps: float
    share: float
    devices: int  # devices that would suffice, by goodput per device


def headroom(problem: Problem, winner: ShortlistEntry, asked_rps: float) -> SpareCapacity:
    devices = max(1, math.ceil(asked_rps / winner.goodput - 1e-9))
    return SpareCapacity(asked_rps, total(problem, winner) / asked_rps - 1.0, devices)


def bounds_in_words(limits: CapacityLimits) -> str:
    """Returns every resource's rate, lowest first."""
    rates = sorted(limits.rates().items(), key=lambda row: row[1])
    return ", ".join(f"{RESOURCES[name]} {rate:.3g}" for name, rate in rates if rate < math.inf)


# Does the answer change with the question? Variants: half the link bandwidth, other objectives.

CHALLENGERS = 2  # of each architecture, in addition to the shortlist


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The winner of a variant of the problem. `goodput`: of the original winner in the variant. `best`: goodput of the
    variant's winner."""

    name: str
    goodput: float
    winner: PlanCandidate | None
    best: float
    is_changed: bool


def vary(
    found: SearchResult,
    winner: ShortlistEntry,
    space: CandidateSource,
    questions: Mapping[str, Problem],
    like: SearchRun,
) -> tuple[list[VariantResult], SearchStats]:
    """Answers each variant with one seed: the winner against the shortlist and the best bounds of each kind."""
    counts = SearchStats()
    return [_varied(name, problem, found, winner, space, like, counts) for name, problem in questions.items()], counts


def _varied(
    name: str,
    problem: Problem,
    found: SearchResult,
    winner: ShortlistEntry,
    space: CandidateSource,
    like: SearchRun,
    counts: SearchStats,
) -> VariantResult:
    search = SearchRun(
        problem, like.short, like.long, 1, like.tolerance, like.most, like.slack, like.on_progress, counts
    )
    feasible = _challengers(search, found, winner, space)
    own = [each for each in feasible if each.candidate == winner.candidate]
    if not feasible:
        return VariantResult(name, 0.0, None, 0.0, True)
    goodput = search.race(own, name)[0].goodput if own else 0.0
    others = [each for each in feasible if each.candidate != winner.candidate]
    better = [each for each in search.race(others, name, goodput * (1 + like.tolerance)) if each.is_exact]
    if better:
        return VariantResult(name, goodput, better[0].bounded.candidate, better[0].goodput, True)
    return VariantResult(name, goodput, winner.candidate, goodput, False)


def _challengers(
    search: SearchRun, found: SearchResult, winner: ShortlistEntry, space: CandidateSource
) -> list[BoundedCandidate]:
    """Returns the candidates to compare, best bound first."""
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


# The plan as `jdisagg launch` reads it: a TOML file of settings by group, with the reasons in comments.


def settings_of(candidate: PlanCandidate, given: ClusterSpec) -> dict[str, Any]:
    """Returns the simulated sizes by their names in `Settings`."""
    prefill = next(each for each in given.workers if each.role.prefills)
    decode = next(each for each in given.workers if each.role.decodes)
    settings: dict[str, Any] = {
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
        settings["transfer"] = str(candidate.transfer)
    if given.routing is not None:
        settings["routing"] = str(given.routing)
    return settings


def as_policy(settings: Mapping[str, Any], why: Sequence[str]) -> str:
    """Returns TOML text. Raises ConfigError for an unknown or invalid setting."""
    known = {each.name: each for each in fields(Settings)}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"no setting {', '.join(unknown)} among those of jdisagg launch")
    Settings(**settings).check()
    groups: dict[str, list[str]] = {}
    for name, value in settings.items():
        groups.setdefault(known[name].metadata["group"], []).append(f"{name} = {json.dumps(value)}")
    lines = [f"# {line}" for line in why]
    for group, rows in groups.items():
        lines += ["", f"[{group}]", *rows]
    return "\n".join(lines) + "\n"


# A candidate's USD per million tokens: each pool's hours over the tokens that it serves within the objectives.
#
# The first output token counts as prefill. Idle devices are paid by both pools in proportion. A colocated worker is
# split by the share of its busy time that prompts take, so that architectures compare.

HOUR_S = 3600.0


def token_prices(problem: Problem, shortlisted: ShortlistEntry, rate_rps: float, usd_per_hour: float) -> PoolPrices:
    """Returns the prices at `rate_rps` requests per second, with every paid device at `usd_per_hour`."""
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


def prefill_share(shortlisted: ShortlistEntry) -> float:
    """Returns prefill's share of the devices in use, or of the busy time of colocated workers."""
    candidate = shortlisted.candidate
    if candidate.kind is Kind.DISAGGREGATED:
        return devices_of(candidate.mesh.pools[0]) / candidate.devices
    busy_devices = shortlisted.at_goodput.busy[Role.COLOCATED] * candidate.devices
    return min(1.0, shortlisted.at_goodput.rate_rps * shortlisted.limits.prompt_device_s / max(busy_devices, 1e-9))


# The planner's tables and lines for a terminal.


def shortlist(problem: Problem, found: SearchResult, usd_per_hour: float, asked_rps: float) -> Table:
    """Returns a table of goodputs, latencies at the goodput, and prices at the requested rate or at the goodput."""
    table = Table(title=f"best of each architecture, {problem.objectives}", box=box.SIMPLE_HEAD)
    table.add_column("mesh, tokens of a chunk, KV leaves by", overflow="fold")
    for name in ("req/s", "a device", "TTFT, TPOT ms", "busy", "$/M in, out"):
        table.add_column(name, justify="right")
    for each in found.shortlist:
        table.add_row(*_row(problem, each, usd_per_hour, asked_rps))
    return table


def _row(problem: Problem, each: ShortlistEntry, usd_per_hour: float, asked_rps: float) -> list[str]:
    at, carried = each.at_goodput, total(problem, each)
    candidate = each.candidate
    leaves = f", {candidate.transfer}" if candidate.kind is Kind.DISAGGREGATED else ""
    spread = (max(each.goodputs) - min(each.goodputs)) / 2 / each.goodput
    prices = "not stated"
    if usd_per_hour:
        prices_found = token_prices(problem, each, min(asked_rps or carried, carried), usd_per_hour)
        prices = f"{prices_found.uncached_input_tokens:.3f} {prices_found.output_tokens:.3f}"
    return [
        f"{candidate.mesh}, {candidate.chunk_tokens}{leaves}",
        f"{carried:.3g} ±{spread:.0%}",
        f"{each.goodput:.3g}",
        f"{1e3 * at.ttft_s:,.0f} {1e3 * at.tpot_s:,.1f}",
        " ".join(f"{share:.0%}" for share in at.busy.values()),
        prices,
    ]


def counted(counts: SearchStats) -> list[str]:
    """Returns lines on how many candidates were refused, pruned and simulated."""
    refused = sum(counts.refused.values())
    lines = [
        f"{counts.considered:,} configurations: {refused:,} refused by arithmetic, {counts.pruned:,} under the best by"
        f" their bound, {counts.left:,} behind the best bounds and not tried, {counts.tried:,} simulated in"
        f" {counts.runs:,} runs"
    ]
    return lines + [f"  {count:,} x {reason}" for reason, count in counts.refused.most_common(3)]


def room(found: SpareCapacity) -> str:
    if found.share >= 0:
        return f"at {found.asked_rps:g} requests/s: {found.share:.0%} of headroom; {found.devices} devices would do"
    return f"at {found.asked_rps:g} requests/s: {-found.share:.0%} too few; it takes about {found.devices} devices"


def varied(rows: Sequence[VariantResult]) -> Table:
    table = Table(title="if the question were another (one seed)")
    for name in ("", "the plan, requests/s a device", "does another win?"):
        table.add_column(name)
    for row in rows:
        if row.winner is None:
            other = "nothing keeps the objectives"
        elif row.is_changed:
            other = f"yes: {row.winner}, {row.best:.3g}"
        else:
            other = "no"
        table.add_row(row.name, f"{row.goodput:.3g}", other)
    return table


def bounds(problem: Problem, feasible: Sequence[BoundedCandidate], most: int = 12) -> Table:
    """Returns a table of the bounds by arithmetic."""
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
