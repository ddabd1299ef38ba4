"""Tables of how a step is cut and what goes into one: rings, stages of prefill, guesses, adapters, pods as compiled."""

from __future__ import annotations

from benchmarks.stored import origin, result, rows_of


def host_step() -> str:
    """Microseconds of the host's a step and stage, and of a token."""
    report = result("host_step_cpu")
    parts = list(report["rows"][0]["by_step"])
    rows = []
    for each in report["rows"]:
        of_step, of_tokens = each["by_step"], sum(each["by_token"].values())
        of_token = of_tokens * each["stages"] ** 2 / each["slots"]
        figures = [f"{of_step[part]:.0f}" for part in parts]
        sizes = each["slots"], each["stages"], each["turns"], {"out": "written out", "stacked": "stacked"}[each["form"]]
        rows.append([*sizes, *figures, f"{sum(of_step.values()):.0f}", f"{of_token:.1f}"])
    head = ["slots", "stages", "turns", "layers", *parts, "a step and stage", "a token"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def ring() -> str:
    """A token's time, and of a ring its share of the stages' in pairs."""
    report = result("ring")
    rows = []
    for batch in dict.fromkeys(each["batch"] for each in report["rows"]):
        found = [each for each in report["rows"] if each["batch"] == batch]
        shares = ["", *(f" ({each['ratio']:.2f})" for each in found[1:])]
        times = (f"{1e3 * each['tpot_s']:.1f}{share}" for each, share in zip(found, shares, strict=True))
        rows.append([batch, *times])
    kinds = dict.fromkeys(each["schedule"] for each in report["rows"])
    return f"{origin(report)}\n\n{rows_of(['streams', *kinds], rows)}"


def prefill_stages() -> str:
    """The first token's time, and the stages' share of it in pairs."""
    report, rows = result("prefill_stages"), []
    for shape in dict.fromkeys((each["prompt_tokens"], each["batch"]) for each in report["rows"]):
        found = [each for each in report["rows"] if (each["prompt_tokens"], each["batch"]) == shape]
        shares = ["", *(f" ({each['ratio']:.2f})" for each in found[1:])]
        times = (f"{1e3 * each['ttft_s']:,.0f}{share}" for each, share in zip(found, shares, strict=True))
        rows.append([f"{shape[0]:,}", shape[1], *times])
    meshes = dict.fromkeys(f"`prefill:{each['mesh']}`" for each in report["rows"])
    return f"{origin(report)}\n\n{rows_of(['prompt tokens', 'at once', *meshes], rows)}"


def speculation() -> str:
    """Tokens/s beside steps of one token, in pairs, and what a row drew."""
    report, rows = result("speculation"), []
    for shape in dict.fromkeys((each["work"], each["streams"]) for each in report["rows"]):
        off, *found = [each for each in report["rows"] if (each["work"], each["streams"]) == shape]
        drafts = [f"{each['ratio']:.2f} ({each['tokens_a_row']:.1f})" for each in found]
        rows.append([*shape, f"{off['tokens_per_s']:,.0f}", *drafts])
    kinds = dict.fromkeys(f"`{each['speculative']}`" for each in report["rows"])
    return f"{origin(report)}\n\n{rows_of(['answers', 'streams', *kinds], rows)}"


def drafts_over_time() -> str:
    """Tokens that a row drew, early and late in long answers."""
    reports = [result("decay_embedded"), result("decay_smollm2")]
    rows = []
    for report in reports:
        for each in (each for each in report["rows"] if each["speculative"] != "off"):
            drawn = (f"{each[f'tokens_a_row{part}']:.2f}" for part in ("", "_early", "_late"))
            told = [report["model"], f"{report['tokens']:,}", each["work"], f"`{each['speculative']}`"]
            rows.append([*told, *drawn, each["differing"]])
    head = ["model", "tokens", "answers", "`--speculative`", "tokens a row", "first quarter", "last quarter",
            "tokens unlike `off`"]  # fmt: skip
    return f"{origin(reports[0])} {origin(reports[1])}\n\n{rows_of(head, rows)}"


def acceptance() -> str:
    """Tokens that rows of the same answers drew, undisturbed and disturbed."""
    kinds, rows = ("embedded", "parked_embedded", "draft_embedded", "ship_embedded", "smollm2"), []
    reports = [result(f"acceptance_{kind}") for kind in kinds]

    def quarters(figures: list[float | None]) -> str:
        return ", ".join("-" if each is None else f"{each:.2f}" for each in figures)

    for model, each in ((told["model"], each) for told in reports for each in told["rows"]):
        kind, there = f"`{each['speculative'].replace('/', ' --draft_kv=')}`", f"{each['cached']:,}"
        drawn = quarters(each["undisturbed"]), quarters(each["tokens_a_row"])
        asked = model, each["work"], kind, each["disturbed"], each["times"]
        rows.append([*asked, there, *drawn, f"{each['ratio']:.3f}", each["differing"]])
    head = ["model", "answers", "`--speculative`", "disturbed", "times", "tokens prefill found",
            "a row in each quarter", "disturbed", "ratio", "unlike"]  # fmt: skip
    return f"{' '.join(map(origin, reports))}\n\n{rows_of(head, rows)}"


def peers_drafts() -> str:
    """Each engine's drafts beside itself without."""
    report, rows = result("peers_drafts_smollm2_cpu"), []
    kinds = dict.fromkeys((each["engine"], each["drafts"]) for each in report["rows"])
    for shape in dict.fromkeys((each["work"], each["streams"]) for each in report["rows"]):
        found = {(each["engine"], each["drafts"]): each for each in report["rows"]
                 if (each["work"], each["streams"]) == shape}  # fmt: skip
        told = (f"{each['tokens_per_s']:,.0f} ({each['ratio']:.2f})" for each in map(found.get, kinds) if each)
        rows.append([*shape, *told])
    head = [f"{engine} `{drafts}`" for engine, drafts in kinds]
    return f"{origin(report)}\n\n{rows_of(['answers', 'streams', *head], rows)}"


def adapters() -> str:
    """Tokens/s of eight streams with adapters beside none, in turns."""
    reports = [result("adapters_cpu"), result("adapters_smollm2_cpu")]
    rows = [
        [f"`{report['model']}`", each["adapters"], f"{each['tokens_per_s']:,.0f}", f"{each['ratio']:.2f}",
         f"{each['cpu_ratio']:.2f}"]
        for report in reports
        for each in report["rows"]
    ]  # fmt: skip
    head = ["model", "adapters asked for", "tokens/s", "beside no room for any", "processor time a token"]
    return f"{origin(reports[0])} {origin(reports[1])}\n\n{rows_of(head, rows)}"


def aot_pods() -> str:
    """What spanning steps of Llama-3-70B send, as compiled."""
    report, rows = result("aot_pods"), []
    for each in report["steps"]:
        sums = ", ".join(f"{count} {name}" for name, count in each["collectives"].items())
        sent = (f"{each[key] / 2**20:,.1f}" for key in ("inside_bytes", "between_bytes"))
        times = (f"{1e3 * each[key]:.2f}" for key in ("links_s", "floor_s"))
        step = {"prefill": "a chunk", "ring plain": "a dispatch"}[each["kind"]]
        full = f"{each['device_bytes'] / 2**30:.1f} of {each['limit_bytes'] / 2**30:.1f}"
        rows.append([each["target"], f"`{each['mesh']}`", step, sums, *sent, *times, full])
    head = ["target", "mesh", "step", "collectives", "MiB inside", "to other hosts", "links, ms", "floor, ms", "GiB"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def compiler_flags() -> str:
    """What halves and the compiler's flags hide of a layer's collectives, as compiled."""
    report, rows = result("compiler_flags"), []
    steps = {"prefill": "a chunk of 2,048 tokens", "decode": "a step of 64 rows"}
    for each in report["told"]:
        hidden = 1 - each["exposed_us"] / each["total_us"]
        figures = f"{each['total_us']:,.0f}", f"{each['exposed_us']:,.0f}", f"{hidden:.0%}"
        rows.append([each["target"], steps[each["kind"]], each["without"] or "nothing", *figures])
    head = ["target", "step", "left out", "collectives of a layer, us", "exposed, us", "hidden"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"
