"""Conversations over a working set of four times HBM, live: what of a prompt is found, and when its first token comes.

Each conversation says a turn in its turn, round and round, so that its KV has left HBM when it is asked for again. The
same prompts without tiers, and with each tier below; of the disk once more after a restart, with the file that it left.

    python -m benchmarks.tier_talks --model=smollm2 --output=benchmarks/results/tier_talks_cpu.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from absl import flags

import jdisagg
from benchmarks import entry, report
from benchmarks.machine import described
from benchmarks.tiers import FIRST, tier_settings

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder or name; empty: the embedded one", flag_values=FLAGS)
flags.DEFINE_integer("talks", 8, "conversations", 1, flag_values=FLAGS)
flags.DEFINE_integer("turns", 8, "of each", 2, flag_values=FLAGS)
flags.DEFINE_integer("turn_tokens", 128, "that a turn adds to its prompt", 16, flag_values=FLAGS)
flags.DEFINE_list("tiers", ["none", "dram", "disk", "pool"], "below HBM", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
SETS = 4  # working sets of HBM


@dataclass(frozen=True, slots=True)
class Row:
    """`found`: share of the prompt tokens of every turn but the first; seconds are of these turns, too, and of those
    that found at least half of their prompt, and less."""

    tier: str
    found: float
    ttft_p50_s: float
    ttft_p99_s: float
    found_p50_s: float
    computed_p50_s: float


Asked = tuple[int, int, float]  # prompt tokens, of which found, seconds


def prompts() -> list[list[int]]:
    """Turn by turn, the conversations one after the other."""
    draw = np.random.default_rng(0)
    whole = [draw.integers(10, 1000, FLAGS.turns * FLAGS.turn_tokens).tolist() for _ in range(FLAGS.talks)]
    return [talk[: turn * FLAGS.turn_tokens] for turn in range(1, FLAGS.turns + 1) for talk in whole]


def sizes() -> dict[str, int]:
    longest = FLAGS.turns * FLAGS.turn_tokens
    kv_tokens = max(longest * FLAGS.talks // SETS, longest + 64)
    return {"max_model_len": longest + 32, "max_num_seqs": 1, "kv_tokens": kv_tokens}


def asked(model: dict[str, str], below: dict[str, Any], wanted: Sequence[list[int]]) -> list[Asked]:
    rows = list[Asked]()
    with jdisagg.LLM(mesh="colocated:1xtp1", **model, **sizes(), **below) as llm:
        llm.generate([7] * len(wanted[-1]), FIRST)
        for prompt in wanted:
            began_s = time.perf_counter()
            found = llm.generate(prompt, FIRST).cached_tokens
            rows.append((len(prompt), found, time.perf_counter() - began_s))
    return rows


def row(tier: str, rows: Sequence[Asked]) -> Row:
    seconds = [took_s for _, _, took_s in rows]
    good = [took_s for tokens, found, took_s in rows if found >= tokens / 2]
    rest = [took_s for tokens, found, took_s in rows if found < tokens / 2]
    found = sum(each[1] for each in rows) / sum(each[0] for each in rows)
    middle = [round(statistics.median(each), 4) if each else 0.0 for each in (seconds, good, rest)]
    return Row(tier, round(found, 4), middle[0], round(float(np.percentile(seconds, 99)), 4), middle[1], middle[2])


def measured() -> Iterator[Row]:
    model, wanted = ({"model": FLAGS.model} if FLAGS.model else {}), prompts()
    room = 2 * sum(len(each) for each in wanted[-FLAGS.talks :]) + 4096
    for tier in FLAGS.tiers:
        with ExitStack() as stack:
            below = {} if tier == "none" else stack.enter_context(tier_settings(tier, room))
            yield row(tier, asked(model, below, wanted)[FLAGS.talks :])
            if tier == "disk":
                yield row("disk, restarted", asked(model, below, wanted[-FLAGS.talks :]))


def main() -> int:
    head, rows = described(), list[Row]()
    for each in measured():
        rows.append(each)
        told = f"found {each.found:.0%}, first token {each.ttft_p50_s:.3f} s (p99 {each.ttft_p99_s:.3f})"
        print(f"{each.tier:16} {told}, found {each.found_p50_s:.3f}, computed {each.computed_p50_s:.3f}", flush=True)
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("model", "talks", "turns", "turn_tokens")}
        report.write_json(FLAGS.output, {**head, **about, "rows": [asdict(each) for each in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
