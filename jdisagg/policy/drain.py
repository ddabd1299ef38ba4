"""How fast a worker's line of prompts gets shorter, which is not how long one of them takes: prompts share steps, and
steps follow each other before the one before has told its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jdisagg.core.request import WorkerId
from jdisagg.policy.pace import FORGET_S

# Of what was known, with each prompt that is done: those of one step come together, the first with all its time.
KEPT = 0.95


class Done(NamedTuple):
    """Sums that fade, and when they last grew."""

    busy_s: float = 0.0
    tokens: float = 0.0
    at_s: float = -FORGET_S


@dataclass(slots=True)
class Drain:
    """Seconds a prompt token of each worker while it had prompts."""

    _done: dict[WorkerId, Done] = field(default_factory=dict[WorkerId, Done])

    def done(self, worker: WorkerId, tokens: float, began_s: float, now_s: float) -> None:
        """A prompt of so many tokens, begun then, is done now. The time before counts from the one before it."""
        before = self._fresh(worker, now_s)
        busy_s = max(0.0, now_s - max(began_s, before.at_s))
        self._done[worker] = Done(KEPT * before.busy_s + busy_s, KEPT * before.tokens + tokens, now_s)

    def _fresh(self, worker: WorkerId, now_s: float) -> Done:
        known = self._done.get(worker, Done())
        return known if now_s - known.at_s < FORGET_S else Done()

    def of(self, worker: WorkerId, now_s: float) -> float | None:
        """Its own; the others' mean where it has done nothing of late; None where nobody has."""
        own = self._fresh(worker, now_s)
        if own.tokens:
            return own.busy_s / own.tokens
        others = [self._fresh(each, now_s) for each in self._done]
        known = [each.busy_s / each.tokens for each in others if each.tokens]
        return sum(known) / len(known) if known else None

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        self._done.pop(worker, None)
