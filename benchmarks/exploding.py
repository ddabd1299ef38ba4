"""Gaps between tokens of plain streams, alone and beside a client whose grammars explode: schemas that are refused for
their size, a new one each time, or an ambiguous grammar that is fine at first.

Both in turns, on one stack within this process, so that streams and grammars share its interpreter as well.

    python -m benchmarks.exploding --output=benchmarks/results/exploding_cpu.json
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams
from jdisagg.core.errors import RequestError

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_integer("streams", 4, "plain ones at once", 1, flag_values=FLAGS)
flags.DEFINE_integer("tokens", 400, "of each", 2, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 4, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

ALONE, REFUSED, AMBIGUOUS = "alone", "refused", "ambiguous"
AMBIGUITY = 'start: e\ne: e e | "a" | e "a" e |'
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Row:
    """Of all rounds."""

    beside: str
    gaps: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    ended: int  # requests whose grammar was refused, or whose answers came to their end
    differing: int  # streams with other tokens than alone


def exploding(number: int) -> dict[str, Any]:
    """A schema that no other number has."""
    parts = [[{"properties": {f"k{n}-{number}": {"const": m}}} for m in range(6)] for n in range(9)]
    return {"json": {"allOf": [{"anyOf": each} for each in parts]}}


def percentile(gaps: list[float], share: float) -> float:
    return 1e3 * sorted(gaps)[min(len(gaps) - 1, int(share * len(gaps)))]


class Load:
    """Streams of one stack, what else is asked of it meanwhile, and what came of both."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.ended: dict[str, int] = dict.fromkeys((REFUSED, AMBIGUOUS), 0)
        self.asked: dict[str, Callable[[], SamplingParams]] = {REFUSED: refused, AMBIGUOUS: ambiguous}

    async def round(self, beside: str) -> tuple[list[float], list[list[int]]]:
        """Seconds between pieces of each stream, and their tokens."""
        gaps: list[float] = []
        client = asyncio.create_task(self._again(beside)) if beside in self.asked else None
        found = await asyncio.gather(*(self._stream(number, gaps) for number in range(FLAGS.streams)))
        if client is not None:
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
        return gaps, [*found]

    async def _stream(self, number: int, gaps: list[float]) -> list[int]:
        asked = SamplingParams(max_tokens=FLAGS.tokens, temperature=0.8, seed=number, ignore_eos=True)
        tokens, last_s = list[int](), 0.0
        async for piece in self.llm.stream(f"def area_{number}(", asked):
            if piece.delta.sampled:
                now_s = time.perf_counter()
                gaps += [now_s - last_s] if last_s else []
                last_s = now_s
                tokens += [each.token for each in piece.delta.sampled]
        return tokens

    async def _again(self, beside: str) -> None:
        asked = self.asked[beside]
        while True:
            try:
                async for piece in self.llm.stream("x", asked()):
                    self.ended[beside] += piece.finish_reason is not None
            except RequestError:
                self.ended[beside] += 1


def refused() -> SamplingParams:
    return SamplingParams(structured_outputs=exploding(next(_numbers)))


def ambiguous() -> SamplingParams:
    held = {"grammar": AMBIGUITY}
    return SamplingParams(structured_outputs=held, max_tokens=FLAGS.tokens, logit_bias={68: 50.0}, temperature=1.0)


def measure() -> list[Row]:
    slots = FLAGS.streams + 1
    gaps: dict[str, list[float]] = {ALONE: [], REFUSED: [], AMBIGUOUS: []}
    differing = dict.fromkeys(gaps, 0)
    with LLM(model=FLAGS.model, mesh="prefill:tp1,decode:tp1", max_num_seqs=slots, max_model_len=512) as llm:
        load, expected = Load(llm), list[list[int]]()
        for number in range(FLAGS.rounds + 1):
            for beside in gaps if number % 2 else reversed(gaps):
                found, tokens = asyncio.run(load.round(beside))
                expected = expected or tokens
                differing[beside] += sum(mine != other for mine, other in zip(tokens, expected, strict=True))
                gaps[beside] += found if number else []
        assert not llm.service.recompiles()
    return [
        Row(
            beside=beside,
            gaps=len(each),
            p50_ms=percentile(each, 0.5),
            p99_ms=percentile(each, 0.99),
            most_ms=percentile(each, 1.0),
            ended=load.ended.get(beside, 0),
            differing=differing[beside],
        )
        for beside, each in gaps.items()
    ]


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"{FLAGS.streams} streams of {FLAGS.tokens} tokens")
    for name in ("beside", "gaps", "p50 ms", "p99 ms", "longest ms", "ended", "other tokens"):
        shown.add_column(name, justify="right")
    for row in rows:
        times = (f"{each:.1f}" for each in (row.p50_ms, row.p99_ms, row.most_ms))
        shown.add_row(row.beside, str(row.gaps), *times, str(row.ended), str(row.differing))
    return shown


def main() -> int:
    about, rows = described(), measure()
    Console().print(table(rows))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name or "embedded", "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
