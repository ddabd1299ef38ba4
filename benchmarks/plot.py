"""The picture of a load: throughput, time to first token and time between tokens, over concurrency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.figures import SLO, Figures, Spread

INK, BLUE, ORANGE = "#333333", "#2463a8", "#d9761e"
BAND = 0.18  # opacity


def plot_load(path: str, title: str, note: str, levels: Sequence[Figures], slo: SLO) -> None:
    """Writes a PNG of three panels; `note` (machine, lengths) stands small below."""
    figure = Figure(figsize=(13, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    throughput, first, between = figure.subplots(1, 3)
    _throughput(throughput, levels)
    _latency(first, "Time to first token", levels, lambda each: each.ttft_ms, slo.ttft_ms)
    _latency(between, "Time between tokens", levels, lambda each: each.itl_ms, slo.tpot_ms)
    for axes in (throughput, first, between):
        _dress(axes, [each.concurrency for each in levels])
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK)
    figure.supxlabel(note, fontsize=9, color="#777777")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _throughput(axes: Axes, levels: Sequence[Figures]) -> None:
    streams = [each.concurrency for each in levels]
    rates = [each.output_tokens_per_s for each in levels]
    axes.plot(streams, rates, "o-", color=BLUE, linewidth=2.5, markersize=7)
    for x, y in zip(streams, rates, strict=True):
        axes.annotate(f"{y:.0f}", (x, y), (-5, 7), textcoords="offset points", ha="right", fontsize=10, color=BLUE)
    axes.set_title("Throughput", fontsize=12, color=INK)
    axes.set_ylabel("output tokens per second", color=INK)
    axes.set_ylim(0, max(rates, default=1.0) * 1.18)


def _latency(
    axes: Axes, title: str, levels: Sequence[Figures], spread_of: Callable[[Figures], Spread | None], slo_ms: float
) -> None:
    """Median as a line, up to p90 as a band, p99 dashed, the SLO as a rule where it is in sight."""
    found = [(each.concurrency, spread) for each in levels if (spread := spread_of(each)) is not None]
    streams = [x for x, _ in found]
    p50, p90, p99 = ([getattr(spread, name) for _, spread in found] for name in ("p50", "p90", "p99"))
    axes.fill_between(streams, p50, p90, color=ORANGE, alpha=BAND, linewidth=0, label="to p90")
    axes.plot(streams, p50, "o-", color=ORANGE, linewidth=2.5, markersize=7, label="p50")
    axes.plot(streams, p99, "--", color=ORANGE, linewidth=1.2, label="p99")
    top = max(p99, default=1.0) * 1.12
    if slo_ms <= top * 2:
        axes.axhline(slo_ms, color=INK, linewidth=1, linestyle=":", label=f"SLO {slo_ms:g} ms")
        top = max(top, slo_ms * 1.12)
    axes.set_ylim(0, top)
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_ylabel("milliseconds", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _dress(axes: Axes, streams: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(streams), [str(each) for each in streams])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_xlabel("concurrent requests", color=INK)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
