"""The tables of README and docs, made from `benchmarks/results/`: each with its command, machine, date and versions.

`python -m docs.generate` writes them between their markers. What no file holds is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from benchmarks import engine_tables, feature_tables, kernels_table, simulated_tables
from benchmarks.stored import origin, percent, result, rows_of, short, small

SHOWN_LINKS = ((0.25, 8), (0.25, 16), (1.0, 4), (1.0, 16), (10.0, 16), (25.0, 8))  # Gbit/s, chunks
SHOWN_STREAMS = (1, 4, 8, 32)


def peers() -> str:
    return _in_turns("peers_cpu_f32")


def peers_smollm2() -> str:
    return _in_turns("peers_smollm2_cpu")


def _in_turns(name: str) -> str:
    """Output tokens/s and latencies of engines: medians of bursts, with the range of tokens/s."""
    report = result(name)
    rows = []
    for model, bursts in report["models"].items():
        for engine in dict.fromkeys(each["engine"] for each in bursts):
            mine = [each for each in bursts if each["engine"] == engine]
            rates = [each["output_tokens_per_s"] for each in mine]
            latencies = [
                short(median(each[key] for each in mine))
                for key in ("ttft_ms_p50", "itl_ms_p50", "itl_ms_p99")
                if mine[0].get(key) is not None
            ]
            spread = f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"
            rows.append([model, engine, spread, *latencies, *[""] * (3 - len(latencies))])
    head = ["model", "engine", "output tokens/s", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def demo_load() -> str:
    report = result("serve_demo")
    rows = [
        [
            each["concurrency"],
            short(each["output_tokens_per_s"]),
            *(f"{each[key]['p50']:.0f} / {each[key]['p99']:.0f}" for key in ("ttft_ms", "itl_ms")),
            short(each["ledger_ms"]["transfer"]),
        ]
        for each in report["levels"]
        if each["concurrency"] in SHOWN_STREAMS
    ]
    head = ["streams", "tokens/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "KV transfer, ms of a request"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def transfer() -> str:
    """What a transfer adds to the second token, in ms, and of what `whole` adds."""
    report = result("transfer_cpu")
    cells = {(each["gbit_per_s"], each["chunks"], each["mode"]): each for each in report["cells"]}
    rows = []
    for link, chunks in SHOWN_LINKS:
        whole = cells[link, chunks, "whole"]
        added = (max(0.0, cells[link, chunks, mode]["added_ms"]) for mode in ("chunk", "layer", "auto"))
        others = [f"{short(each)} ({percent(each / whole['added_ms'])})" for each in added]
        rows.append([f"{link:g} Gbit/s, {chunks} chunks", short(whole["wire_ms"]), short(whole["added_ms"]), *others])
    head = ["link, prompt", "link alone", "`whole`", "`chunk`", "`layer`", "`auto`"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def compression() -> str:
    report = result("compression")
    rows = [
        [
            each["wire"],
            percent(each["saved"]),
            percent(each["worst_error"], 1),
            small(each["kl_mean"]),
            percent(each["agreement"], 1),
        ]
        for each in report["wires"]
        if each["wire"] != "raw"
    ]
    head = ["wire", "bytes saved", "worst layer error", "mean KL, nats", "same greedy token"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def digests() -> str:
    """What digests of every page add to a shipment, by the clock and in CPU time."""
    report = result("digests_cpu")
    rows = [
        [
            each["shape"],
            f"{each['mib']:.0f}",
            *(f"{short(each[f'bare{of}_ms'])} -> {short(each[f'full{of}_ms'])} ({percent(each[share])})"
              for of, share in (("", "share"), ("_cpu", "cpu_share"))),
        ]
        for each in report["costs"]
    ]  # fmt: skip
    head = ["shipment", "MiB", "without -> with digests, ms", "CPU, ms"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def kv_loss() -> str:
    report = result("kv_loss_embedded")
    plain = [[name, f"{held:,}", "", ""] for name, held in report["plain_bytes_per_token"].items()]
    rows = [
        [each["pages"], f"{each['bytes_per_token']:,}", small(each["kl"]), percent(each["agreement"], 1)]
        for each in report["rows"]
    ]
    heads = ["pages", "bytes a token", "mean KL, nats", "same greedy token"]
    return f"{origin(report)}\n\n{rows_of(heads, plain + rows)}"


def weight_loss() -> str:
    report = result("weight_loss_smollm2")
    rows = [
        [
            each["weights"],
            small(each["kl"]),
            percent(each["agreement"], 1),
            ", ".join(f"`{name}`" for name in each["full"]),
        ]
        for each in report["rows"]
    ]
    return f"{origin(report)}\n\n{rows_of(['weights', 'mean KL, nats', 'same greedy token', 'kept full'], rows)}"


def products() -> str:
    """Of a step's matrices alone, by the form they are kept in."""
    report = result("products_smollm2_cpu")
    steps = {
        step: [each for each in report["rows"] if each["step"] == step]
        for step in (row["step"] for row in report["rows"])
    }
    forms = list(dict.fromkeys(each["form"] for each in report["rows"]))
    rows = []
    for step, mine in steps.items():
        best_ms = {each["form"]: each["best_ms"] for each in mine}
        rows.append([step, *(short(best_ms[form]) if form in best_ms else "" for form in forms)])
    head = ["step, rows", *(f"{form}, ms" for form in forms)]
    return f"{origin(report)} Best of {report['rounds']} turns, {report['layers']} layers.\n\n{rows_of(head, rows)}"


def calibration() -> str:
    report = result("calibration_cpu")
    rows = []
    for each in report["meshes"]:
        live, simulated, errors = each["live"], each["simulated"], each["errors"]
        pairs = (
            f"{1e3 * live[key]:.3g} / {1e3 * simulated[key]:.3g} ms ({100 * errors[key]:+.0f} %)"
            for key in ("ttft_s", "tpot_s")
        )
        rows.append([f"`{each['mesh']}`", *pairs, f"{100 * errors['tokens_per_s']:+.0f} %"])
    head = ["mesh", "TTFT live / simulated", "TPOT live / simulated", "tokens/s"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def crossover() -> str:
    """Replicas and apart, at the fewest and the most streams."""
    report = result("crossover")
    cells = {(each["architecture"], each["workload"], each["streams"]): each for each in report["cells"]}
    metrics = ("tokens_per_s", "ttft_ms", "tpot_ms", "itl_p99_ms", "good_per_s")
    streams = sorted({each["streams"] for each in report["cells"]})
    rows = []
    for workload in report["workloads"]:
        for number in (streams[0], *streams[-3:]):
            both = [cells[name, workload, number] for name in ("replicated", "disaggregated")]
            rows.append([workload, number, *(" / ".join(short(each[key]["mid"]) for each in both) for key in metrics)])
    head = ["workload", "streams", "tokens/s", "TTFT, ms", "TPOT, ms", "ITL p99, ms", "good requests/s"]
    return f"{origin(report)} Each cell: two replicas / apart.\n\n{rows_of(head, rows)}"


def mixed_steps() -> str:
    report = result("mixed_steps")
    keys = ("largest_gap_s", "tpot_s", "ttft_s")
    rows = [[f"`{each['mixed_steps']}`", *(f"{1e3 * each[key]:,.0f}" for key in keys)] for each in report["modes"]]
    head = ["`--mixed_steps=`", "largest gap, ms", "a token, ms", "the prompt's first token, ms"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def prefix_reuse() -> str:
    report = result("prefix_reuse")
    rows = [
        [
            f"`{each['mesh']}`",
            *(f"{1e3 * each[key]:.0f}" for key in ("miss_s", "hit_s")),
            *(f"{1e3 * each[key][-1]:.0f}" for key in ("conversation_off_s", "conversation_on_s")),
        ]
        for each in report["meshes"]
    ]
    head = ["mesh", "first token of a miss, ms", "of a hit, ms", "last turn, nothing kept, ms", "last turn, ms"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def processes() -> str:
    report = result("processes_cpu")
    rows = [
        [each["stack"], each["streams"], *(short(each[key]) for key in ("tokens_per_s", "ttft_ms", "tpot_ms"))]
        for each in report["medians"]
    ]
    return f"{origin(report)}\n\n{rows_of(['stack', 'streams', 'tokens/s', 'TTFT, ms', 'TPOT, ms'], rows)}"


def transport() -> str:
    report = result("transport_cpu")
    rows = [
        [
            each["transport"],
            each["size"],
            short(each["median_gb_per_s"]),
            short(each["best_gb_per_s"]),
            each["target_gb_per_s"] or "",
        ]
        for each in report["rows"]
        if each["nbytes"] >= 1 << 20
    ]
    return f"{origin(report)}\n\n{rows_of(['transport', 'size', 'GB/s, median', 'best', 'aim'], rows)}"


def tiers() -> str:
    report = result("tiers_cpu")
    rows = [
        [
            f"{each['store']}, {each['way']}",
            *(short(each[key]) for key in ("gb_per_s", "bare_gb_per_s")),
            *(f"{100 * each[key]:.0f} %" for key in ("share", "best_share", "aim")),
        ]
        for each in report["rows"]
    ]
    head = ["store", "GB/s, median", "bare", "share, median", "best", "aim"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def tiers_ttft() -> str:
    """Of the run behind `tiers`."""
    rows = [
        [
            each["tier"],
            each["prompt_tokens"],
            f"{each['cached_tokens']:.0f}",
            *(f"{each[key]:.2f}" for key in ("computed_s", "fetched_s", "share", "aim")),
        ]
        for each in result("tiers_cpu")["first_tokens"]
    ]
    return rows_of(["tier", "prompt tokens", "read back", "computed, s", "read back, s", "share", "aim"], rows)


def group_stream() -> str:
    report = result("group_stream_cpu")
    keys = ("said_best_us", "said_median_us", "way_best_us", "way_median_us", "aim_us")
    rows = [[each["plan"], each["record_bytes"], *(short(each[key]) for key in keys)] for each in report["rows"]]
    head = ["plan", "bytes", "said, us: best", "median", "way, us: best", "median", "aim"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def soak() -> str:
    report = result("soak_cpu")
    rows = [
        [
            role,
            *(f"{each[key]:,.1f}" for key in ("ready", "middle", "end", "rise")),
            *(" / ".join(f"{count:,.0f}" for count in report[name][role]) for name in ("descriptors", "threads")),
        ]
        for role, each in report["memory_mib"].items()
    ]
    ends = [
        [kind.replace("_", " "), ", ".join(f"{count:,} {end}" for end, count in each.items())]
        for kind, each in report["ends"].items()
    ]
    head = ["process", "MiB when ready", "in the middle", "at the end", "rise, MiB an hour"]
    head += ["descriptors: ready, most, at the end", "threads"]
    told = f"{report['requests']:,} requests in {report['took_s']:,.0f} s over"
    told += f" {report['connections_most']:,.0f} connections at most, "
    told += f"{len(report['faults'])} faults of the server, {len(report['held_at_the_end'])} pools with pages out, "
    told += f"{report['recompiles']:.0f} programs compiled."
    return f"{origin(report)}\n\n{told}\n\n{rows_of(head, rows)}\n\n{rows_of(['sent', 'and how it ended'], ends)}"


def role_flip() -> str:
    report, rates = result("role_flip_cpu"), ("before_tokens_per_s", "meanwhile_tokens_per_s", "failed")
    keys = ("drained_s", "reshard_s", "compile_s", "warm_s", "whole_s")
    rows = [
        [each["role"], *(f"{each[key]:.2f}" for key in keys), *(f"{each[key]:.0f}" for key in rates)]
        for each in report["rows"]
    ]
    head = ["becomes", "drained, s", "cut", "compiled", "warmed", "whole", "tokens/s before", "meanwhile", "failed"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def takeover() -> str:
    """How long a stream stood still, killing after killing."""
    report = result("takeover")
    rows = [
        [f"{1e3 * each['usual_s']:.1f}", f"{each['longest_s']:.2f}", f"{report['peer_silence_s']:g}", each["finish"]]
        for each in report["rows"]
    ]
    head = ["usual gap, ms", "longest, s", "--peer_silence_s", "the stream's end"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def kernels() -> str:
    return kernels_table.tables(kernels_table.read_records())


TABLES: Mapping[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        peers,
        peers_smollm2,
        demo_load,
        transfer,
        compression,
        digests,
        kv_loss,
        weight_loss,
        products,
        calibration,
        crossover,
        mixed_steps,
        prefix_reuse,
        processes,
        transport,
        tiers,
        tiers_ttft,
        group_stream,
        simulated_tables.simulator,
        simulated_tables.topology,
        engine_tables.host_step,
        engine_tables.ring,
        engine_tables.prefill_stages,
        engine_tables.speculation,
        engine_tables.drafts_over_time,
        engine_tables.acceptance,
        engine_tables.peers_drafts,
        engine_tables.adapters,
        engine_tables.aot_pods,
        engine_tables.compiler_flags,
        simulated_tables.early_rejection,
        simulated_tables.mooncake_kept,
        simulated_tables.mooncake_routed,
        simulated_tables.reservations,
        simulated_tables.autoscale,
        role_flip,
        feature_tables.schemas,
        feature_tables.features,
        feature_tables.forced,
        feature_tables.exploding,
        takeover,
        simulated_tables.scale,
        simulated_tables.scale_failures,
        simulated_tables.failures,
        soak,
        kernels,
    )
}
