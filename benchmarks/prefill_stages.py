"""Long prompts on so many devices: as stages of layers with a chunk each (`prefill:pp2`), and tensor parallel (`tp2`).

One prompt, or some at once, are answered with one token, by each mesh in turn: told are the mean time to it, prompt
tokens/s, and the median of the pairs' ratios, the stages' time over that of the mesh beside them. All stacks are up,
one at work.

    python -m benchmarks.prefill_stages --output=benchmarks/results/prefill_stages.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_integer("devices", 2, "of the prefill worker", 2, flag_values=FLAGS)
flags.DEFINE_list("prompts", ["256", "1984"], "tokens of a prompt", flag_values=FLAGS)
flags.DEFINE_list("batches", ["1", "4"], "prompts at once", flag_values=FLAGS)
flags.DEFINE_integer("chunk_tokens", 256, "of a chunk at most", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Round:
    """Of all prompts of one burst."""

    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds, and these. `ratio`: of the stages' times to these, in pairs."""

    mesh: str
    prompt_tokens: int
    batch: int
    ttft_s: float
    tokens_per_s: float
    ratio: float
    rounds: list[Round]


def open_llm(mesh: str) -> LLM:
    longest = max(map(int, FLAGS.prompts)) + 1
    sizes = {"max_num_batched_tokens": FLAGS.chunk_tokens, "prefill_buckets": str(FLAGS.chunk_tokens)}
    slots = max(map(int, FLAGS.batches))
    kept = {"max_model_len": longest, "max_num_seqs": slots, "prefix_caching": "off"}
    return LLM(model=FLAGS.model, mesh=f"prefill:{mesh},decode:tp1", **sizes, **kept)


async def burst(llm: LLM, tokens: int, batch: int, seed: int) -> Round:
    drawn, vocab_size = random.Random(seed), llm.service.model_config.vocab_size
    prompts = [[drawn.randrange(vocab_size) for _ in range(tokens)] for _ in range(batch)]
    asked, began_s = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), time.perf_counter()

    async def one(prompt: list[int]) -> float:
        times = [time.perf_counter() - began_s async for _ in llm.stream(prompt, asked)]
        return times[0]

    found = await asyncio.gather(*map(one, prompts))
    return Round(statistics.mean(found), batch * tokens / max(found))


def row_of(mesh: str, shape: tuple[int, int], found: Sequence[Round], stages: Sequence[Round]) -> Row:
    """`stages`: their rounds, in pairs with these."""
    return Row(
        mesh,
        *shape,
        statistics.median(each.ttft_s for each in found),
        statistics.median(each.tokens_per_s for each in found),
        statistics.median(other.ttft_s / mine.ttft_s for mine, other in zip(found, stages, strict=True)),
        list(found),
    )


def measure() -> list[Row]:
    stages, rows = f"pp{FLAGS.devices}", []
    meshes = (stages, f"tp{FLAGS.devices}", "tp1")
    with ExitStack() as stack:
        llms = {mesh: stack.enter_context(open_llm(mesh)) for mesh in meshes}
        shapes = [(int(tokens), int(batch)) for tokens in FLAGS.prompts for batch in FLAGS.batches]
        for shape in shapes:
            rounds: dict[str, list[Round]] = {mesh: [] for mesh in meshes}
            for number in range(FLAGS.rounds + 1):
                for mesh in meshes if number % 2 else reversed(meshes):
                    found = asyncio.run(burst(llms[mesh], *shape, number))
                    if number:
                        rounds[mesh].append(found)
            rows += [row_of(mesh, shape, found, rounds[stages]) for mesh, found in rounds.items()]
        recompiles = {mesh: llm.service.recompiles() for mesh, llm in llms.items()}
    assert not any(recompiles.values()), recompiles
    return rows


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"{FLAGS.devices} devices, chunks of {FLAGS.chunk_tokens} tokens")
    for name in ("prompt", "at once", "mesh", "first token, ms", "tokens/s", "stages' time to it"):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = f"{1e3 * row.ttft_s:.1f}", f"{row.tokens_per_s:,.0f}", f"{row.ratio:.2f}"
        shown.add_row(str(row.prompt_tokens), str(row.batch), row.mesh, *figures)
    return shown


def main() -> int:
    about = described()
    rows = measure()
    Console().print(table(rows))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name or "embedded", "devices": FLAGS.devices}
        report |= {"chunk_tokens": FLAGS.chunk_tokens, "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
