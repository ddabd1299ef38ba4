"""Answers held to a schema with and without forced tokens drawn at once: seconds an answer, and tokens a row drew in a
step. The same answers come of all, or it ends with an error.

Stacks of every --kinds are up, one at work, in turns; JSON without white space, where a schema forces most, and with.

    python -m benchmarks.forced --output=benchmarks/results/forced_cpu.json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_list(
    "kinds",
    ["off", "forced:8", "grammar:3", "ngram:3"],
    "of --speculative; off: one by one, forced:N: off with --forced_tokens=N; the first is compared with",
    flag_values=FLAGS,
)
flags.DEFINE_list("streams", ["1", "8"], "answers at once", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 3, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "subscription": {"enum": ["premium_annual", "basic_monthly"]},
        "is_active": {"type": "boolean"},
    },
    "required": ["customer_name", "age", "subscription", "is_active"],
    "additionalProperties": False,
}
MOST = 400


@dataclass(frozen=True, slots=True)
class Row:
    speculative: str
    white_space: bool
    streams: int
    seconds: float  # of one round of answers, median
    ratio: float  # of the first kind's seconds over these
    tokens_a_row: float


class Stack:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.rows = llm, list[int]()

    def burst(self, streams: int, *, white_space: bool) -> tuple[float, list[list[int]]]:
        """Seconds, and the answers."""
        return asyncio.run(self._burst(streams, white_space))

    async def _burst(self, streams: int, white_space: bool) -> tuple[float, list[list[int]]]:
        form = {"json": SCHEMA, "disable_any_whitespace": not white_space}

        async def one(number: int) -> list[int]:
            asked = SamplingParams(max_tokens=MOST, temperature=0.7, seed=number, structured_outputs=form)
            tokens: list[int] = []
            async for piece in self.llm.stream(f"# {number}\ndef f(x):\n    return", asked):
                if piece.delta.sampled:
                    self.rows.append(len(piece.delta.sampled))
                    tokens += [each.token for each in piece.delta.sampled]
            return tokens

        began_s = time.perf_counter()
        found = await asyncio.gather(*map(one, range(streams)))
        return time.perf_counter() - began_s, [*found]


def measure() -> list[Row]:
    with ExitStack() as opened:
        sizes: dict[str, Any] = {"mesh": "prefill:tp1,decode:tp1", "max_num_seqs": 8, "max_model_len": 512}
        stacks = {
            kind: Stack(opened.enter_context(LLM(model=FLAGS.model, **drawn_by(kind), **sizes))) for kind in FLAGS.kinds
        }
        cases = [(int(streams), white_space) for streams in FLAGS.streams for white_space in (False, True)]
        rows = [row for streams, white_space in cases for row in rows_of(stacks, streams, white_space=white_space)]
        recompiles = {kind: stack.llm.service.recompiles() for kind, stack in stacks.items()}
    if any(recompiles.values()):
        raise ValueError(f"programs were compiled after ready: {recompiles}")
    return rows


def drawn_by(kind: str) -> dict[str, Any]:
    """The settings that a kind stands for."""
    said, _, number = kind.partition(":")
    if said == "forced":
        return {"speculative": "off", "forced_tokens": int(number)}
    return {"speculative": kind, "forced_tokens": 0}


def rows_of(stacks: dict[str, Stack], streams: int, *, white_space: bool) -> list[Row]:
    took: dict[str, list[float]] = {kind: [] for kind in stacks}
    answers: dict[str, list[list[int]]] = {}
    for number in range(FLAGS.rounds + 1):
        for kind in stacks if number % 2 else reversed(stacks):
            if number == 1:
                stacks[kind].rows.clear()
            seconds, answers[kind] = stacks[kind].burst(streams, white_space=white_space)
            took[kind] += [seconds] if number else []
    first = next(iter(stacks))
    if any(found != answers[first] for found in answers.values()):
        raise ValueError(f"answers differ: {answers}")
    return [
        Row(
            *(kind, white_space, streams, statistics.median(took[kind])),
            ratio=statistics.median(plain / mine for plain, mine in zip(took[first], took[kind], strict=True)),
            tokens_a_row=statistics.mean(stack.rows),
        )
        for kind, stack in stacks.items()
    ]


def main() -> int:
    report = {"rows": [asdict(row) for row in measure()], **described()}
    text = json.dumps(report, indent=1)
    print(text)
    if FLAGS.output:
        Path(FLAGS.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
