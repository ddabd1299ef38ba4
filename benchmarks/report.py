"""Figures as people read them (tables) and as programs do (JSON)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.figures import Figures, Spread

SPREADS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}
PERCENTILES = ("p50", "p90", "p99")
ENGINE_ROWS = {
    "decode_turns": "decode turns",
    "tokens_per_turn": "tokens a turn",
    "prefill_steps": "prefill steps",
    "transfers": "transfers",
    "shipped_bytes": "bytes shipped",
    "host_gap_ms_per_turn": "host gap, ms a turn",
    "unqueued_turns": "turns not queued in time",
    "turnaround_ms_p50": "turnaround p50, ms",
    "gap_ms_p99": "gap p99, ms",
}


def load_table(title: str, levels: Sequence[Figures]) -> Table:
    """Everything known, one column a level of concurrency; parts that no level has are left out."""
    table = Table(title=title)
    table.add_column("streams")
    for each in levels:
        table.add_column(str(each.concurrency), justify="right")
    sections = (rate_rows(levels), latency_rows(levels), ledger_rows(levels), engine_rows(levels))
    for rows in filter(None, sections):
        table.add_section()
        for name, cells in rows:
            table.add_row(name, *cells)
    return table


Row = tuple[str, list[str]]


def rate_rows(levels: Sequence[Figures]) -> list[Row]:
    """Counts, rates, goodput and CPU time."""
    rows = [
        ("requests", [str(each.requests) for each in levels]),
        ("output tokens/s", [f"{each.output_tokens_per_s:.1f}" for each in levels]),
        ("requests/s", [f"{each.requests_per_s:.2f}" for each in levels]),
        ("within SLO", [f"{each.good_share:.0%}" for each in levels]),
        ("good requests/s", [f"{each.good_requests_per_s:.2f}" for each in levels]),
    ]
    if any(each.failed for each in levels):
        rows.insert(1, ("failed", [str(each.failed) for each in levels]))
    if any(each.server_cpu_s is not None for each in levels):
        rows.append(("CPU s", [_number(each.server_cpu_s) for each in levels]))
    return rows


def latency_rows(levels: Sequence[Figures]) -> list[Row]:
    """Percentiles in milliseconds."""
    rows = []
    for field, name in SPREADS.items():
        spreads: list[Spread | None] = [getattr(each, field) for each in levels]
        for percentile in PERCENTILES:
            label = f"{name} {percentile}, ms" if percentile == PERCENTILES[0] else " " * len(name) + f" {percentile}"
            rows.append((label, [f"{getattr(each, percentile):.1f}" if each else "-" for each in spreads]))
    return rows


def ledger_rows(levels: Sequence[Figures]) -> list[Row]:
    """Where the mean request's time went."""
    phases = dict.fromkeys(phase for each in levels for phase in each.ledger_ms)
    rows = [
        (phase.replace("_", " ") + ", mean ms", [_number(each.ledger_ms.get(phase)) for each in levels])
        for phase in phases
    ]
    return [*rows, ("sum of phases, ms", [f"{sum(each.ledger_ms.values()):.2f}" for each in levels])] if rows else []


def engine_rows(levels: Sequence[Figures]) -> list[Row]:
    """What the observer inside counted."""
    if not any(each.engine for each in levels):
        return []
    return [(name, [_number((each.engine or {}).get(key)) for each in levels]) for key, name in ENGINE_ROWS.items()]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Writes `report` with a newline at its end, making the folder where there is none."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=2) + "\n")
