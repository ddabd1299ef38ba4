"""The kernel tables of docs/measurements.md, made from `benchmarks/results/` by `python -m docs.generate`.

Pure text: needs no jax. What no file holds says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HEAD = (
    "| operation | shape | page | ms | share of its floor's speed | target | best peer |\n|---|---|---|---|---|---|---|"
)
NOT_MEASURED = "not measured yet"
# What a GPU is held to, shown until one was measured.
GPU_TARGETS = (
    ("`paged_attention`", "from 64 slots x 4,096 tokens up, Llama-3-8B's heads", "85 %"),
    ("`paged_attention`", "1 slot x 32,768 tokens", "60 %"),
    ("`prefill_attention`", "4,096 tokens and more", "55 %"),
    ("`paged_attention`", "latents, int8 and fp8 pages, drafts of 2 to 8 rows: 64 slots x 4,096 tokens", "85 %"),
    ("`prefill_attention`", "latents, int8 and fp8 pages: 4,096 tokens and more", "55 %"),
    ("`product`", "64 rows of bf16, int8, fp8", "70 %"),
    ("`grouped_product`", "Qwen3-30B-A3B, Mixtral-8x7B", "70 % of few rows, 50 % of many"),
    ("`pack_kv_pages`, `unpack_kv_pages`", "raw, int8, fp8, int4", "80 %"),
)


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """A table for each record, CPU last."""
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
        f"| `{row['operation']}` | {row['shape']} | {row['page_size'] or ''} | {row['best_ms']:.3g} | {share}{verdict}"
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
