"""What kept KV saves: the first token of a prompt whose beginning was served before, and of a conversation's turns.

In pairs, so that a noisy machine meets both: a prompt with a beginning that nobody has asked yet (a miss), then
one with the same beginning and another end (a hit). A conversation asks with all that was said so far, once with
--prefix_caching=on and once off. Times are the ledger's, from arrival to the first token; the floor of a hit is the
share of the prompt that it still computes.

    python -m benchmarks.prefix_reuse --model=DIR/small --output=benchmarks/results/prefix_reuse.json
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams
from jdisagg.core.ledger import Mark
from jdisagg.serve.frontends.offline import Completion

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_list("meshes", ["prefill:tp1,decode:tp1", "colocated:tp1"], "each by itself", flag_values=FLAGS)
flags.DEFINE_integer("shared_tokens", 1024, "of the common beginning", 1, flag_values=FLAGS)
flags.DEFINE_integer("new_tokens", 64, "behind it, and in each turn of a conversation", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "pairs of a miss and a hit", 1, flag_values=FLAGS)
flags.DEFINE_integer("turns", 8, "of a conversation", 1, flag_values=FLAGS)
flags.DEFINE_integer("answer_tokens", 32, "of each turn", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one mesh; seconds are medians."""

    mesh: str
    miss_s: float
    hit_s: float
    ratio: float  # median of the pairs' own ratios
    hit_tokens: int  # that a hit found
    conversation_on_s: list[float]  # first token of each turn
    conversation_off_s: list[float]


def first_token_s(answer: Completion) -> float:
    assert answer.ledger is not None, "a whole answer has its ledger"
    marks = dict(reversed(answer.ledger.marks))
    return (marks[Mark.FIRST_TOKEN] - marks[Mark.ARRIVED]) / 1e9


class Asker:
    """Random prompts, of tokens that no earlier prompt has had in this order."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self._random = llm, random.Random(17)
        self._vocab_size = llm.service.model_config.vocab_size

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def ask(self, prompt: list[int], max_tokens: int) -> Completion:
        return self.llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))

    def pair(self) -> tuple[float, float, int]:
        """(seconds of a miss, seconds of a hit, tokens that the hit found)."""
        shared = self.tokens(FLAGS.shared_tokens)
        miss = self.ask(shared + self.tokens(FLAGS.new_tokens), 2)
        hit = self.ask(shared + self.tokens(FLAGS.new_tokens), 2)
        return first_token_s(miss), first_token_s(hit), hit.cached_tokens

    def conversation(self) -> list[float]:
        said, seconds = self.tokens(FLAGS.new_tokens), []
        for _ in range(FLAGS.turns):
            answer = self.ask(said, FLAGS.answer_tokens)
            seconds.append(first_token_s(answer))
            said += [*answer.token_ids, *self.tokens(FLAGS.new_tokens)]
        return seconds


def stack(mesh: str, prefix_caching: str) -> LLM:
    longest = FLAGS.shared_tokens + FLAGS.turns * (FLAGS.new_tokens + FLAGS.answer_tokens) + FLAGS.new_tokens
    return LLM(model=FLAGS.model, mesh=mesh, max_model_len=longest, prefix_caching=prefix_caching)


def measure(mesh: str) -> Row:
    with stack(mesh, "on") as llm:
        asker = Asker(llm)
        asker.pair()  # the first of a process pays for what every later one finds
        pairs = [asker.pair() for _ in range(FLAGS.rounds)]
        kept = asker.conversation()
    with stack(mesh, "off") as llm:
        asker = Asker(llm)
        asker.pair()
        anew = asker.conversation()
    misses, hits, found = zip(*pairs, strict=True)
    ratio = statistics.median(hit / miss for miss, hit, _ in pairs)
    return Row(mesh, statistics.median(misses), statistics.median(hits), ratio, min(found), kept, anew)


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"first token: {FLAGS.shared_tokens} tokens shared, {FLAGS.new_tokens} new")
    for name in ("mesh", "miss ms", "hit ms", "hit / miss", "found", "turn 1 ms", "last turn ms", "so, nothing kept"):
        shown.add_column(name, justify="right")
    for row in rows:
        ends = row.conversation_on_s[0], row.conversation_on_s[-1], row.conversation_off_s[-1]
        numbers = [f"{1e3 * row.miss_s:.1f}", f"{1e3 * row.hit_s:.1f}", f"{row.ratio:.2f}", str(row.hit_tokens)]
        shown.add_row(row.mesh, *numbers, *(f"{1e3 * each:.1f}" for each in ends))
    return shown


def main() -> int:
    rows = [measure(mesh) for mesh in FLAGS.meshes]
    Console().print(table(rows))
    if FLAGS.output:
        about = {"model": Path(FLAGS.model).name or "embedded", "shared_tokens": FLAGS.shared_tokens}
        about |= {"new_tokens": FLAGS.new_tokens, "answer_tokens": FLAGS.answer_tokens, "rounds": FLAGS.rounds}
        report = {**described(), **about, "meshes": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
