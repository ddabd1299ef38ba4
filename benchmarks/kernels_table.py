"""The README's kernel tables, made from `benchmarks/results/kernels_*.json`: `python -m benchmarks.kernels_table`.

Writes them between the two markers of README.md; with --check says whether they stand there as the files have them.
Pure text: needs no jax. What no file holds says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- kernels: made by python -m benchmarks.kernels_table -->"
END = "<!-- kernels: end -->"
HEAD = (
    "| operation | shape | page | ms | share of its floor's speed | target | best peer |\n|---|---|---|---|---|---|---|"
)
NOT_MEASURED = "not measured yet"
# What a GPU is held to, shown until one was measured.
GPU_TARGETS = (
    ("`paged_attention`", "from 64 slots x 4,096 tokens up, Llama-3-8B's heads", "85 %"),
    ("`paged_attention`", "1 slot x 32,768 tokens", "60 %"),
    ("`prefill_attention`", "4,096 tokens and more", "55 %"),
    ("`pack_kv_pages`, `unpack_kv_pages`", "raw, int8, fp8, int4", "80 %"),
)


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """All of what stands between the markers: a table for each record, CPU last."""
    ordered = sorted(records, key=lambda record: (record["device"]["platform"] == "cpu", record["device"]["name"]))
    parts = [device_table(record) for record in ordered]
    if not any(record["device"]["platform"] == "gpu" for record in records):
        parts.insert(0, missing_table())
    return "\n\n".join(parts)


def missing_table() -> str:
    rows = [
        f"| {operation} | {shape} | 16-64 | {NOT_MEASURED} | {NOT_MEASURED} | {target} | {NOT_MEASURED} |"
        for operation, shape, target in GPU_TARGETS
    ]
    return "\n".join(["**GPU** (`bash launch/gpu_proof.sh` measures all of it):", "", HEAD, *rows])


def device_table(record: Mapping[str, Any]) -> str:
    """The headline rows of one device, with date, versions and command."""
    device, versions = record["device"], record["versions"]
    count = f"{record['machine']['cores']} cores of " if device["platform"] == "cpu" else ""
    title = f"**{count}{device['name']}**, jax {versions['jax']}, {record['date'][:10]} (`{record['command']}`):"
    rows = [row_text(row) for row in record["rows"] if row["headline"]]
    return "\n".join([title, "", HEAD, *rows])


def row_text(row: Mapping[str, Any]) -> str:
    verdict = f" ({row['verdict']})" if row["verdict"] else ""
    target = "" if row["target"] is None else f"{row['target']:.0%}".replace("%", " %")
    share = f"{row['share']:.0%}".replace("%", " %")
    return (
        f"| `{row['operation']}` | {row['shape']} | {row['page_size']} | {row['best_ms']:.3g} | {share}{verdict}"
        f" | {target} | {peer_text(row['peers'])} |"
    )


def peer_text(peers: Mapping[str, float | str]) -> str:
    ran = {name: value for name, value in peers.items() if not isinstance(value, str)}
    if not ran:
        return ""
    best = min(ran, key=lambda name: ran[name])
    return f"{ran[best]:.3g} ms, {best}"


def read_records(folder: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("kernels_*.json"))]


def renewed(readme: str, text: str) -> str:
    """The README with `text` between its markers. Raises ValueError where they are not both there, in this order."""
    head, begun, rest = readme.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"README.md lacks the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the README is behind")
    options = parser.parse_args(argv)
    old = README.read_text()
    new = renewed(old, tables(read_records()))
    if options.check and new != old:
        print("README.md is behind benchmarks/results: run python -m benchmarks.kernels_table", file=sys.stderr)
        return 1
    if not options.check:
        README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
