"""A decode pipeline on one host as `stages` (a program a stage) and as a ring (one program, several turns a dispatch).

Some streams are answered at once, by each in turn: told are the mean time from token to token, tokens/s, and the median
of the pairs' ratios, a ring's time over that of the stages beside it. All stacks are up, one at work.

    python -m benchmarks.ring --output=benchmarks/results/ring.json
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
flags.DEFINE_integer("pp", 2, "stages", 2, flag_values=FLAGS)
flags.DEFINE_list("batches", ["1", "4", "16"], "streams at once", flag_values=FLAGS)
flags.DEFINE_list("turns", ["1", "4", "8"], "--multi_step of the rings", flag_values=FLAGS)
flags.DEFINE_integer("prompt_tokens", 32, "of each stream", 1, flag_values=FLAGS)
flags.DEFINE_integer("output_tokens", 65, "of each stream", 2, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
STAGES = "stages"


@dataclass(frozen=True, slots=True)
class Round:
    """Of all streams of one burst."""

    tpot_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds, and these. `ratio`: of the pairs' times a token, to the stages'."""

    schedule: str  # "stages", or "ring" with its turns
    batch: int
    tpot_s: float
    tokens_per_s: float
    ratio: float
    rounds: list[Round]


def open_llm(turns: int | None) -> LLM:
    """Of stages, or with `turns` of a ring."""
    stages = f"{'pp' if turns is None else 'ring'}{FLAGS.pp}"
    longest = FLAGS.prompt_tokens + FLAGS.output_tokens
    slots = max(map(int, FLAGS.batches))
    sizes = {"max_model_len": longest, "max_num_seqs": slots, "max_num_batched_tokens": 256, "prefix_caching": "off"}
    return LLM(model=FLAGS.model, mesh=f"prefill:tp1,decode:{stages}", multi_step=turns or 1, **sizes)


async def burst(llm: LLM, batch: int, seed: int) -> Round:
    drawn = random.Random(seed)
    vocab_size = llm.service.model_config.vocab_size
    prompts = [[drawn.randrange(vocab_size) for _ in range(FLAGS.prompt_tokens)] for _ in range(batch)]
    asked = SamplingParams(max_tokens=FLAGS.output_tokens, temperature=0.0, ignore_eos=True)

    async def one(prompt: list[int]) -> tuple[float, float]:
        """When its first and its last token came."""
        times = [time.perf_counter() async for _ in llm.stream(prompt, asked)]
        return times[0], times[-1]

    found = await asyncio.gather(*map(one, prompts))
    later = FLAGS.output_tokens - 1
    span_s = max(last for _, last in found) - min(first for first, _ in found)
    return Round(statistics.mean((last - first) / later for first, last in found), batch * later / span_s)


def row_of(schedule: str, batch: int, found: Sequence[Round], beside: Sequence[Round]) -> Row:
    """`beside`: the stages' rounds, in pairs with these."""
    return Row(
        schedule,
        batch,
        statistics.median(each.tpot_s for each in found),
        statistics.median(each.tokens_per_s for each in found),
        statistics.median(mine.tpot_s / other.tpot_s for mine, other in zip(found, beside, strict=True)),
        list(found),
    )


def measure() -> list[Row]:
    kinds: dict[str, int | None] = {STAGES: None, **{f"ring, {turns}": int(turns) for turns in FLAGS.turns}}
    rows = []
    with ExitStack() as stack:
        llms = {name: stack.enter_context(open_llm(turns)) for name, turns in kinds.items()}
        for batch in map(int, FLAGS.batches):
            rounds: dict[str, list[Round]] = {name: [] for name in kinds}
            for number in range(FLAGS.rounds + 1):
                for name in kinds if number % 2 else reversed(kinds):
                    found = asyncio.run(burst(llms[name], batch, number))
                    if number:
                        rounds[name].append(found)
            rows += [row_of(name, batch, found, rounds[STAGES]) for name, found in rounds.items()]
    return rows


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"{FLAGS.pp} stages, {FLAGS.output_tokens} tokens of each stream")
    for name in ("streams", "schedule, turns", "a token, ms", "tokens/s", "of the stages' time"):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = f"{1e3 * row.tpot_s:.2f}", f"{row.tokens_per_s:.0f}", f"{row.ratio:.2f}"
        shown.add_row(str(row.batch), row.schedule, *figures)
    return shown


def main() -> int:
    about = described()
    rows = measure()
    Console().print(table(rows))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name or "embedded", "pp": FLAGS.pp}
        report |= {"output_tokens": FLAGS.output_tokens, "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
