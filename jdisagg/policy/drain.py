"""Seconds per prompt token of each worker's prefill queue.

A queue takes less than its prompts would one by one: prompts share steps, and a step starts before the one before it
has reported its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jdisagg.core.request import WorkerId
from jdisagg.policy.pace import FORGET_S, RecentMeans

# Weight of earlier prompts, with each prompt that is done: the prompts of one step end together, and the first of them
# has all of its time.
KEPT = 0.95


class BusySums(NamedTuple):
    """Decayed sums of busy seconds and prompt tokens, and the time of the latest prompt."""

    busy_s: float = 0.0
    tokens: float = 0.0
    at_s: float = -FORGET_S


@dataclass(slots=True)
class Drain:
    """Seconds per prompt token of each worker while it had prompts."""

    token_s: RecentMeans = field(default_factory=RecentMeans)
    _sums: dict[WorkerId, BusySums] = field(default_factory=dict[WorkerId, BusySums])

    def done(self, worker: WorkerId, tokens: float, began_s: float, now_s: float) -> None:
        """Learns from a prompt that ends now. It counts from its beginning, or from the end of the prompt before."""
        before = self._sums.get(worker, BusySums())
        if now_s - before.at_s >= FORGET_S:
            before = BusySums()
        busy_s = max(0.0, now_s - max(began_s, before.at_s))
        sums = BusySums(KEPT * before.busy_s + busy_s, KEPT * before.tokens + tokens, now_s)
        self._sums[worker] = sums
        if sums.tokens:
            self.token_s.replace(worker, sums.busy_s / sums.tokens, now_s)

    def of(self, worker: WorkerId, now_s: float) -> float | None:
        """Returns the worker's own value, else the mean of the others; None if nothing is known."""
        return self.token_s.guess(worker, now_s)

    def forget(self, worker: WorkerId) -> None:
        """Removes what is known of the worker."""
        self._sums.pop(worker, None)
        self.token_s.forget(worker)
