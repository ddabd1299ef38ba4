"""A stack launched as a user launches it, against what its device could do: `python -m benchmarks.end_to_end --help`.

    python -m benchmarks.end_to_end --mesh=prefill:tp1@0,decode:tp1@0 --rates=kernels.json --output=end_to_end.json

Starts `python -m jdisagg.launch`, asks over HTTP, and prints the time of a decode step beside its floor (weights and
KV that it reads over the copy speed) and prefill's share of the matmul rate (MFU). --rates is what benchmarks.kernels
wrote on the same device. Entry of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from absl import flags

from benchmarks import entry, machine, report
from benchmarks.figures import Spread
from benchmarks.http_client import Server, first_model
from benchmarks.load import Burst, closed_loop
from benchmarks.peers.processes import Command, ServerFailed, free_port, running
from benchmarks.workload import Lengths, Workload
from jdisagg.core.layout.kv_layout import DTYPE_BYTES, KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.hf_config import read_config
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL, PAGE_DTYPES

WEIGHT_BYTES = {"int8": 1, "fp8": 1, "bfloat16": 2, "float32": 4}  # of --weight_dtype; others: as stored
FLAGS = flags.FlagValues()
MODEL = flags.DEFINE_string("model", "", "model folder; empty: the embedded model", flag_values=FLAGS)
MESH = flags.DEFINE_string("mesh", "prefill:tp1@0,decode:tp1@0", "of the launched stack", flag_values=FLAGS)
LAUNCH = flags.DEFINE_list("launch", [], "more flags of jdisagg.launch, as load_format=random", flag_values=FLAGS)
RATES = flags.DEFINE_string("rates", None, "JSON that benchmarks.kernels wrote here", required=True, flag_values=FLAGS)
STREAMS = flags.DEFINE_integer("streams", 8, "decoded at once", lower_bound=1, flag_values=FLAGS)
CONTEXT = flags.DEFINE_integer("context", 512, "prompt tokens of each stream", lower_bound=1, flag_values=FLAGS)
ASK = flags.DEFINE_string("ask", "{}", 'more fields of a request, as {"guided_regex": "..."}', flag_values=FLAGS)
OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 256, "of each stream", lower_bound=3, flag_values=FLAGS)
CHUNK = flags.DEFINE_integer("chunk", 2048, "prompt tokens of the prefill measurement", flag_values=FLAGS)
REPEATS = flags.DEFINE_integer("repeats", 5, "prompts of the prefill measurement", flag_values=FLAGS)
READY_S = flags.DEFINE_float("ready_s", 1800.0, "longest wait for the stack", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches, measured beside the kernels."""

    copy_bytes_per_s: float  # read and written together
    matmul_flops_per_s: float
    dtype: str

    @staticmethod
    def read(path: str) -> Rates:
        """Raises ValueError where the file was not written by benchmarks.kernels."""
        record = json.loads(Path(path).read_text())
        if "rates" not in record:
            raise ValueError(f"--rates={path} has no rates: benchmarks.kernels writes them")
        return Rates(**record["rates"])


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decode steps of `streams` at once. The floor is the bytes that a step must read."""

    streams: int
    context_tokens: float  # of a stream, the mean over its answer
    step_ms: Spread
    output_tokens_per_s: float
    weights_bytes: int
    kv_bytes: int
    floor_ms: float
    share: float  # floor over the median step


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Single prompts, alone on the machine; `mfu` is of the measured matmul rate."""

    prompt_tokens: int
    prefill_ms: Spread
    flops: float
    mfu: float


@dataclass(frozen=True, slots=True)
class Stored:
    """What the stack was told to hold, as its flags call it; empty where that is as computed with."""

    weight_dtype: str = ""
    kv_dtype: str = ""

    @staticmethod
    def of(launch: Sequence[str]) -> Stored:
        told = dict(each.split("=", 1) for each in launch if "=" in each)
        return Stored(*(told.get(name, "") for name in ("weight_dtype", "kv_dtype")))


def step_bytes(
    model: ModelConfig, dtype: str, streams: int, context: float, stored: Stored | None = None
) -> tuple[int, int]:
    """Weights and KV that one decode step reads: of an embedding that is not tied only a row a stream, so none."""
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    stored = stored or Stored()
    kv = KVLayout.of(model, 1, PAGE_DTYPES.get(stored.kv_dtype, stored.kv_dtype) or dtype).bytes_per_token
    weight_bytes = WEIGHT_BYTES.get(stored.weight_dtype or dtype, DTYPE_BYTES[dtype])
    return (model.num_params() - lookup) * weight_bytes, int(kv * streams * context)


def prefill_flops(model: ModelConfig, tokens: int) -> float:
    """Products of the layers for every token, causal attention, and logits of the last token."""
    body = 2.0 * model.num_layers * model.layer_params() * tokens
    attention = model.num_layers * model.attention_flops(tokens * (tokens + 1) / 2)
    return body + attention + 2.0 * model.vocab_size * model.hidden_size


def decoded(burst: Burst, model: ModelConfig, rates: Rates, context: float, stored: Stored | None = None) -> Decoded:
    """Steps by the server's ledgers: tokens that make no character yet show no arrival to a client.

    Raises ValueError where requests failed (their figures would be of something else) or told no ledger.
    """
    done = [each for each in answered(burst) if each.ledger_ns]
    steps = Spread.of(each.ledger_ns["decode"] / 1e9 / (each.num_tokens - 2) for each in done)  # from the second on
    if steps is None:
        raise ValueError("no answer had a ledger")
    weights, kv = step_bytes(model, rates.dtype, burst.concurrency, context, stored)
    floor_ms = (weights + kv) / rates.copy_bytes_per_s * 1e3
    tokens = sum(each.num_tokens for each in burst.samples)
    return Decoded(
        burst.concurrency, context, steps, tokens / burst.wall_s, weights, kv, floor_ms, floor_ms / steps.p50
    )


def prefilled(burst: Burst, model: ModelConfig, rates: Rates, tokens: int) -> Prefilled:
    """Raises ValueError where requests failed or told no ledger."""
    ledgers = [each.ledger_ns for each in answered(burst)]
    spread = Spread.of(ledger["prefill"] / 1e9 for ledger in ledgers if ledger)
    if spread is None:
        raise ValueError("no answer had a ledger")
    flops = prefill_flops(model, tokens)
    return Prefilled(tokens, spread, flops, flops / (spread.p50 / 1e3) / rates.matmul_flops_per_s)


def answered(burst: Burst) -> Sequence[Any]:
    """The samples, all of them answers."""
    failed = next((each.error for each in burst.samples if not each.ok), "")
    if failed:
        raise ValueError(f"a request failed: {failed}")
    return burst.samples


def launched(port: int) -> Command:
    """The stack, with room for what will be asked. Flags of --launch come last and win."""
    longest = max(CONTEXT.value + OUTPUT_TOKENS.value, CHUNK.value + 2)
    settings = {
        "mesh": MESH.value, "http_port": port, "grpc_port": -1, "max_num_seqs": STREAMS.value,
        "max_model_len": longest, "max_num_batched_tokens": CHUNK.value,
    }  # fmt: skip
    settings |= {"model": MODEL.value} if MODEL.value else {}
    argv = [sys.executable, "-m", "jdisagg.launch", *(f"--{name}={value}" for name, value in settings.items())]
    return Command((*argv, *(f"--{each}" for each in LAUNCH.value)), port, "/ready")


def recompiles(metrics: str) -> int:
    """Programs compiled since the server was ready, by its /metrics. Raises ValueError where it tells none."""
    told = [line.split()[-1] for line in metrics.splitlines() if line.startswith("jdisagg_recompiles")]
    if not told:
        raise ValueError("the server's /metrics has no jdisagg_recompiles")
    return int(sum(map(float, told)))


def _metrics(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


async def measured(model: ModelConfig, rates: Rates) -> tuple[Decoded, Prefilled, int]:
    """Both figures of a stack that lives as long as this, and how many programs it compiled meanwhile."""
    port = free_port()
    with tempfile.TemporaryDirectory() as logs:
        async with running([launched(port)], Path(logs), READY_S.value):
            url = f"http://127.0.0.1:{port}/v1"
            asked = json.loads(ASK.value)
            server = Server(url, await first_model(url), {"ledger": True} | asked)
            prompts = Workload(Lengths(CHUNK.value, CHUNK.value), Lengths(1, 1), model.vocab_size)
            streams = Workload(
                Lengths(CONTEXT.value, CONTEXT.value),
                Lengths(OUTPUT_TOKENS.value, OUTPUT_TOKENS.value),
                model.vocab_size,
            )
            await closed_loop(streams.draw(STREAMS.value, "warm"), STREAMS.value, server.ask)
            burst = await closed_loop(streams.draw(STREAMS.value, "decode"), STREAMS.value, server.ask)
            single = await closed_loop(prompts.draw(REPEATS.value, "prefill"), 1, server.ask)
            compiled = recompiles(await asyncio.to_thread(_metrics, port))
    context = CONTEXT.value + OUTPUT_TOKENS.value / 2
    stored = Stored.of(LAUNCH.value or [])
    return decoded(burst, model, rates, context, stored), prefilled(single, model, rates, CHUNK.value), compiled


def text_of(name: str, decode: Decoded, prefill: Prefilled, compiled: int) -> str:
    return (
        f"{name} on {MESH.value}\n"
        f"decode step of {decode.streams} streams at {decode.context_tokens:,.0f} tokens: {decode.step_ms.p50:.2f} ms,"
        f" floor {decode.floor_ms:.2f} ms ({decode.share:.0%} of the floor's speed),"
        f" {decode.output_tokens_per_s:,.0f} tokens/s\n"
        f"prefill of {prefill.prompt_tokens:,} tokens: {prefill.prefill_ms.p50:.1f} ms, MFU {prefill.mfu:.0%}"
        f" of the measured matmul rate; {compiled} programs compiled after ready"
    )


def main() -> int:
    folder = Path(MODEL.value) if MODEL.value else EMBEDDED_MODEL
    model, rates = read_config(folder), Rates.read(RATES.value)
    try:
        decode, prefill, compiled = asyncio.run(measured(model, rates))
    except ServerFailed as error:
        raise ValueError(str(error)) from error
    print(text_of(folder.name, decode, prefill, compiled))
    if OUTPUT.value:
        found = {
            "model": folder.name,
            "mesh": MESH.value,
            "launch": LAUNCH.value,
            "ask": ASK.value,
            "rates": asdict(rates),
        }
        found |= {"decode": asdict(decode), "prefill": asdict(prefill), "recompiles": compiled}
        report.write_json(OUTPUT.value, machine.described() | found)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
