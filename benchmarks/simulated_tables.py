"""The tables of what was simulated, and of the simulator itself; see `tables.py`."""

from __future__ import annotations

from benchmarks.stored import origin, percent, result, rows_of


def simulator() -> str:
    report = result("simulator_cpu")
    rows = [
        [
            f"{each['workers']:,}",
            f"{each['requests']:,}",
            "yes" if each["foreseen"] else "no",
            f"{each['seconds']:.1f}",
            f"{each['events']:,}",
            f"{each['times_real']:.0f}",
            f"{each['peak_gib']:.2f}",
        ]
        for each in report["runs"]
    ]
    head = ["workers", "requests", "steps that repeat as one", "s", "events", "times real time", "GiB"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def topology() -> str:
    report = result("topology")
    rows = [
        [
            f"`{each['routing']}`",
            "yes" if each["labels"] else "no",
            f"{each['crossed']:.0%}",
            *(f"{1e3 * each[key]:,.1f}" for key in ("ttft_p50_s", "transfer_p50_s", "transfer_p99_s", "tpot_p99_s")),
        ]
        for each in report["rows"]
    ]
    head = ["`--routing=`", "labels", "crossed racks", "TTFT p50, ms", "exposed transfer p50, ms", "p99, ms"]
    return f"{origin(report)}\n\n{rows_of([*head, 'TPOT p99, ms'], rows)}"


def early_rejection() -> str:
    report = result("early_rejection")
    rows = [
        [
            f"{each['rate_rps']:g}",
            "`auto`" if each["early"] else "`off`",
            *(percent(each[key], 1) for key in ("met", "late", "refused")),
            f"{each['goodput_rps']:.1f}",
        ]
        for each in report["rows"]
    ]
    head = ["requests/s", "`--early_rejection=`", "met both", "served late", "refused", "met both, a second"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def mooncake_kept() -> str:
    report = result("mooncake_tiers")
    rows = [
        [f"{each['million_tokens']:g} million", *(percent(each[key], 1) for key in ("by_price", "by_age", "published"))]
        for each in report["kept"]
    ]
    head = ["tokens that one node keeps", "found, given up by price", "least recently used first", "published"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def mooncake_routed() -> str:
    """Of the run behind `mooncake_kept`."""
    rows = [
        [
            each["nodes"],
            each["system"],
            *(f"{each[key]:.2f}" for key in ("ttft_mean_s", "ttft_p99_s")),
            *(percent(each[key], 1) for key in ("found", "from_dram", "from_pool", "from_peers")),
            f"{each['published_s']:.2f}",
        ]
        for each in result("mooncake_tiers")["routed"]
    ]
    head = ["nodes", "routed", "TTFT mean, s", "p99, s", "found", "read from DRAM", "pool", "other nodes"]
    return rows_of([*head, "published, s"], rows)


def reservations() -> str:
    report = result("reservations")
    rows = [
        [
            each["trace"],
            f"{each['rate_rps']:.3g}",
            str(each["reserve_tokens"]),
            *(percent(each[key], 1) for key in ("unused", "waiting", "written")),
            *(f"{each[key]:.2f}" for key in ("ttft_p50_s", "ttft_p99_s")),
            *(f"{each[key] * 1e3:.1f}" for key in ("tpot_p50_s", "tpot_p99_s")),
            f"{each['latency_p50_s']:.2f}",
            str(each["preempted"]),
            f"{each['output_tokens']:,}",
        ]
        for each in report["rows"]
    ]
    head = ["trace", "requests/s", "`--reserve_tokens=`", "unused", "waits for KV", "written"]
    times = ["TTFT p50, s", "p99", "TPOT p50, ms", "p99", "latency p50, s", "preempted", "tokens"]
    return f"{origin(report)}\n\n{rows_of([*head, *times], rows)}"


def autoscale() -> str:
    report, rows = result("autoscale"), []
    for each in report["rows"]:
        good, flips = f"{each['good']:,} of {each['requests']:,}", str(each["flips"] or "")
        rows.append([each["course"], each["ratio"], good, f"{each['of_oracle']:.1%}", flips])
    return f"{origin(report)}\n\n{rows_of(['course', 'prefill:decode', 'good', 'of the oracle', 'flips'], rows)}"


def scale() -> str:
    report, keys = result("scale"), ("workers", "streams", "decisions_per_s", "events_per_s", "state_bytes")
    numbers = [[*(f"{each[key]:,.0f}" for key in keys), f"{each['messages_per_token']:.2f}"] for each in report["rows"]]
    rows = [[f"`{each['routing']}`", *row] for each, row in zip(report["rows"], numbers, strict=True)]
    head = ["routing", "workers", "streams", "decisions/s", "events/s", "bytes a stream", "messages a token"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def failures() -> str:
    report, rows = result("failures"), []
    for each in report["rows"]:
        counts = f"{each['lost_requests']:,.0f}", f"{each['late_s']:,.0f}", f"{each['latest_s']:.1f}"
        rows.append([f"{each['rate_rps']:g}", each["role"], each["way"], *counts, f"{each['lost_share']:.5%}"])
    head = ["requests/s", "lost", "replaced by", "no good any more", "all later by, s", "one by, s", "of goodput"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def scale_failures() -> str:
    report, rows = result("scale"), []
    for each in report["failures"]:
        way, spares = "shipped again" if each["reshipped"] else "prefilled again", str(each["spares"] or "none")
        rows.append([way, spares, f"{each['lost']:.5%}", f"{each['stalled_s']:.2f}"])
    head = ["KV of the streams", "workers standing by", "goodput lost", "a stream stalls, s"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"
