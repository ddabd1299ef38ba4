"""Every gate of this folder in one table: `python -m tests.published.table DATA_DIR [PYTEST_ARGUMENT ...]`.

Runs the suites with the full files of DATA_DIR and writes benchmarks/results/published.json and .md: target, published,
ours, band, verdict, and why a miss is one; `python -m docs.generate` makes the page of docs from them. What was skipped
is counted under the table. Exit code 1: a gate was missed that nothing explains.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.published.gates import GATES, WITHIN, Gate, shown

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "published"
OUR_OWN = "test_gates"  # holds gates of nobody's


@dataclass
class Collector:
    """A pytest plugin: which suite held which gates, and what did not run or failed."""

    suites: dict[str, list[Gate]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)  # tests by reason
    failed: list[str] = field(default_factory=list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        before = len(GATES)
        try:
            return (yield)
        finally:
            gates = GATES[before:]
            if gates and item.path.stem != OUR_OWN:
                self.suites.setdefault(item.path.stem, []).extend(gates)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple), "a skip says where and why"
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self.skipped[reason] = self.skipped.get(reason, 0) + 1


def law_of(suite: str) -> str:
    """The first line of the suite's docstring."""
    law = ast.get_docstring(ast.parse((HERE / f"{suite}.py").read_text(encoding="utf-8")))
    assert law, f"{suite} says what it holds"
    return law.splitlines()[0]


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def full_table(found: Collector) -> str:
    lines = ["# The simulator against published results", ""]
    lines += ["Written by `python -m tests.published.table`. Figures are of the unit that the target names.", ""]
    for suite, gates in sorted(found.suites.items()):
        lines += [f"## {suite}", "", law_of(suite), ""]
        lines += [row("target", "published", "ours", "band", "verdict", "note"), "|---|---|---|---|---|---|"]
        lines += [row(g.target, shown(g.published), shown(g.ours), g.band, g.verdict, g.note) for g in gates]
        lines += [""]
    lines += [f"Not run: {count} tests, {reason}." for reason, count in sorted(found.skipped.items())]
    return "\n".join(lines).rstrip() + "\n"


def summary(found: Collector) -> str:
    """How many of each suite's gates are within, and the misses with their reasons."""
    lines = [row("suite", "gates", "within their bands"), "|---|---|---|"]
    for suite, gates in sorted(found.suites.items()):
        within = sum(gate.verdict == WITHIN for gate in gates)
        lines.append(row(law_of(suite), str(len(gates)), str(within)))
    missed = [gate for gates in found.suites.values() for gate in gates if gate.verdict != WITHIN]
    lines += ["", *(f"- Missed: {gate}" for gate in missed)]
    return "\n".join(lines)


def write(found: Collector) -> None:
    rows = [{"suite": suite, **asdict(gate)} for suite, gates in sorted(found.suites.items()) for gate in gates]
    RESULTS.with_suffix(".json").write_text(json.dumps({"gates": rows, "not_run": found.skipped}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(full_table(found), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    found, folder = Collector(), Path(arguments[0])
    pytest.main([str(HERE), f"--data_dir={folder}", "-q", "-p", "no:xdist", *arguments[1:]], plugins=[found])
    write(found)
    gates = [gate for each in found.suites.values() for gate in each]
    within = sum(gate.verdict == WITHIN for gate in gates)
    print(f"{within} of {len(gates)} gates within their bands; table in {RESULTS.with_suffix('.md')}")
    return int(bool(found.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
