"""Reports one simulated run as a table, in sentences and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jdisagg.core.errors import ConfigError
from jdisagg.policy.scaling import Flip
from jdisagg.sim.outcome import METRICS, SLO, Outcome, Point, curve_rows, goodput_text
from jdisagg.sim.simulation import SpanLog

QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One simulation and its wall-clock seconds."""

    outcome: Outcome
    took_s: float
    rate_rps: float
    log: SpanLog | None = None
    changes: str = ""  # sentence about the autoscaler's changes or the lost workers
    flips: Sequence[tuple[float, Flip]] = ()


def latencies(outcome: Outcome) -> Table:
    """Returns a table of means and quantiles in milliseconds."""
    table = Table(title=f"{len(outcome.served)} of {len(outcome.records)} requests served, milliseconds")
    for name in ("", "mean", *(f"p{q}" for q in QUANTILES)):
        table.add_column(name, justify="right" if name else "left")
    for metric in METRICS:
        values = outcome.values(metric)
        numbers = [values.mean(), *np.percentile(values, QUANTILES)] if len(values) else [float("nan")] * 4
        table.add_row(metric, *(f"{1e3 * each:,.1f}" for each in numbers))
    for part, mean_s in outcome.parts_s().items():
        table.add_row(f"  {part.replace('_', ' ')}", f"{1e3 * mean_s:,.1f}", *[""] * len(QUANTILES))
    return table


def summary_lines(run: SimulationRun, slo: SLO, devices: int) -> list[str]:
    """Returns sentences on attainment, throughput, busy workers, cache hits and the speed of the simulation."""
    outcome, took_s = run.outcome, run.took_s
    span_s, requests = max(outcome.span_s, 1e-9), len(outcome.records)
    tokens, attainment = (
        sum(record.emitted_tokens for record in outcome.records),
        outcome.attainment(slo.ttft_s, slo.tpot_s),
    )
    busy = ", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items())
    return [
        f"attainment {attainment:.1%} of TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s:"
        f" {attainment * requests / span_s / devices:.3g} requests/s a device within both",
        f"{requests / span_s:.4g} requests/s, {tokens / span_s:,.0f} tokens/s over {outcome.span_s:,.1f} s; busy:"
        f" {busy}",
        *cache_hit_lines(outcome),
        *tier_move_lines(outcome),
        *([run.changes] if run.changes else []),
        f"simulated in {took_s:.2f} s: {outcome.events / took_s:,.0f} events/s, {requests / took_s:,.0f} requests/s,"
        f" {outcome.span_s / took_s:,.1f} x real time",
    ]


def cache_hit_lines(outcome: Outcome) -> list[str]:
    """Returns the hit rates by role; nothing without lookups."""
    if not any(each.looked_up for each in outcome.lookups.values()):
        return []
    rates = (f"{each.hit_rate:.1%} on {role} workers" for role, each in outcome.lookups.items() if each.looked_up)
    cached = sum(outcome.cached_tokens)
    return [f"prefix cache: of prompt tokens, {', '.join(rates)} were there already; {cached:,} were not computed"]


def tier_move_lines(outcome: Outcome) -> list[str]:
    """Returns the moves between tiers, one line per direction; nothing if there is only HBM."""
    return [
        f"{source} to {destination}: {each.tokens:,} tokens, {each.num_bytes / 1e9:,.4g} GB in {each.moves:,} moves of"
        f" {1e3 * each.seconds / each.moves:,.3g} ms" + (f", {each.missed:,} pages were not there" * (each.missed > 0))
        for (source, destination), each in outcome.moved.items()
    ]


def write_json(run: SimulationRun, slo: SLO, devices: int, path: Path | str) -> None:
    """Writes the run's numbers. Raises ConfigError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(figures(run, slo, devices), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def figures(run: SimulationRun, slo: SLO, devices: int) -> dict[str, Any]:
    """Returns the numbers of the table and the sentences, in seconds and tokens; None for quantiles of no values."""
    outcome, span_s = run.outcome, max(run.outcome.span_s, 1e-9)
    point = Point.of(outcome, run.rate_rps, slo, devices)
    return {
        "requests": len(outcome.records),
        "served": len(outcome.served),
        "rate_rps": run.rate_rps,
        "span_s": outcome.span_s,
        "attainment": point.attainment,
        "good_rps_per_device": point.good_rps_per_device,
        "output_tokens_per_s": sum(record.emitted_tokens for record in outcome.records) / span_s,
        "cached_tokens": sum(outcome.cached_tokens),
        "prefix_cache": {
            str(role): {"looked_up_tokens": each.looked_up, "found_tokens": each.found, "hit_rate": each.hit_rate}
            for role, each in outcome.lookups.items()
        },
        "tiers": {f"{source}_to_{destination}": asdict(each) for (source, destination), each in outcome.moved.items()},
        **{f"{metric.lower()}_s": _spread(outcome.values(metric)) for metric in METRICS},
        "parts_s": outcome.parts_s(),
        "busy": outcome.busy,
        "flips": [{"at_s": at_s, "worker": flip.worker, "role": flip.role.value} for at_s, flip in run.flips],
        "events": outcome.events,
        "simulated_in_s": run.took_s,
    }


def _spread(values_s: np.ndarray) -> dict[str, float] | None:
    if not len(values_s):
        return None
    quantiles = zip(QUANTILES, np.percentile(values_s, QUANTILES).tolist(), strict=True)
    return {"mean": float(values_s.mean()), **{f"p{percent}": value for percent, value in quantiles}}


def curve(points: Sequence[Point], slo: SLO) -> Table:
    """Returns a table with one row per rate."""
    best = goodput_text(points, slo.share)
    table = Table(title=f"{best} requests/s with {slo.share:.0%} within TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s")
    head, *rows = curve_rows(points)
    for name in head:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
