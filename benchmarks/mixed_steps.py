"""What it does to streams that decode when a long prompt arrives: chunks mixed into their steps, or in turns with them.

Several streams decode on one colocated worker; when each is under way, a long prompt arrives. Told are the largest gap
between two tokens of a stream and the mean one while the prompt is computed, and the prompt's time to its first token.
The same with --mixed_steps=on and =off in turns, both servers up, one at work. Prompts are new each time.

    python -m benchmarks.mixed_steps --model=DIR/small --output=benchmarks/results/mixed_steps.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_integer("streams", 7, "that decode when the prompt arrives", 1, flag_values=FLAGS)
flags.DEFINE_integer("stream_tokens", 64, "of each stream's own prompt", 1, flag_values=FLAGS)
flags.DEFINE_integer("prompt_tokens", 2048, "of the prompt that arrives", 1, flag_values=FLAGS)
flags.DEFINE_integer(
    "step_tokens", 264, "--max_num_batched_tokens: chunks of 256 beside eight rows", 1, flag_values=FLAGS
)
flags.DEFINE_integer("rounds", 5, "of each", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
MODES = ("on", "off")
UNDER_WAY = 8  # tokens of each stream before the prompt arrives


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt's arrival; seconds."""

    largest_gap_s: float  # of any stream, between its last token before the prompt and its first one after its end
    tpot_s: float  # mean gap of all streams meanwhile
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Of one mode; medians of the rounds, and these."""

    mixed_steps: str
    largest_gap_s: float
    tpot_s: float
    ttft_s: float
    rounds: list[Round]


class Scene:
    """Streams on one engine, and the times at which each got a token."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self._random = llm, random.Random(seed)
        self.times: list[list[float]] = [[] for _ in range(FLAGS.streams)]
        self._over = asyncio.Event()

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(self.llm.service.model_config.vocab_size) for _ in range(tokens)]

    async def run(self) -> Round:
        streams = [asyncio.create_task(self._decode(times)) for times in self.times]
        while min(map(len, self.times)) < UNDER_WAY:
            await asyncio.sleep(0.001)
        began_s = time.perf_counter()
        async for _ in self.llm.stream(self.prompt(FLAGS.prompt_tokens), SamplingParams(max_tokens=1, temperature=0.0)):
            break
        ended_s = time.perf_counter()
        self._over.set()
        await asyncio.gather(*streams)
        gaps = [gap for times in self.times for gap in between(times, began_s, ended_s)]
        return Round(max(gaps), statistics.mean(gaps), ended_s - began_s)

    async def _decode(self, times: list[float]) -> None:
        """Until a token has come after the prompt's first one."""
        asked = SamplingParams(max_tokens=FLAGS.prompt_tokens // 2, temperature=0.0, ignore_eos=True)
        async for _ in self.llm.stream(self.prompt(FLAGS.stream_tokens), asked):
            over = self._over.is_set()
            times.append(time.perf_counter())
            if over:
                return


def between(times: list[float], began_s: float, ended_s: float) -> list[float]:
    """Gaps that the prompt's computation falls into."""
    return [b - a for a, b in pairwise(times) if b > began_s and a < ended_s]


def open_llm(mode: str) -> LLM:
    longest = FLAGS.prompt_tokens + FLAGS.stream_tokens + FLAGS.prompt_tokens // 2
    sizes = {"max_model_len": longest, "max_num_seqs": 8, "max_num_batched_tokens": FLAGS.step_tokens}
    if mode == "off":
        sizes["max_num_batched_tokens"] -= 8  # chunks as large as those of the other
    return LLM(model=FLAGS.model, mesh="colocated:tp1", mixed_steps=mode, prefix_caching="off", **sizes)


def measure() -> list[Row]:
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        llms = {mode: stack.enter_context(open_llm(mode)) for mode in MODES}
        for number in range(FLAGS.rounds + 1):
            for mode in MODES if number % 2 else reversed(MODES):
                found = asyncio.run(Scene(llms[mode], number).run())
                if number:  # the first pays for what every later one finds
                    rounds[mode].append(found)
    return [
        Row(
            mode,
            statistics.median(each.largest_gap_s for each in found),
            statistics.median(each.tpot_s for each in found),
            statistics.median(each.ttft_s for each in found),
            found,
        )
        for mode, found in rounds.items()
    ]


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"{FLAGS.streams} streams decode, a prompt of {FLAGS.prompt_tokens} tokens arrives")
    for name in ("mixed steps", "largest gap ms", "TPOT ms", "prompt's TTFT ms"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(row.mixed_steps, *(f"{1e3 * each:.1f}" for each in (row.largest_gap_s, row.tpot_s, row.ttft_s)))
    return shown


def main() -> int:
    rows = measure()
    Console().print(table(rows))
    if FLAGS.output:
        about = {"model": Path(FLAGS.model).name or "embedded", "streams": FLAGS.streams}
        about |= {"prompt_tokens": FLAGS.prompt_tokens, "step_tokens": FLAGS.step_tokens}
        report = {**described(), **about, "modes": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
