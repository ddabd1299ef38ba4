"""The tables of what clients ask for: public schemas, and requests with random features."""

from __future__ import annotations

from collections import Counter

from benchmarks.stored import origin, result, rows_of


def features() -> str:
    """Requests with random features: how they ended, and what was wrong."""
    report = result("features_cpu")
    keys = ("answered", "left", "refused", "429")
    held = sum(report["held"].values())
    row = [f"{report['requests']:,}", *(f"{report['ends'].get(key, 0):,}" for key in keys)]
    row += [len(report["faults"]), report["tracebacks"], f"{held:g}"]
    memory = report["memory_mib"]
    row += [f"{memory[len(memory) // 2]:,} to {memory[-1]:,}", f"{report['seconds']:,.0f}"]
    head = [
        "requests",
        "answered",
        "left half way",
        "refused, being wrong",
        "429",
        "faults",
        "tracebacks",
        "left over",
        "MiB, second half",
        "s",
    ]
    return f"{origin(report)}\n\n{rows_of(head, [row])}"


def schemas() -> str:
    """Public JSON schemas, and what became of an answer to each."""
    report = result("schemas")
    rows = [
        [
            name,
            *(f"{each[key]:,}" for key in ("schemas", "compiled", "answers", "valid")),
            f"{each['invalid_instances'] - len(each['accepted_invalid'])} of {each['invalid_instances']}",
            f"{each['compile_ms']['p50']:.1f}",
            f"{each['mask_ms']['p50'] * 1e3:.0f} / {each['mask_ms']['p99'] * 1e3:.0f}",
        ]
        for name, each in report["sources"].items()
    ]
    head = ["source", "schemas", "compile", "answers", "valid", "refuses", "compiled in, ms", "mask p50 / p99, us"]
    reasons = Counter[str]()
    for each in report["sources"].values():
        reasons.update(each["refused"])
    said = ", ".join(f"{number} {why}" for why, number in reasons.most_common(7))
    return f"{origin(report)}\n\n{rows_of(head, rows)}\n\nRefused by name, of all: {said}."


def forced() -> str:
    """What a row of a step draws where a grammar forces tokens."""
    report = result("forced_cpu")
    most = max(each["streams"] for each in report["rows"])
    drawn = {(each["speculative"], each["white_space"]): each for each in report["rows"] if each["streams"] == most}
    kinds = list(dict.fromkeys(kind for kind, _ in drawn))
    rows = [
        [f"`{kind}`", *(f"{drawn[kind, spaced]['tokens_a_row']:.2f}" for spaced in (False, True))] for kind in kinds
    ]
    head = ["`--speculative`", "tokens a row draws in a step, JSON without white space", "with"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"


def exploding() -> str:
    """Gaps of plain streams beside a client whose grammars explode."""
    report = result("exploding_cpu")
    rows = [
        [
            each["beside"],
            f"{each['gaps']:,}",
            *(f"{each[key]:.1f}" for key in ("p50_ms", "p99_ms", "most_ms")),
            *(f"{each[key]:,}" for key in ("ended", "differing")),
        ]
        for each in report["rows"]
    ]
    head = ["grammars are", "gaps", "p50, ms", "p99, ms", "longest, ms", "ended", "streams with other tokens"]
    return f"{origin(report)}\n\n{rows_of(head, rows)}"
