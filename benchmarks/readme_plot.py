"""The README's picture of when disaggregation pays, from benchmarks/results/crossover.json:

    python -m benchmarks.readme_plot [--output=docs/images/when_it_pays.png]

Output tokens/s, and how long the slowest gaps between tokens are, of prompts of 256 to 512 tokens: medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.crossover_figures import ARCHITECTURES
from benchmarks.crossover_plot import COLOURS, NAMES, PALE
from benchmarks.plot import INK

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "crossover.json"
WORKLOAD = "prefill-heavy"
PANELS = {"tokens_per_s": "output tokens/s", "ttft_ms": "first token, ms", "tpot_ms": "a token after it, ms"}


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG of one row of panels."""
    figure = Figure(figsize=(10.5, 3.3), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (metric, name) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _panel(axes, report["cells"], metric)
        axes.set_title(name, fontsize=12, color=INK)
        axes.set_xlabel("streams at once", color=INK, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=11)
    machine = report["machine"]
    lengths = report["workloads"][WORKLOAD]["prompt_tokens"].replace(":", " to ")
    note = f"prompts of {lengths} tokens; {machine['cores']} cores of {machine['processor']}, {report['date'][:10]}"
    figure.supxlabel(note, fontsize=9, color=PALE)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, cells: Sequence[Mapping[str, Any]], metric: str) -> None:
    levels = sorted({each["streams"] for each in cells})
    for name in ARCHITECTURES:
        mine = [each for each in cells if each["architecture"] == name and each["workload"] == WORKLOAD]
        mine.sort(key=lambda each: each["streams"])
        streams, spreads = [each["streams"] for each in mine], [each[metric] for each in mine]
        low, high = [each["low"] for each in spreads], [each["high"] for each in spreads]
        axes.fill_between(streams, low, high, color=COLOURS[name], alpha=0.18, linewidth=0)
        axes.plot(streams, [each["mid"] for each in spreads], "o-", color=COLOURS[name], label=NAMES[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(each) for each in levels])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_plot", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "when_it_pays.png", help="PNG file")
    plot(json.loads(RESULT.read_text()), parser.parse_args(argv).output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
