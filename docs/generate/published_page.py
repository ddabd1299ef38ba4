"""The simulator's gates against published results, from benchmarks/results/published.json."""

from __future__ import annotations

import json
from pathlib import Path

from tests.published.gates import Gate
from tests.published.table import RESULTS, Collector, full_table, summary

RESULT = RESULTS.with_suffix(".json")
INTRO = """# The simulator against published results

`python -m tests.published.table FOLDER` reads the public files and writes these; a gate is a published figure,
ours, and the band that ours must lie in. A miss has its reason beside it.

## Summary"""


def collected(path: Path = RESULT) -> Collector:
    """What the run found that wrote the file."""
    report = json.loads(path.read_text(encoding="utf-8"))
    found = Collector(skipped=report["not_run"])
    for each in report["gates"]:
        suite = each.pop("suite")
        found.suites.setdefault(suite, []).append(Gate(**each))
    return found


def text() -> str:
    found = collected()
    whole = full_table(found).split("\n", 4)[4]  # its head is ours here
    return f"{INTRO}\n\n{summary(found)}\n\n{whole}"
