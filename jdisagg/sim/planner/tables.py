"""What the planner says, as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from jdisagg.sim.planner.formulas import Estimate
from jdisagg.sim.planner.prices import token_prices
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.recommendation import Headroom, bounds_in_words, total
from jdisagg.sim.planner.search import BoundedCandidate, Counts, Found, Shortlisted
from jdisagg.sim.planner.sensitivity import Varied
from jdisagg.sim.planner.space import Kind


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
