"""Steps of a worker that chooses drafts, from their dispatch to their end."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.request import Attempt
from jdisagg.core.steps import StepPlan

TICK_S = 1e-9  # that a step takes at least: a clock may stand still meanwhile, as an explored one does


@dataclass(slots=True)
class Dispatched:
    """A step in flight."""

    began_s: float
    drafts: int  # tokens of each
    turns: int  # of one that verifies none: tokens of each row
    beside_turns: bool  # whether without drafts it takes, or would take, several of them
    table_pages: int
    stake: float  # plain steps, taken from the account for it
    alone: bool  # its end says how long its rows take
    more: float  # tokens beyond the first that its rows were thought to draw of drafts, in the mean
    reads: bool = False  # beside its rows
    unguessed: frozenset[Attempt] = frozenset()  # whose rows had no guess of the model's, which was still to read them


class StepsInFlight:
    """Steps that were dispatched, and how long they take: each runs behind the one before it."""

    def __init__(self) -> None:
        self._running: dict[int, Dispatched] = {}
        self._last_done_s, self._disturbed = 0.0, False
        self.took = 0.0  # plain steps, of the one that ended last; 0: it verified no drafts

    def alone(self, plan: StepPlan) -> bool:
        """Whether the next one's end says how long rows take."""
        before, self._disturbed = self._disturbed, plan.prefill is not None
        return not (before or self._disturbed or (plan.decode is not None and plan.decode.gates))

    def began(self, step_id: int, step: Dispatched) -> None:
        self._running[step_id] = step

    def failed(self, step_id: int) -> None:
        del self._running[step_id]

    def ended(self, step_id: int, now_s: float) -> tuple[Dispatched, float]:
        """And its seconds."""
        step = self._running.pop(step_id)
        seconds = max(TICK_S, now_s - max(step.began_s, self._last_done_s))
        self._last_done_s, self.took = now_s, 0.0
        return step, seconds
