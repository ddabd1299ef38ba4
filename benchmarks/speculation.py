"""Drafts (`--speculative=...`) beside steps of one token, in turns: tokens/s, and tokens a row drew in a step, in all
and in the first and last quarter of each answer: what guesses come to must not decay.

Two kinds of prompts: a piece of code twice and its beginning again ("copies"), and the beginning of an import ("new").
Whether an answer repeats what stood before is the model's affair: the tokens that a row drew tell. Greedy, with ends of
answers ignored; the tokens of all rounds are compared, and the count of those that differ is told. All stacks are up,
one at work.

    python -m benchmarks.speculation --output=benchmarks/results/speculation.json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "of every stack", flag_values=FLAGS)
flags.DEFINE_list("drafts", ["1", "3", "5"], "tokens guessed by n-grams", flag_values=FLAGS)
flags.DEFINE_list("kinds", [], "what else --speculative may say: auto, draft, ...", flag_values=FLAGS)
flags.DEFINE_list("streams", ["1", "4", "8"], "answers at once, and slots", flag_values=FLAGS)
flags.DEFINE_integer("tokens", 64, "of an answer", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 3, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

OFF = "off"
NAMES = ("area", "volume", "total", "mean", "width", "height", "depth", "price")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds; `ratio` of the pairs: tokens/s over those of steps of one token. `cpu_ratio` so, of tokens
    a second of processor time, which a busy machine changes less."""

    speculative: str
    work: str
    streams: int
    tokens_per_s: float
    ratio: float
    cpu_ratio: float
    tokens_a_row: float  # that a row of a step drew, mean of all rounds
    tokens_a_row_early: float  # so, in the first quarter of each answer
    tokens_a_row_late: float  # and in the last
    differing: int  # tokens unlike those of steps of one


def prompts(work: str, number: int) -> list[str]:
    return [prompt(work, NAMES[index % len(NAMES)], index) for index in range(number)]


def prompt(work: str, name: str, index: int) -> str:
    lines = [f"    {name}_{part} = values[{part + index}] * {3 * part + index}\n" for part in range(4)]
    code = f"def {name}(values):\n{''.join(lines)}    return {' + '.join(f'{name}_{part}' for part in range(4))}\n\n\n"
    return code + code + code.splitlines(keepends=True)[0] if work == "copies" else f"# {index}: {name}\nimport "


class Speed(NamedTuple):
    tokens_per_s: float
    tokens_per_cpu_s: float


class Stack:
    """One way of decoding, with as many slots as there are streams."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.answers = llm, dict[tuple[str, int], list[list[int]]]()
        self.rows: list[tuple[int, int]] = []  # of each row of a step: tokens before it, and drawn by it

    def burst(self, work: str, streams: int) -> Speed:
        """Of so many answers at once, from the first token that any of them has."""
        return asyncio.run(self._burst(work, streams))

    async def _burst(self, work: str, streams: int) -> Speed:
        asked = SamplingParams(max_tokens=FLAGS.tokens, temperature=0.0, ignore_eos=True)
        began: list[tuple[float, float]] = []

        async def one(text: str) -> list[int]:
            tokens: list[int] = []
            async for piece in self.llm.stream(text, asked):
                if piece.delta.sampled:
                    began.append((time.perf_counter(), time.process_time()))
                    self.rows.append((len(tokens), len(piece.delta.sampled)))
                    tokens += [each.token for each in piece.delta.sampled]
            return tokens

        found = await asyncio.gather(*map(one, prompts(work, streams)))
        self.answers.setdefault((work, streams), found)
        (first_s, first_cpu_s), (last_s, last_cpu_s) = began[0], began[-1]
        tokens = streams * FLAGS.tokens - 1
        return Speed(tokens / (last_s - first_s), tokens / (last_cpu_s - first_cpu_s))

    def tokens_a_row(self) -> tuple[float, float, float]:
        """Of the pieces, each of a row of a step, since it was asked last: in all, early and late in an answer."""
        rows, self.rows = self.rows, []
        quarter = FLAGS.tokens // 4
        early = [drawn for before, drawn in rows if 0 < before < quarter]
        late = [drawn for before, drawn in rows if before >= 3 * quarter]
        return statistics.mean(drawn for _, drawn in rows), statistics.mean(early), statistics.mean(late)


def measure(streams: int) -> list[Row]:
    kinds = (OFF, *(f"ngram:{number}" for number in FLAGS.drafts), *FLAGS.kinds)
    with ExitStack() as opened:
        sizes = {
            "mesh": FLAGS.mesh,
            "max_num_seqs": streams,
            "max_model_len": 448 + FLAGS.tokens,
            "prefix_caching": "off",
        }
        stacks = {
            kind: Stack(opened.enter_context(LLM(model=FLAGS.model, speculative=kind, **sizes))) for kind in kinds
        }
        rows = [row for work in ("copies", "new") for row in _rows(stacks, work, streams)]
        recompiles = {kind: stack.llm.service.recompiles() for kind, stack in stacks.items()}
    assert not any(recompiles.values()), recompiles
    return rows


def _rows(stacks: dict[str, Stack], work: str, streams: int) -> list[Row]:
    speeds: dict[str, list[Speed]] = {kind: [] for kind in stacks}
    for number in range(FLAGS.rounds + 1):
        for kind in stacks if number % 2 else reversed(stacks):
            speed = stacks[kind].burst(work, streams)
            if number:
                speeds[kind].append(speed)
    plain = stacks[OFF].answers[work, streams]
    return [
        Row(
            kind,
            work,
            streams,
            statistics.median(each.tokens_per_s for each in speeds[kind]),
            *ratios(speeds[kind], speeds[OFF]),
            *stack.tokens_a_row(),
            differing(stack.answers[work, streams], plain),
        )
        for kind, stack in stacks.items()
    ]


def ratios(mine: Sequence[Speed], others: Sequence[Speed]) -> tuple[float, float]:
    """Medians of the pairs, by the clock and by processor time."""
    pairs = [*zip(mine, others, strict=True)]
    by_clock = statistics.median(one.tokens_per_s / other.tokens_per_s for one, other in pairs)
    return by_clock, statistics.median(one.tokens_per_cpu_s / other.tokens_per_cpu_s for one, other in pairs)


def differing(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    pairs = zip(found, expected, strict=True)
    return sum(mine != other for some, others in pairs for mine, other in zip(some, others, strict=True))


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"{FLAGS.mesh}, {FLAGS.tokens} tokens an answer")
    for name in (
        "work",
        "streams",
        "speculative",
        "tokens/s",
        "beside off",
        "in CPU time",
        "tokens a row",
        "early",
        "late",
        "differ",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        drawn = (f"{each:.2f}" for each in (row.tokens_a_row, row.tokens_a_row_early, row.tokens_a_row_late))
        figures = f"{row.tokens_per_s:,.0f}", f"{row.ratio:.2f}", f"{row.cpu_ratio:.3f}", *drawn, str(row.differing)
        shown.add_row(row.work, str(row.streams), row.speculative, *figures)
    return shown


def main() -> int:
    about = described()
    rows = [row for streams in FLAGS.streams for row in measure(int(streams))]
    Console().print(table(rows))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name or "embedded", "mesh": FLAGS.mesh}
        report |= {"tokens": FLAGS.tokens, "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
