"""Times of the last steps of this process's workers, from dispatch until the results were read.

Written on the driver's thread, read from any other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from jdisagg.core.steps import StepPlan

KEPT = 4096  # ended steps, and at most as many that have not ended


@dataclass(frozen=True, slots=True)
class RanStep:
    """One step of a worker. Steps overlap, because the next one is dispatched before the first is read."""

    worker: str
    step_id: int
    began_s: float
    ended_s: float
    chunk_tokens: int
    rows: int
    microbatch: int | None  # of its decode rows; None without any


class StepLog:
    """The last steps, oldest first."""

    def __init__(self, limit: int = KEPT) -> None:
        self._open: OrderedDict[tuple[str, int], tuple[float, int, int, int | None]] = OrderedDict()
        self._done: deque[RanStep] = deque(maxlen=limit)
        self._limit = limit

    def began(self, worker: str, plan: StepPlan, now_s: float) -> None:
        tokens = plan.prefill.num_tokens if plan.prefill else 0
        rows, microbatch = (len(plan.decode.active), plan.decode.microbatch) if plan.decode else (0, None)
        self._open[worker, plan.step_id] = (now_s, tokens, rows, microbatch)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)

    def ended(self, worker: str, step_id: int | None, now_s: float) -> None:
        found = self._open.pop((worker, step_id), None) if step_id is not None else None
        if found is not None:
            began_s, tokens, rows, microbatch = found
            self._done.append(RanStep(worker, step_id or 0, began_s, now_s, tokens, rows, microbatch))

    def since(self, at_s: float) -> list[RanStep]:
        """Returns the steps that ended at `at_s` or later."""
        return [step for step in list(self._done) if step.ended_s >= at_s]
