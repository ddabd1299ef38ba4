"""One self-contained HTML page about a simulation: the cluster, latencies, where time goes, and how far to trust it.

Pictures are inlined, there are no scripts, and nothing is fetched.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jdisagg.core.errors import ConfigError
from jdisagg.core.ledger import PARTS
from jdisagg.core.profile import Checked
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.sim.outcome import METRICS, SLO, Outcome, Point, Record, curve_rows, goodput_rps, goodput_text, trust
from jdisagg.sim.simulation import Curve, KVLocation, SpanLog, WorkKind, WorkSpan

# Pictures of a simulated run, each a PNG: latency distributions, goodput over the rate, page use, Gantt chart.
#
# Needs matplotlib, so it is loaded only for a report. Colours: prefill orange, decode blue, KV green.

INK, PALE, ORANGE, BLUE, GREEN = "#2b2f36", "#8b929c", "#d9761e", "#2463a8", "#3c8f62"
OF_WORK = {WorkKind.PREFILL: ORANGE, WorkKind.DECODE: BLUE, WorkKind.TRANSFER: GREEN}
OF_PART = dict(
    zip(PARTS[:-1], ("#c9ccd1", "#9aa1ab", ORANGE, GREEN, BLUE), strict=True)
)  # all but decode, which would dwarf the others
OF_ROLE = {"prefill": ORANGE, "decode": BLUE, "colocated": "#7a5aa6"}
OF_PLACE = dict(zip(KVLocation, (BLUE, "#7fa8d6", GREEN, "#c2a23a", "#7a5aa6"), strict=True))
OF_SOURCE = {Tier.DRAM: GREEN, Tier.DISK: "#c2a23a", Tier.POOL: "#7a5aa6", Tier.PEER: ORANGE}
BARS = 60
MOST_ROWS = 16  # workers in a Gantt chart
MOST_SPANS = 160  # spans of its busiest worker
MOST_CURVES = 6  # single workers; more are drawn as their range
GRID = 500  # points of an occupancy curve


def cdfs(outcome: Outcome, slo: SLO) -> bytes:
    """Draws the shares of requests within a TTFT and within a TPOT, each with its objective."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, metric, limit_s in zip(figure.subplots(1, 2), ("TTFT", "TPOT"), (slo.ttft_s, slo.tpot_s), strict=True):
        _cdf(axes, outcome.values(metric) * 1e3, limit_s * 1e3)
        axes.set_xlabel(f"{metric}, milliseconds")
    return _png(figure)


def _cdf(axes: Axes, values_ms: np.ndarray, limit_ms: float) -> None:
    _style_axes(axes)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if not len(values_ms):
        return
    shares = np.linspace(0, 1, GRID)
    at_ms = np.quantile(values_ms, shares)
    axes.plot(at_ms, shares, color=BLUE, linewidth=2)
    share_met = float(np.mean(values_ms <= limit_ms))
    low, high = max(at_ms[0], 1e-3), max(at_ms[-1], 1e-3)
    if high > 30 * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")
    if limit_ms <= 3 * high:
        axes.axvline(limit_ms, color=INK, linewidth=1, linestyle=":")
        axes.set_title(f"{share_met:.1%} within {limit_ms:g} ms", fontsize=10, color=INK)
    else:
        axes.set_title(f"all within {limit_ms:g} ms (out of sight)", fontsize=10, color=INK)


def goodput(points: Sequence[Point], slo: SLO) -> bytes:
    """Draws the share of good requests over the rate (left) and good requests per second and device (right)."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    share, rate = figure.subplots(1, 2)
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    for axes in (share, rate):
        _style_axes(axes)
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
        placement = {
            "xytext": (-6 if best > np.mean(rates) else 6, 6),
            "ha": "right" if best > np.mean(rates) else "left",
        }
        share.annotate(text, (best, 0.02), textcoords="offset points", color=GREEN, fontsize=9, **placement)
    rate.plot(rates, [point.good_rps_per_device for point in ordered], "o-", color=GREEN, linewidth=2)
    rate.set_ylim(bottom=0)
    rate.set_title("good requests a second and device", fontsize=10, color=INK)
    return _png(figure)


def occupancy(log: SpanLog, span_s: float) -> bytes:
    """Draws the share of used pages over time: each worker, or the range of a role with many workers."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    _style_axes(axes)
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
    """Draws the tokens of KV by location, of all workers (left), and the tokens loaded into HBM by source (right)."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at_s = np.linspace(0, span_s, GRID)
    sums = {place: np.zeros(GRID) for place in KVLocation}
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
        _style_axes(axes)
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
    """Draws the workers' spans in a window from the middle of the run; returns the PNG and a caption."""
    workers = in_order(log.workers)[:MOST_ROWS]
    start_s, stop_s = window(log)
    figure = Figure(figsize=(11, 1.1 + 0.42 * len(workers)), layout="constrained")
    axes = figure.subplots()
    _style_axes(axes)
    axes.grid(axis="y", visible=False)
    largest = max((span.amount for span in log.spans if span.work is WorkKind.DECODE), default=1)
    for row, worker in enumerate(workers):
        spans = [span for span in log.of(worker) if span.done_s >= start_s and span.start_s <= stop_s]
        for work in WorkKind:
            _bars(axes, row, [span for span in spans if span.work is work], largest)
    axes.set_yticks(range(len(workers)), workers)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(start_s, stop_s)
    axes.set_xlabel("seconds")
    shown = [work for work in WorkKind if any(span.work is work for span in log.spans)]
    patches = [Patch(color=OF_WORK[work], label=work.value) for work in shown]
    figure.legend(handles=patches, frameon=False, fontsize=9, loc="outside upper right", ncols=len(shown))
    left_out = len(log.workers) - len(workers)
    caption = (
        f"{start_s:.3g} s to {stop_s:.3g} s; a decode step is the darker the more slots it has (at most {largest})"
    )
    return _png(figure), caption + (f"; {left_out} more workers are not shown" if left_out else "")


def _bars(axes: Axes, row: int, spans: Sequence[WorkSpan], largest: int) -> None:
    """Draws one kind of work of a worker; KV transfer is a thin bar under the destination worker."""
    if not spans:
        return
    work = spans[0].work
    offset = (row + 0.30, 0.10) if work is WorkKind.TRANSFER else (row - 0.28, 0.54)
    shades = [0.35 + 0.65 * span.amount / largest if work is WorkKind.DECODE else 1.0 for span in spans]
    colours = [to_rgba(OF_WORK[work], shade) for shade in shades]
    axes.broken_barh([(span.start_s, span.done_s - span.start_s) for span in spans], offset, facecolors=colours)


def window(log: SpanLog) -> tuple[float, float]:
    """Returns the window in the middle of the run in which the busiest worker has at most MOST_SPANS spans."""
    most: list[WorkSpan] = max(([*log.of(worker)] for worker in log.workers), key=len, default=[])
    if not most:
        return 0.0, 1.0
    first = max(0, (len(most) - MOST_SPANS) // 2)
    shown = most[first : first + MOST_SPANS]
    return shown[0].start_s, max(span.done_s for span in shown)


def where_time_goes(outcome: Outcome) -> bytes:
    """Draws the ledger up to the second token in mean milliseconds, for all requests and the slowest tenth by TTFT."""
    served = sorted(outcome.served, key=lambda record: record.ttft_s)
    groups = {"all requests": served, "slowest tenth\nto a first token": served[-max(1, len(served) // 10) :]}
    figure = Figure(figsize=(11, 2.3), layout="constrained")
    axes = figure.subplots()
    _style_axes(axes)
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
    """Orders workers: prefill first, numbers numerically."""

    def key(worker: WorkerId) -> tuple[bool, str, int, str]:
        role, _, number = worker.rpartition("-")
        return role != "prefill", role, int(number) if number.isdigit() else 0, worker

    return sorted(workers, key=key)


def _style_axes(axes: Axes) -> None:
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


QUANTILES = (50, 90, 99)
SLOWEST = 8  # requests that are listed
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f36; background: #fff; margin: 0 auto; max-width: 1060px;
       padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 4px 0; } .pale { color: #6b727d; font-size: 13px; } img { width: 100%; display: block; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 20px 0 12px; }
.tile { border: 1px solid #e1e4e8; border-radius: 6px; padding: 8px 12px; flex: 1 1 130px; }
.tile b { display: block; font-size: 19px; font-weight: 600; white-space: nowrap; }
.tile span { color: #6b727d; font-size: 12.5px; }
.trust { border-left: 3px solid #d9761e; padding: 4px 12px; margin: 14px 0; }
.wide { overflow-x: auto; }
table { margin-top: 10px; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; border-bottom: 1px solid #c9ccd1; padding: 3px 12px; white-space: nowrap; }
td { text-align: right; padding: 3px 12px; border-bottom: 1px solid #eef0f2; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class ReportContent:
    """The contents of a report page."""

    title: str
    command: str
    facts: Mapping[str, str]  # facts about the cluster and the workload, by name
    outcome: Outcome
    log: SpanLog
    slo: SLO
    devices: int
    curve: Sequence[Point] = ()  # runs at several rates, if there were any
    checked: Checked | None = None  # result of the last check of the costs against a live run


def write_report(story: ReportContent, path: Path | str) -> None:
    """Writes the page to `path`. Raises ConfigError if it cannot be written."""
    try:
        Path(path).write_text(page(story), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def page(story: ReportContent) -> str:
    """Returns the HTML of the page."""
    outcome = story.outcome
    picture, caption = gantt(story.log)
    sections = [
        tiles(story),
        f'<p class="trust">{escape(trust(story.checked))}</p>',
        section("Latencies", table(latency_rows(outcome)), image(cdfs(outcome, story.slo), "CDFs")),
    ]
    if len(story.curve) > 1:
        curve = image(goodput(story.curve, story.slo), "goodput against rate")
        sections.append(section("Goodput against rate", curve, table(curve_rows(story.curve))))
    sections += [
        section(
            "Where the time up to the second token goes",
            image(where_time_goes(outcome), "parts of the ledger"),
            pale(f"Decoding after it takes {outcome.parts_s()['decode'] * 1e3:,.0f} ms of the mean request."),
        ),
        section("Pages taken", image(occupancy(story.log, outcome.span_s), "occupancy of the pools")),
        *kept_kv(story),
        section("Workers at work", image(picture, "Gantt of the workers"), pale(caption), table(busy_rows(outcome))),
        section(f"The {SLOWEST} slowest to a first token, milliseconds", table(slowest_rows(outcome))),
    ]
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in story.facts.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(story.title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        f"<h1>{escape(story.title)}</h1>\n<p>{facts}</p>\n<p><code>{escape(story.command)}</code></p>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def kept_kv(story: ReportContent) -> list[str]:
    """Returns the section about KV locations, if workers keep any."""
    if not story.log.lies:
        return []
    picture = image(where_kv_lies(story.log, story.outcome.span_s), "where KV lies, and where it came from")
    moves = [table(moved_rows(story.outcome))] if story.outcome.moved else []
    return [section("Where KV lies", picture, *moves)]


def moved_rows(outcome: Outcome) -> Rows:
    yield ("from", "to", "tokens", "GB", "moves", "ms a move", "pages not there")
    for (source, destination), each in outcome.moved.items():
        sizes = (f"{each.tokens:,}", f"{each.num_bytes / 1e9:,.4g}", f"{each.moves:,}")
        yield (source, destination, *sizes, f"{1e3 * each.seconds / each.moves:,.3g}", f"{each.missed:,}")


def tiles(story: ReportContent) -> str:
    """Returns the tiles with the main numbers."""
    outcome, slo = story.outcome, story.slo
    span_s = max(outcome.span_s, 1e-9)
    tokens = sum(record.emitted_tokens for record in outcome.records)
    met = outcome.attainment(slo.ttft_s, slo.tpot_s)
    shown = {
        f"within TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms": f"{met:.1%}",
        "good requests/s a device": f"{met * len(outcome.records) / span_s / story.devices:.3g}",
        "output tokens/s": f"{tokens / span_s:,.0f}",
        "TTFT p50 / p99": _pair_ms(outcome.values("TTFT")),
        "TPOT p50 / p99": _pair_ms(outcome.values("TPOT")),
    }
    for role, each in outcome.lookups.items():
        if each.looked_up:
            shown[f"of prompt tokens found on {role} workers"] = f"{each.hit_rate:.1%}"
    if len(story.curve) > 1:
        shown[f"requests/s at {slo.share:.0%} good"] = goodput_text(story.curve, slo.share)
    each = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown.items()
    )
    return f'<div class="tiles">{"".join(each)}</div>'


Rows = Iterable[Sequence[str]]  # rows of text; the first is the header


def latency_rows(outcome: Outcome) -> Rows:
    yield ("milliseconds", "mean", *(f"p{each}" for each in QUANTILES), "longest")
    for metric in METRICS:
        values = outcome.values(metric) * 1e3
        if len(values):
            figures = [values.mean(), *np.percentile(values, QUANTILES), values.max()]
            yield (metric, *(f"{each:,.1f}" for each in figures))


def busy_rows(outcome: Outcome) -> Rows:
    yield ("worker", "busy", "requests prefilled", "requests decoded")
    first = [record.prefill_worker for record in outcome.served]
    second = [record.decode_worker for record in outcome.served]
    for worker, share in [*outcome.busy.items()][:MOST_ROWS]:
        yield (worker, f"{share:.1%}", str(first.count(worker)), str(second.count(worker)))


def slowest_rows(outcome: Outcome) -> Rows:
    yield ("request", "arrived, s", "in", "out", "TTFT", *(part.replace("_", " ") for part in PARTS))
    for record in sorted(outcome.served, key=lambda each: -each.ttft_s)[:SLOWEST]:
        yield _row_of(record)


def _row_of(record: Record) -> tuple[str, ...]:
    assert record.ledger is not None, "whoever was served has a ledger"
    parts = (f"{ns / 1e6:,.1f}" for ns in record.ledger.parts_ns().values())
    sizes = (f"{record.arrival_s:,.2f}", f"{record.input_tokens:,}", f"{record.emitted_tokens:,}")
    return (record.request_id, *sizes, f"{record.ttft_s * 1e3:,.1f}", *parts)


def table(rows: Rows) -> str:
    head, *body = rows
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body]
    names = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def image(png: bytes, name: str) -> str:
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def pale(text: str) -> str:
    return f'<p class="pale">{escape(text)}</p>'


def section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def _pair_ms(values_s: np.ndarray) -> str:
    if not len(values_s):
        return "-"
    low, high = np.percentile(values_s, (50, 99))
    scale, unit = (1.0, "s") if high >= 10 else (1e3, "ms")
    return f"{_short(low * scale)} / {_short(high * scale)} {unit}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
