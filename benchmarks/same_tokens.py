"""Whether a device says what the CPU says: greedy tokens in f32, and the log probability of every prompt token.

    python -m benchmarks.same_tokens [--model=FOLDER] [--output=same_tokens.json]

Each run is a process of its own: the CPU in f32, the device in f32, the device in bf16. In f32 tokens must be those of
the CPU; a log probability may be off by a mean of `BOUND_NATS` of its dtype. With quantised pages
(--launch=kv_dtype=int8) a number between two codes may become either, and bf16's bound is all. Exit code 1 where that
does not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.request import SamplingParams
from jdisagg.llm import LLM

LONGEST_PROMPT = 128  # tokens; of letters alone, too
BOUND_NATS = {"float32": 0.002, "bfloat16": 0.05}
TEXTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "import json\nimport sys\n\n\ndef main(argv):\n    with open(argv[1]) as file:\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for line in sys.stdin:\n    words = line.split()\n    if not words:\n        continue\n    counts",
)
FLAGS = flags.FlagValues()
MODEL = flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
MESH = flags.DEFINE_string("mesh", "prefill:tp1@0,decode:tp1@0", "of every run", flag_values=FLAGS)
PROMPTS = flags.DEFINE_integer("prompts", len(TEXTS), "of the texts", 1, len(TEXTS), flag_values=FLAGS)
TOKENS = flags.DEFINE_integer("tokens", 64, "of each answer", lower_bound=1, flag_values=FLAGS)
LAUNCH = flags.DEFINE_list("launch", [], "more of every run, as speculative=ngram:3", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
SAY = flags.DEFINE_string("say", "", "PLATFORM/DTYPE: only print what this one says", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Said:
    """By one platform: of each prompt the tokens that follow, and its own tokens' log probabilities."""

    device: str
    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A device beside the CPU in f32."""

    device: str
    dtype: str
    same_tokens: float  # share, up to each answer's first other one
    mean_nats: float  # by which a prompt token's log probability is off
    worst_nats: float
    holds: bool


def say(platform: str, dtype: str) -> Said:
    settings: dict[str, Any] = {"model": MODEL.value} if MODEL.value else {}
    settings |= dict(each.split("=", 1) for each in LAUNCH.value)
    longest = LONGEST_PROMPT + TOKENS.value
    sizes = {"max_model_len": longest, "max_num_seqs": PROMPTS.value, "max_num_batched_tokens": longest}
    with LLM(mesh=MESH.value, platform=platform, dtype=dtype, **sizes, **settings) as llm:
        asked = SamplingParams(max_tokens=TOKENS.value, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        done = llm.generate_all(TEXTS[: PROMPTS.value], asked)
    logprobs = [[each.logprob or 0.0 for each in answer.prompt_logprobs or ()] for answer in done]
    return Said(platform, [list(answer.token_ids) for answer in done], logprobs)


def compared(ours: Said, theirs: Said, dtype: str, *, quantised: bool = False) -> Compared:
    """`ours` of a device in `dtype`, `theirs` of the CPU in f32; `quantised`: pages of both."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
    same = sum(alike(one, other) for one, other in pairs) / sum(len(other) for _, other in pairs)
    off = [
        abs(one - other)
        for mine, its in zip(ours.logprobs, theirs.logprobs, strict=True)
        for one, other in zip(mine, its, strict=True)
    ]
    mean = sum(off) / len(off)
    exact = dtype == "float32" and not quantised
    holds = mean <= BOUND_NATS["float32" if exact else "bfloat16"] and (same == 1 or not exact)
    return Compared(ours.device, dtype, same, mean, max(off), holds)


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    differ = [at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its]
    return differ[0] if differ else min(len(one), len(other))


def heard(platform: str, dtype: str) -> Said:
    """What a process of its own says. Raises ValueError with its last words."""
    command = [sys.executable, "-m", "benchmarks.same_tokens", f"--say={platform}/{dtype}", f"--model={MODEL.value}"]
    command += [f"--mesh={MESH.value}", f"--prompts={PROMPTS.value}", f"--tokens={TOKENS.value}"]
    command += [f"--launch={','.join(LAUNCH.value)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{platform} in {dtype} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return Said(**json.loads(done.stdout.splitlines()[-1]))


def text_of(each: Compared) -> str:
    return (
        f"{each.device} in {each.dtype}: {each.same_tokens:.1%} of the CPU's tokens (f32), log probabilities off by"
        f" {each.mean_nats:.2g} nats (worst {each.worst_nats:.2g}): {'holds' if each.holds else 'DOES NOT HOLD'}"
    )


def main() -> int:
    if SAY.value:
        print(json.dumps(asdict(say(*SAY.value.split("/")))))
        return 0
    theirs = heard("cpu", "float32")
    quantised = any(each.startswith("kv_dtype=") for each in LAUNCH.value)
    found = [compared(heard("auto", dtype), theirs, dtype, quantised=quantised) for dtype in BOUND_NATS]
    print("\n".join(map(text_of, found)))
    if OUTPUT.value:
        record: Mapping[str, object] = {"launch": LAUNCH.value, "compared": [asdict(each) for each in found]}
        Path(OUTPUT.value).write_text(json.dumps(described() | record, indent=1) + "\n")
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
