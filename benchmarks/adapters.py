"""Adapters in one batch beside none, in turns: tokens/s of as many streams as there are adapters, each asking for its
own, for one and the same, and for the model alone; and of a stack without room for any.

The adapters are random, of every matrix that adapters add to. What the answers are does not matter to their cost. Both
stacks are up, one at work.

    python -m benchmarks.adapters --output=benchmarks/results/adapters.json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Adapter
from jdisagg.model.lora import CONFIG_FILE, WEIGHTS_FILE, adapted_leaves, target_of

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "of both stacks", flag_values=FLAGS)
flags.DEFINE_integer("adapters", 8, "and streams", 1, flag_values=FLAGS)
flags.DEFINE_integer("rank", 8, "of each, and --max_lora_rank", 1, flag_values=FLAGS)
flags.DEFINE_integer("tokens", 64, "of an answer", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

OFF, NONE, ONE, EACH = "no room for any", "none", "one for all", "one each"
PROMPT = "def area(width, height):\n    "


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds; `ratio` and `cpu_ratio` of the pairs: over those of the stack without room."""

    adapters: str
    tokens_per_s: float
    ratio: float
    cpu_ms: float  # processor time of a token, prompts included: what others do on the machine is hardly in it
    cpu_ratio: float


def write(folder: Path, model: ModelConfig, seed: int, rank: int) -> Path:
    """A random adapter, small beside the model."""
    folder.mkdir()
    generator, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for layer in range(model.num_layers):
        for part in (part for leaf in adapted_leaves(model, layer).values() for part in leaf.parts):
            name = f"base_model.model.model.layers.{layer}.{target_of(part)}"
            for side, shape in (("A", (rank, part.shape[1])), ("B", (part.shape[0], rank))):
                tensors[f"{name}.lora_{side}.weight"] = 0.02 * generator.standard_normal(shape, np.float32)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


async def burst(llm: LLM, adapters: Sequence[Adapter | None]) -> tuple[float, float]:
    """Tokens/s of so many answers at once, from the first token that any of them has; CPU milliseconds a token."""
    began, spent_s = list[float](), time.process_time()

    async def one(index: int, adapter: Adapter | None) -> None:
        asked = SamplingParams(max_tokens=FLAGS.tokens, temperature=0.0, ignore_eos=True, adapter=adapter)
        async for piece in llm.stream(f"# {index}\n{PROMPT}", asked):
            if piece.delta.sampled:
                began.append(time.perf_counter())

    await asyncio.gather(*(one(*each) for each in enumerate(adapters)))
    tokens = len(adapters) * FLAGS.tokens
    return (tokens - 1) / (began[-1] - began[0]), 1e3 * (time.process_time() - spent_s) / tokens


def measure() -> list[Row]:
    number = FLAGS.adapters
    sizes = {"mesh": FLAGS.mesh, "max_num_seqs": number, "max_model_len": 256, "prefix_caching": "off"}
    room = {"enable_lora": True, "max_loras": number, "max_lora_rank": FLAGS.rank}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(model=FLAGS.model, **sizes) as plain,
        LLM(model=FLAGS.model, **sizes, **room) as able,
    ):
        model = able.service.model_config
        found = [
            able.load_adapter(f"a{n}", str(write(Path(folder) / f"a{n}", model, n, FLAGS.rank))) for n in range(number)
        ]
        nobody: list[Adapter | None] = [None] * number
        kinds = {OFF: (plain, nobody), NONE: (able, nobody), ONE: (able, found[:1] * number), EACH: (able, found)}
        found_of: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for turn in range(FLAGS.rounds + 1):
            for kind, work in kinds.items() if turn % 2 else reversed(kinds.items()):
                figures = asyncio.run(burst(*work))
                if turn:
                    found_of[kind].append(figures)
        assert not able.service.recompiles() and not plain.service.recompiles()
    plains = list(zip(*found_of[OFF], strict=True))
    return [row(kind, list(zip(*each, strict=True)), plains) for kind, each in found_of.items()]


def row(kind: str, figures: Sequence[Sequence[float]], plains: Sequence[Sequence[float]]) -> Row:
    (speed, ratio), (cpu_ms, cpu_ratio) = (
        (statistics.median(mine), statistics.median(one / other for one, other in zip(mine, plain, strict=True)))
        for mine, plain in zip(figures, plains, strict=True)
    )
    return Row(kind, speed, ratio, cpu_ms, cpu_ratio)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"{FLAGS.mesh}, {FLAGS.adapters} streams, {FLAGS.adapters} adapters of rank {FLAGS.rank}")
    for name in ("adapters asked for", "tokens/s", f"beside {OFF}", "CPU ms a token", "beside"):
        shown.add_column(name, justify="right")
    for each in rows:
        figures = f"{each.tokens_per_s:,.0f}", f"{each.ratio:.2f}", f"{each.cpu_ms:.2f}", f"{each.cpu_ratio:.2f}"
        shown.add_row(each.adapters, *figures)
    return shown


def main() -> int:
    about, rows = described(), measure()
    Console().print(table(rows))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name or "embedded", "mesh": FLAGS.mesh}
        report |= {"adapters": FLAGS.adapters, "rank": FLAGS.rank, "tokens": FLAGS.tokens}
        report["rows"] = [asdict(row) for row in rows]
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
