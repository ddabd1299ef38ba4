"""One page that stands alone: what was simulated, how it went, where the time went, and how far to trust it.

Pictures are inlined, there are no scripts, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.ledger import PARTS
from jdisagg.core.profile import Checked
from jdisagg.sim import plots
from jdisagg.sim.outcome import METRICS, SLO, Outcome, Point, Record, curve_rows, goodput_text, trust
from jdisagg.sim.spans import SpanLog

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
class Story:
    """All that a page tells."""

    title: str
    command: str
    facts: Mapping[str, str]  # of the cluster and the workload, by name
    outcome: Outcome
    log: SpanLog
    slo: SLO
    devices: int
    curve: Sequence[Point] = ()  # runs at several rates, where there were any
    checked: Checked | None = None  # what the costs' last check against a live run found


def write_report(story: Story, path: Path | str) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        Path(path).write_text(page(story), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def page(story: Story) -> str:
    """The HTML of the whole."""
    outcome = story.outcome
    picture, words = plots.gantt(story.log)
    sections = [
        tiles(story),
        f'<p class="trust">{escape(trust(story.checked))}</p>',
        section("Latencies", table(latency_rows(outcome)), image(plots.cdfs(outcome, story.slo), "CDFs")),
    ]
    if len(story.curve) > 1:
        curve = image(plots.goodput(story.curve, story.slo), "goodput against rate")
        sections.append(section("Goodput against rate", curve, table(curve_rows(story.curve))))
    sections += [
        section(
            "Where the time up to the second token goes",
            image(plots.where_time_goes(outcome), "parts of the ledger"),
            pale(f"Decoding after it takes {outcome.parts_s()['decode'] * 1e3:,.0f} ms of the mean request."),
        ),
        section("Pages taken", image(plots.occupancy(story.log, outcome.span_s), "occupancy of the pools")),
        *kept_kv(story),
        section("Workers at work", image(picture, "Gantt of the workers"), pale(words), table(busy_rows(outcome))),
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


def kept_kv(story: Story) -> list[str]:
    """Where workers keep any."""
    if not story.log.lies:
        return []
    picture = image(plots.where_kv_lies(story.log, story.outcome.span_s), "where KV lies, and where it came from")
    moves = [table(moved_rows(story.outcome))] if story.outcome.moved else []
    return [section("Where KV lies", picture, *moves)]


def moved_rows(outcome: Outcome) -> Rows:
    yield ("from", "to", "tokens", "GB", "moves", "ms a move", "pages not there")
    for (source, destination), each in outcome.moved.items():
        sizes = (f"{each.tokens:,}", f"{each.num_bytes / 1e9:,.4g}", f"{each.moves:,}")
        yield (source, destination, *sizes, f"{1e3 * each.seconds / each.moves:,.3g}", f"{each.missed:,}")


def tiles(story: Story) -> str:
    """The few numbers that answer most questions."""
    outcome, slo = story.outcome, story.slo
    span_s = max(outcome.span_s, 1e-9)
    tokens = sum(record.told_tokens for record in outcome.records)
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


Rows = Iterable[Sequence[str]]  # the first is the head


def latency_rows(outcome: Outcome) -> Rows:
    yield ("milliseconds", "mean", *(f"p{each}" for each in QUANTILES), "longest")
    for metric in METRICS:
        values = outcome.values(metric) * 1e3
        if len(values):
            found = [values.mean(), *np.percentile(values, QUANTILES), values.max()]
            yield (metric, *(f"{each:,.1f}" for each in found))


def busy_rows(outcome: Outcome) -> Rows:
    yield ("worker", "busy", "requests prefilled", "requests decoded")
    first = [record.prefill_worker for record in outcome.served]
    second = [record.decode_worker for record in outcome.served]
    for worker, share in [*outcome.busy.items()][: plots.MOST_ROWS]:
        yield (worker, f"{share:.1%}", str(first.count(worker)), str(second.count(worker)))


def slowest_rows(outcome: Outcome) -> Rows:
    yield ("request", "arrived, s", "in", "out", "TTFT", *(part.replace("_", " ") for part in PARTS))
    for record in sorted(outcome.served, key=lambda each: -each.ttft_s)[:SLOWEST]:
        yield _row_of(record)


def _row_of(record: Record) -> tuple[str, ...]:
    assert record.ledger is not None, "whoever was served has a ledger"
    parts = (f"{ns / 1e6:,.1f}" for ns in record.ledger.parts_ns().values())
    sizes = (f"{record.arrival_s:,.2f}", f"{record.input_tokens:,}", f"{record.told_tokens:,}")
    return (record.request_id, *sizes, f"{record.ttft_s * 1e3:,.1f}", *parts)


def table(rows: Rows) -> str:
    head, *body = rows
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body]
    names = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def image(png: bytes, name: str) -> str:
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def pale(words: str) -> str:
    return f'<p class="pale">{escape(words)}</p>'


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
