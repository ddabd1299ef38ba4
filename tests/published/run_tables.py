"""Costs from measured runs of whole models (Splitwise, ISCA 2024): prompts by their tokens, steps by batch and context.

The runs vary the batch at 512 prompt tokens, and the prompt at a batch of 1: not both at once. So a step is that of its
batch, and what its context has over those 512 tokens a sequence is charged by the slope found at a batch of 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cost_models import Model
from jdisagg.sim.kernel_tables import MeasuredTable

SPLITWISE = Path(__file__).parent / "data" / "splitwise_dgx.json"
PROMPT, OUTPUT = 512, 128  # tokens of the runs that vary the batch; a step's context is the mean over the output


@dataclass(frozen=True, slots=True)
class RunTables:
    """One machine of eight devices and one model."""

    model: Model
    prompts: MeasuredTable  # (tokens), of all prompts of a plan together
    steps: MeasuredTable  # (sequences), each with PROMPT tokens and half its OUTPUT
    token_s: float  # of each KV token read beyond those

    def prefill_s(self, plan: PrefillChunks) -> float:
        return self.prompts.at(plan.num_tokens) + self._seen_s(plan)

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        batch = len(plan.active)
        return self.steps.at(batch) + self.token_s * (context_tokens - batch * (PROMPT + OUTPUT // 2))

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        """The prompts' step with as many rows more as sequences decode, and the KV that these read."""
        rows = prefill.num_tokens + len(decode.active)
        return self.prompts.at(rows) + self._seen_s(prefill) + self.token_s * context_tokens

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.model.part_bytes(transfer)

    def _seen_s(self, plan: PrefillChunks) -> float:
        """What chunks take longer because of the tokens before them."""
        starts = [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks if chunk.start]
        at = self.prompts.at
        return sum(max(0.0, at(start + tokens) - at(start) - at(tokens)) for start, tokens in starts)


def splitwise(name: str, device: str) -> RunTables:
    """bloom-176b or llama2-70b on eight a100 or h100. Raises ConfigError for others."""
    machines = _published().get(name)
    if machines is None or device not in machines:
        there = ", ".join(f"{each} on {machine}" for each, rows in _published().items() for machine in rows)
        raise ConfigError(f"no measured runs of {name!r} on {device!r}; there are {there}")
    rows = [(prompt, batch, prompt_ms / 1e3, step_ms / 1e3) for prompt, batch, prompt_ms, step_ms in machines[device]]
    alone = {prompt: (prompt_s, step_s) for prompt, batch, prompt_s, step_s in rows if batch == 1}
    together = {batch: (prompt_s, step_s) for prompt, batch, prompt_s, step_s in rows if prompt == PROMPT}
    tokens_of = {tokens: seconds for tokens, (seconds, _) in alone.items()}
    beyond = {PROMPT * batch: seconds for batch, (seconds, _) in together.items() if PROMPT * batch > max(alone)}
    slope, _ = np.polyfit([prompt + OUTPUT / 2 for prompt in alone], [step_s for _, step_s in alone.values()], 1)
    return RunTables(
        Model(model(name), "float16"),
        prompts=MeasuredTable({(float(tokens),): seconds for tokens, seconds in {**tokens_of, **beyond}.items()}),
        steps=MeasuredTable({(float(batch),): step_s for batch, (_, step_s) in together.items()}),
        token_s=float(slope),
    )


@cache
def _published() -> dict[str, dict[str, list[tuple[int, int, float, float]]]]:
    return json.loads(SPLITWISE.read_text(encoding="utf-8"))
