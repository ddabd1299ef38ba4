"""One worker's devices in virtual time: plans in order through its stages, and the tokens that its slots hold."""

from __future__ import annotations

from typing import NamedTuple

from jdisagg.core.plans import DecodePlan
from jdisagg.core.worker_config import WorkerConfig


class Span(NamedTuple):
    """Seconds of the virtual clock."""

    start_s: float
    done_s: float


class Device:
    """A pipeline of equal stages, as many as microbatches. A stage takes plans in the order of their dispatch."""

    def __init__(self, config: WorkerConfig) -> None:
        self.free_s = [0.0] * config.num_microbatches  # when each stage is through with what it has
        self.busy_s = 0.0  # of the first stage
        self._turn_done_s = [0.0] * config.num_microbatches
        self._held: dict[int, int] = {}  # KV tokens by slot

    def run(self, now_s: float, seconds: float) -> Span:
        """A plan that takes `seconds` through all stages together."""
        stage_s = seconds / len(self.free_s)
        start_s = at_s = max(now_s, self.free_s[0])
        for stage, free_s in enumerate(self.free_s):
            at_s = self.free_s[stage] = max(at_s, free_s) + stage_s
        self.busy_s += stage_s
        return Span(start_s, at_s)

    def run_turn(self, now_s: float, microbatch: int, seconds: float) -> Span:
        """A decode turn: its microbatch's turn before must have drawn the tokens that it feeds."""
        span = self.run(max(now_s, self._turn_done_s[microbatch]), seconds)
        self._turn_done_s[microbatch] = span.done_s
        return span

    def read_tokens(self, plan: DecodePlan) -> int:
        """KV tokens that the turn reads, those that it writes included; books its admissions and its own tokens."""
        held = self._held
        for slot in plan.retire:
            held.pop(slot, None)
        for admission in plan.admit:
            held[admission.slot] = admission.position
        total = 0
        for slot in plan.active:
            tokens = held[slot] = held[slot] + 1
            total += tokens
        return total
