"""What `benchmarks/results/` holds, and how its figures are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Report = Mapping[str, Any]


def result(name: str) -> Any:
    """Of `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def origin(report: Report) -> str:
    """Where figures are from, in one line."""
    machine, versions = report["machine"], report["versions"]
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']:.0f} GiB, Linux"
    load = machine["load_average"][0]
    command = report["command"].replace("/tmp/", "FOLDER/")
    return f"`{command}`: {where}, load {load:.1f} before it, jax {versions['jax']}, {report['date'][:10]}."


def rows_of(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(each).replace("|", "\\|") for each in line) + " |" for line in lines)


def short(value: float) -> str:
    """Three digits, more for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")
