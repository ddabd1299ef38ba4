"""Gaps between tokens of streams while pages go down and come up all the time, beside the same load without tiers.

Some streams decode long answers; beside them one prompt after the other is asked for, round and round over a working
set of four times HBM, so that with DRAM below every one is read back and pushes others down, and without it every one
is computed. Both stacks are up, and take turns.

    python -m benchmarks.tier_gaps --output=benchmarks/results/tier_gaps_cpu.json
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np
from absl import flags

import jdisagg
from benchmarks import entry, report
from benchmarks.machine import described
from benchmarks.tiers import FIRST

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder or name; empty: the embedded one", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "of both stacks", flag_values=FLAGS)
flags.DEFINE_integer("streams", 4, "whose gaps are looked at", 1, flag_values=FLAGS)
flags.DEFINE_integer("tokens", 128, "of each of their answers", 2, flag_values=FLAGS)
flags.DEFINE_integer("prompt_tokens", 256, "of the prompts beside them", 16, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
SETS, PROMPTS = 4, 32  # working sets of HBM, and prompts that are one


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds; `prompts` answered beside the streams, of whose tokens the share `found` was kept."""

    below: str
    gap_p50_ms: float
    gap_p99_ms: float
    prompts: float
    found: float


@dataclass(frozen=True, slots=True)
class Round:
    gaps_s: tuple[float, ...]
    prompts: int
    found: float

    def gap_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.gaps_s, percent))


def open_llm(dram: bool) -> jdisagg.LLM:
    """HBM holds the streams and a fourth of the prompts."""
    working = PROMPTS * FLAGS.prompt_tokens
    own = FLAGS.streams * (FLAGS.tokens + 64)
    sizes = {"max_model_len": 1024, "max_num_seqs": FLAGS.streams + 1, "kv_tokens": own + working // SETS}
    return jdisagg.LLM(
        model=FLAGS.model, mesh=FLAGS.mesh, **sizes, dram_tokens=2 * working if dram else 0, reserve_tokens=64
    )


async def streams(llm: jdisagg.LLM, number: int) -> tuple[float, ...]:
    asked = jdisagg.SamplingParams(max_tokens=FLAGS.tokens, temperature=0.0, ignore_eos=True)

    async def one(index: int) -> list[float]:
        prompt = [11 + number, 13 + index, 17]
        times = [time.perf_counter() async for _ in llm.stream(prompt, asked)]
        return [after - before for before, after in itertools.pairwise(times)]

    found = await asyncio.gather(*map(one, range(FLAGS.streams)))
    return tuple(gap for gaps in found for gap in gaps)


async def load(llm: jdisagg.LLM, prompts: Sequence[list[int]], done: asyncio.Event, start: int) -> tuple[int, float]:
    """Asks for one after the other until `done`: how many, and what share of their tokens was kept."""
    number = kept = tokens = 0
    while not done.is_set():
        prompt = prompts[(start + number) % len(prompts)]
        async for piece in llm.stream(prompt, FIRST):
            if piece.finish is not None:
                kept += piece.finish.ledger.cached_tokens
        number, tokens = number + 1, tokens + len(prompt)
    return number, kept / max(1, tokens)


async def one_round(llm: jdisagg.LLM, prompts: Sequence[list[int]], number: int) -> Round:
    done = asyncio.Event()
    beside = asyncio.create_task(load(llm, prompts, done, number * 7))
    gaps = await streams(llm, number)
    done.set()
    return Round(gaps, *(await beside))


def measured() -> tuple[list[Row], float]:
    """Rows, and the median of the pairs' ratios of the 99th percentiles, with DRAM over without."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(10, 1000, FLAGS.prompt_tokens).tolist() for _ in range(PROMPTS)]
    rounds: dict[str, list[Round]] = {"nothing": [], "dram": []}
    with ExitStack() as stack:
        llms = {name: stack.enter_context(open_llm(name == "dram")) for name in rounds}
        for llm in llms.values():
            for prompt in prompts:
                llm.generate(prompt, FIRST)
        for number in range(FLAGS.rounds + 1):
            for name in rounds if number % 2 else reversed(rounds):
                found = asyncio.run(one_round(llms[name], prompts, number))
                if number:
                    rounds[name].append(found)
    pairs = zip(rounds["dram"], rounds["nothing"], strict=True)
    ratio = statistics.median(mine.gap_ms(99) / other.gap_ms(99) for mine, other in pairs)
    return [row(name, found) for name, found in rounds.items()], round(ratio, 3)


def row(name: str, found: Sequence[Round]) -> Row:
    figures = (
        [each.gap_ms(50) for each in found],
        [each.gap_ms(99) for each in found],
        [each.prompts for each in found],
        [each.found for each in found],
    )
    return Row(name, *(round(statistics.median(each), 3) for each in figures))


def main() -> int:
    head = described()
    rows, ratio = measured()
    for each in rows:
        gaps = f"gaps p50 {each.gap_p50_ms:.1f} ms, p99 {each.gap_p99_ms:.1f} ms"
        print(f"{each.below:8} below: {gaps}; {each.prompts:g} prompts beside them, {each.found:.0%} found", flush=True)
    print(f"p99 with DRAM over that without, in pairs: {ratio:.2f}")
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("model", "mesh", "streams", "tokens", "prompt_tokens", "rounds")}
        report.write_json(FLAGS.output, {**head, **about, "ratio": ratio, "rows": [asdict(each) for each in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
