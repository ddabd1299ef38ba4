"""`launch/grafana/jdisagg.json`, the dashboard to import into Grafana, from the table of its panels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # of panels, in Grafana's grid of 24
EVERY = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A graph: (query, legend) of each line. Units as Grafana names them."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    stacked: bool = False


def rate(name: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate(jdisagg_{name}[{EVERY}]))" if by else f"sum(rate(jdisagg_{name}[{EVERY}]))"


def quantiles(name: str, *shares: float) -> list[tuple[str, str]]:
    """Of a histogram over all of its other labels."""
    buckets = rate(f"{name}_bucket", "le")
    return [(f"histogram_quantile({share}, {buckets})", f"p{100 * share:g}") for share in shares]


def mean(name: str, *by: str) -> str:
    return f"{rate(name + '_sum', *by)} / {rate(name + '_count', *by)}"


WORKER = "{{worker}}"
RUNS = [(rate(f"{phase}_runs_total", "worker"), f"{WORKER} {phase}") for phase in ("prefill", "decode")]
HITS = f"{rate('prefix_cache_hits_total', 'worker')} / {rate('prefix_cache_queries_total', 'worker')}"
TROUBLES = {
    "preemptions": "preempted",
    "parts_resent": "sent again",
    "engine_failures": "programs failed",
    "nan_logits": "no numbers",
}

REQUESTS = [
    Panel("Ended", "reqps", [(rate("requests_total", "reason"), "{{reason}}")], stacked=True),
    Panel("Now", "short", [(f"sum(jdisagg_requests_{state})", state) for state in ("running", "waiting")]),
    Panel(
        "Turned away",
        "reqps",
        [(rate("rejects_total"), "queue full"), (rate("requests_limited_total", "limit"), "{{limit}}")],
    ),
    Panel("To the first token", "s", quantiles("time_to_first_token_seconds", 0.5, 0.9, 0.99)),
    Panel("Time a token", "s", quantiles("time_per_output_token_seconds", 0.5, 0.9, 0.99)),
    Panel("Between two tokens", "s", quantiles("inter_token_latency_seconds", 0.5, 0.99, 0.999)),
    Panel("Where the time goes", "s", [(mean("request_part_seconds", "part"), "{{part}}")], stacked=True),
    Panel("Prompt tokens", "short", quantiles("request_prompt_tokens", 0.5, 0.99)),
    Panel("Output tokens", "short", quantiles("request_generation_tokens", 0.5, 0.99)),
]
THROUGHPUT = [
    Panel(
        "Tokens a second",
        "short",
        [(rate("prompt_tokens_total"), "prompts"), (rate("generation_tokens_total"), "outputs")],
    ),
    Panel("Prefilled tokens a second", "short", [(rate("prefill_tokens_total", "worker"), WORKER)]),
    Panel("Prompt tokens whose KV was there", "percentunit", [(HITS, WORKER)]),
]
WORKERS = [
    Panel("KV pages", "short", [("sum by (worker, use) (jdisagg_kv_pages_by_use)", f"{WORKER} {{{{use}}}}")], True),
    Panel("KV pages taken", "percentunit", [("max by (worker) (jdisagg_kv_usage_ratio)", WORKER)]),
    Panel("Tokens before prefill", "short", [("sum by (worker) (jdisagg_prefill_backlog_tokens)", WORKER)]),
    Panel("Sequences", "short", [("sum by (worker, state) (jdisagg_decode_sequences)", f"{WORKER} {{{{state}}}}")]),
    Panel("Sequences in a step", "short", [(mean("decode_batch_sequences", "worker"), WORKER)]),
    Panel("Programs a second", "ops", RUNS),
]
TRANSFERS = [
    Panel("Shipped", "Bps", [(rate("shipped_bytes_total", "source", "destination"), "{{source}} to {{destination}}")]),
    Panel("Of a part, from packed to arrived", "s", quantiles("ship_seconds", 0.5, 0.99)),
    Panel("Of a request", "s", [(mean("transfer_seconds", "share"), "{{share}}")], stacked=True),
]
HEALTH = [
    Panel("Programs compiled since ready", "short", [("max(jdisagg_recompiles)", "programs")]),
    Panel("The event loop is late by", "s", quantiles("event_loop_lag_seconds", 0.5, 0.99)),
    Panel("Open connections", "short", [("sum(jdisagg_http_connections)", "open")]),
    Panel("Connections cut", "ops", [(rate("http_connections_cut_total", "reason"), "{{reason}}")]),
    Panel(
        "Troubles",
        "ops",
        [(rate(f"{name}_total", "worker"), f"{WORKER} {said}") for name, said in TROUBLES.items()],
    ),
    Panel("Journals that ended", "ops", [(rate("journal_drops_total"), "journals")]),
]
ROWS = {
    "Requests": REQUESTS,
    "Throughput": THROUGHPUT,
    "Workers": WORKERS,
    "Transfers": TRANSFERS,
    "Health": HEALTH,
}


def queries() -> list[str]:
    return [query for panels in ROWS.values() for panel in panels for query, _ in panel.lines]


def drawn() -> Iterator[dict[str, Any]]:
    """Rows and panels where they lie in the grid."""
    top = 0
    for name, panels in ROWS.items():
        yield {"type": "row", "title": name, "collapsed": False, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        for index, panel in enumerate(panels):
            row, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield graph(panel, place)
        top += 1 + -(-len(panels) // COLUMNS) * HEIGHT


def graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for index, (query, legend) in enumerate(panel.lines)
        ],
    }


def text() -> str:
    """The JSON that Grafana imports; it asks for the Prometheus to draw from."""
    panels = [{"id": number, **each} for number, each in enumerate(drawn(), 1)]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    found = {
        "title": "jdisagg",
        "uid": "jdisagg",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(found, indent=1) + "\n"
