"""The picture of the comparison: a column a workload, a row a metric, a line an architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.crossover_figures import ARCHITECTURES, DISAGGREGATED, REPLICATED, RISING, SINGLE, Cell, crossings
from benchmarks.plot import INK

PALE = "#777777"
COLOURS = {SINGLE: "#9aa1ab", REPLICATED: "#2463a8", DISAGGREGATED: "#d9761e"}
ROWS = {
    "tokens_per_s": "output tokens/s",
    "ttft_ms": "first token, ms",
    "itl_p99_ms": "p99 token gap, ms",
    "good_per_s": "good requests/s",
}
NAMES = {SINGLE: "one device", REPLICATED: "two replicas", DISAGGREGATED: "prefill + decode apart"}


def plot(
    path: str, cells: Sequence[Cell], note: str, lengths: Mapping[str, str], predicted: Sequence[Cell] = ()
) -> None:
    """Writes a PNG. lengths: words on each workload's; predicted: the same cells by the simulator, drawn dashed."""
    workloads = list(dict.fromkeys(each.workload for each in cells))
    figure = Figure(figsize=(2.6 + 3.4 * len(workloads), 2.35 * len(ROWS)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(ROWS), len(workloads), squeeze=False, sharex=True)
    for row, metric in enumerate(ROWS):
        for column, workload in enumerate(workloads):
            axes = grid[row][column]
            mine = [each for each in cells if each.workload == workload]
            _panel(axes, metric, mine, [each for each in predicted if each.workload == workload])
            _dress(axes, sorted({each.streams for each in mine}), log=metric in ("ttft_ms", "itl_p99_ms"))
            if row == 0:
                axes.set_title(f"{workload}\n", fontsize=14, color=INK)
                axes.text(0.5, 1.03, lengths[workload], transform=axes.transAxes, ha="center", fontsize=10, color=PALE)
            if column == 0:
                axes.set_ylabel(ROWS[metric], color=INK, fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel("streams at once", color=INK, fontsize=11)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=13)
    figure.supxlabel(note, fontsize=10, color=PALE)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, metric: str, cells: Sequence[Cell], predicted: Sequence[Cell]) -> None:
    """Medians as lines, ranges of rounds as bands, a rule where the lead changes."""
    curves = {name: _curve(cells, name) for name in ARCHITECTURES}
    for name, curve in curves.items():
        streams = [each.streams for each in curve]
        values = [getattr(each, metric) for each in curve]
        colour = COLOURS[name]
        axes.fill_between(
            streams, [v.low for v in values], [v.high for v in values], color=colour, alpha=0.18, linewidth=0
        )
        axes.plot(streams, [v.mid for v in values], "o-", color=colour, linewidth=2.2, markersize=5, label=NAMES[name])
        foreseen = _curve(predicted, name)
        if foreseen:
            middles = [getattr(each, metric).mid for each in foreseen]
            axes.plot([each.streams for each in foreseen], middles, "--", color=colour, linewidth=1.2)
    ours, theirs = curves[DISAGGREGATED], curves[REPLICATED]
    levels = [each.streams for each in ours]
    mine, other = [getattr(each, metric) for each in ours], [getattr(each, metric) for each in theirs]
    for crossing in crossings(levels, mine, other, metric in RISING):
        axes.axvline(crossing.streams, color=INK, linewidth=0.9, linestyle=":")
        axes.annotate(f"{crossing.streams:.2g}", (crossing.streams, 1), (3, -10), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=9, color=INK)  # fmt: skip


def _curve(cells: Sequence[Cell], name: str) -> list[Cell]:
    return sorted((each for each in cells if each.architecture == name), key=lambda each: each.streams)


def _dress(axes: Axes, streams: Sequence[int], log: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(streams), [str(each) for each in streams])
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=10)
