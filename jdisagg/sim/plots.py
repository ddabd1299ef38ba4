"""Pictures of a simulated run, each a PNG: how latencies spread, goodput over the rate, pages taken, workers at work.

Needs matplotlib, so it is loaded only where a report is asked for. Colours: prefill orange, decode blue, KV green.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jdisagg.core.ledger import PARTS
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.sim.outcome import SLO, Outcome, Point, Record, goodput_rps
from jdisagg.sim.spans import Curve, Place, SpanLog, Work, WorkSpan

INK, PALE, ORANGE, BLUE, GREEN = "#2b2f36", "#8b929c", "#d9761e", "#2463a8", "#3c8f62"
OF_WORK = {Work.PREFILL: ORANGE, Work.DECODE: BLUE, Work.TRANSFER: GREEN}
OF_PART = dict(
    zip(PARTS[:-1], ("#c9ccd1", "#9aa1ab", ORANGE, GREEN, BLUE), strict=True)
)  # all but decode, which dwarfs them
OF_ROLE = {"prefill": ORANGE, "decode": BLUE, "colocated": "#7a5aa6"}
OF_PLACE = dict(zip(Place, (BLUE, "#7fa8d6", GREEN, "#c2a23a", "#7a5aa6"), strict=True))
OF_SOURCE = {Tier.DRAM: GREEN, Tier.DISK: "#c2a23a", Tier.POOL: "#7a5aa6", Tier.PEER: ORANGE}
BARS = 60
MOST_ROWS = 16  # workers of a Gantt
MOST_SPANS = 160  # of its busiest worker
MOST_CURVES = 6  # of single workers; more are shown as their range
GRID = 500  # instants of an occupancy curve


def cdfs(outcome: Outcome, slo: SLO) -> bytes:
    """Shares of requests within a TTFT and within a TPOT, each with its objective."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, metric, limit_s in zip(figure.subplots(1, 2), ("TTFT", "TPOT"), (slo.ttft_s, slo.tpot_s), strict=True):
        _cdf(axes, outcome.values(metric) * 1e3, limit_s * 1e3)
        axes.set_xlabel(f"{metric}, milliseconds")
    return _png(figure)


def _cdf(axes: Axes, values_ms: np.ndarray, limit_ms: float) -> None:
    _dress(axes)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if not len(values_ms):
        return
    shares = np.linspace(0, 1, GRID)
    at_ms = np.quantile(values_ms, shares)
    axes.plot(at_ms, shares, color=BLUE, linewidth=2)
    met = float(np.mean(values_ms <= limit_ms))
    low, high = max(at_ms[0], 1e-3), max(at_ms[-1], 1e-3)
    if high > 30 * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")
    if limit_ms <= 3 * high:
        axes.axvline(limit_ms, color=INK, linewidth=1, linestyle=":")
        axes.set_title(f"{met:.1%} within {limit_ms:g} ms", fontsize=10, color=INK)
    else:
        axes.set_title(f"all within {limit_ms:g} ms (out of sight)", fontsize=10, color=INK)


def goodput(points: Sequence[Point], slo: SLO) -> bytes:
    """Left the share of good requests over the rate, right good requests a second and device."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    share, rate = figure.subplots(1, 2)
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    for axes in (share, rate):
        _dress(axes)
        axes.set_xlabel("requests a second")
    share.plot(rates, [point.attainment for point in ordered], "o-", color=BLUE, linewidth=2)
    share.axhline(slo.share, color=INK, linewidth=1, linestyle=":")
    share.set_ylim(0, 1.05)
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    share.set_title(f"within TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s * 1e3:g} ms", fontsize=10, color=INK)
    best = goodput_rps(points, slo.share)
    if best:
        share.axvline(best, color=GREEN, linewidth=1.2)
        at_end = best == rates[-1]
        text = f"{'at least ' if at_end else ''}{best:.3g}/s at {slo.share:.0%}"
        place = {"xytext": (-6 if best > np.mean(rates) else 6, 6), "ha": "right" if best > np.mean(rates) else "left"}
        share.annotate(text, (best, 0.02), textcoords="offset points", color=GREEN, fontsize=9, **place)
    rate.plot(rates, [point.good_rps_per_device for point in ordered], "o-", color=GREEN, linewidth=2)
    rate.set_ylim(bottom=0)
    rate.set_title("good requests a second and device", fontsize=10, color=INK)
    return _png(figure)


def occupancy(log: SpanLog, span_s: float) -> bytes:
    """Shares of the pages that are taken, over time: each worker, or the range of a role's where there are many."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    _dress(axes)
    at_s = np.linspace(0, span_s, GRID)
    shares = {worker: _share_at(log, worker, at_s) for worker in log.pages}
    roles: dict[str, list[WorkerId]] = {}
    for worker in in_order(shares):
        roles.setdefault(role_of(worker), []).append(worker)
    for role, workers in roles.items():
        _curves(axes, at_s, role, {worker: shares[worker] for worker in workers})
    axes.set_xlim(0, span_s or 1.0)
    axes.set_ylim(0, max([0.05, *(float(share.max()) for share in shares.values())]) * 1.1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("seconds")
    if shares:
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=4)
    return _png(figure)


def where_kv_lies(log: SpanLog, span_s: float) -> bytes:
    """Left tokens of KV by where they lie, of all workers; right what came to HBM, and from where."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at_s = np.linspace(0, span_s, GRID)
    sums = {place: np.zeros(GRID) for place in Place}
    for (_, place), curve in log.lies.items():
        sums[place] += _at(curve, at_s)
    shown = {place: tokens for place, tokens in sums.items() if tokens.any()}
    if shown:
        left.stackplot(at_s, *shown.values(), labels=[*shown], colors=[OF_PLACE[each] for each in shown], linewidth=0)
    left.set_title("tokens of KV; what lies in two places counts twice", fontsize=10, color=INK)
    edges = np.linspace(0, span_s or 1.0, BARS + 1)
    under = np.zeros(BARS)
    for tier, colour in OF_SOURCE.items():
        came = [(when_s, tokens) for when_s, source, tokens in log.came if source is tier and tokens]
        if came:
            when_s, tokens = np.array(came).T
            counts, _ = np.histogram(when_s, edges, weights=tokens)
            right.bar(edges[:-1], counts, edges[1] - edges[0], under, align="edge", color=colour, label=tier.value)
            under += counts
    right.set_title(f"tokens read into HBM, every {edges[1]:.3g} s", fontsize=10, color=INK)
    for axes in (left, right):
        _dress(axes)
        axes.set_xlim(0, span_s or 1.0)
        axes.set_xlabel("seconds")
        axes.yaxis.set_major_formatter(_tokens)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)
            axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    return _png(figure)


def _tokens(value: float, _: object) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value else "0"


def _curves(axes: Axes, at_s: np.ndarray, role: str, shares: Mapping[WorkerId, np.ndarray]) -> None:
    colour, stacked = OF_ROLE.get(role, INK), np.stack([*shares.values()])
    if len(shares) > MOST_CURVES:
        axes.fill_between(at_s, stacked.min(0), stacked.max(0), color=colour, alpha=0.2, linewidth=0, step="post")
        axes.step(at_s, stacked.mean(0), where="post", color=colour, label=f"{len(shares)} {role}, mean and range")
        return
    for number, (worker, share) in enumerate(shares.items()):
        alpha = 1 - 0.7 * number / len(shares)
        axes.step(at_s, share, where="post", color=colour, alpha=alpha, linewidth=1.3, label=worker)


def _share_at(log: SpanLog, worker: WorkerId, at_s: np.ndarray) -> np.ndarray:
    return _at(log.pages[worker], at_s) / log.num_pages[worker]


def _at(curve: Curve, at_s: np.ndarray) -> np.ndarray:
    times, counts = np.array([(0.0, 0), *curve]).T
    return counts[np.searchsorted(times, at_s, side="right") - 1]


def gantt(log: SpanLog) -> tuple[bytes, str]:
    """The workers' plans in a window from the middle of the run, and words on what is shown of how much."""
    workers = in_order(log.workers)[:MOST_ROWS]
    start_s, stop_s = window(log)
    figure = Figure(figsize=(11, 1.1 + 0.42 * len(workers)), layout="constrained")
    axes = figure.subplots()
    _dress(axes)
    axes.grid(axis="y", visible=False)
    largest = max((span.amount for span in log.spans if span.work is Work.DECODE), default=1)
    for row, worker in enumerate(workers):
        spans = [span for span in log.of(worker) if span.done_s >= start_s and span.start_s <= stop_s]
        for work in Work:
            _bars(axes, row, [span for span in spans if span.work is work], largest)
    axes.set_yticks(range(len(workers)), workers)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(start_s, stop_s)
    axes.set_xlabel("seconds")
    shown = [work for work in Work if any(span.work is work for span in log.spans)]
    patches = [Patch(color=OF_WORK[work], label=work.value) for work in shown]
    figure.legend(handles=patches, frameon=False, fontsize=9, loc="outside upper right", ncols=len(shown))
    left_out = len(log.workers) - len(workers)
    words = f"{start_s:.3g} s to {stop_s:.3g} s; a decode step is the darker the more slots it has (at most {largest})"
    return _png(figure), words + (f"; {left_out} more workers are not shown" if left_out else "")


def _bars(axes: Axes, row: int, spans: Sequence[WorkSpan], largest: int) -> None:
    """KV on its way is a thin bar under the worker that it goes to."""
    if not spans:
        return
    work = spans[0].work
    place = (row + 0.30, 0.10) if work is Work.TRANSFER else (row - 0.28, 0.54)
    shades = [0.35 + 0.65 * span.amount / largest if work is Work.DECODE else 1.0 for span in spans]
    colours = [to_rgba(OF_WORK[work], shade) for shade in shades]
    axes.broken_barh([(span.start_s, span.done_s - span.start_s) for span in spans], place, facecolors=colours)


def window(log: SpanLog) -> tuple[float, float]:
    """Seconds from the middle of the run in which the busiest worker has at most MOST_SPANS spans."""
    most: list[WorkSpan] = max(([*log.of(worker)] for worker in log.workers), key=len, default=[])
    if not most:
        return 0.0, 1.0
    first = max(0, (len(most) - MOST_SPANS) // 2)
    shown = most[first : first + MOST_SPANS]
    return shown[0].start_s, max(span.done_s for span in shown)


def where_time_goes(outcome: Outcome) -> bytes:
    """The ledger up to the second token, mean milliseconds: of all requests, and of the tenth slowest to a first."""
    served = sorted(outcome.served, key=lambda record: record.ttft_s)
    groups = {"all requests": served, "slowest tenth\nto a first token": served[-max(1, len(served) // 10) :]}
    figure = Figure(figsize=(11, 2.3), layout="constrained")
    axes = figure.subplots()
    _dress(axes)
    axes.grid(axis="y", visible=False)
    left = np.zeros(len(groups))
    for part, colour in OF_PART.items():
        means = np.array([_mean_ms(records, part) for records in groups.values()])
        if means.max() > 0:
            axes.barh([*groups], means, left=left, color=colour, label=part.replace("_", " "), height=0.6)
        left += means
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, mean")
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")
    if served:
        figure.legend(frameon=False, fontsize=9, loc="outside upper right", ncols=len(OF_PART))
    return _png(figure)


def _mean_ms(records: Sequence[Record], part: str) -> float:
    ledgers = [record.ledger.parts_ns()[part] for record in records if record.ledger is not None]
    return sum(ledgers) / 1e6 / max(1, len(ledgers))


def role_of(worker: WorkerId) -> str:
    return worker.rpartition("-")[0]


def in_order(workers: Sequence[WorkerId] | Mapping[WorkerId, object]) -> list[WorkerId]:
    """Prefill first; numbers as numbers."""

    def key(worker: WorkerId) -> tuple[bool, str, int, str]:
        role, _, number = worker.rpartition("-")
        return role != "prefill", role, int(number) if number.isdigit() else 0, worker

    return sorted(workers, key=key)


def _dress(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    return file.getvalue()
