"""Health of workers: failures in a row, counted plan by plan, so that the router learns that a worker is lost.

A program that fails takes with it what it was to write: pages, decode states. Where that was all it had, every later
plan of that machine fails as well, and its worker would take requests for ever and answer none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.events import EngineFailed, Event, StepDone
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import StepPlan

LOST_AFTER = 8  # tries that failed in a row; over max_retries, so that one request alone cannot end a worker


@dataclass(slots=True)
class PlanHistory:
    """One worker's plans of one phase."""

    in_flight: set[int] = field(default_factory=set)
    newest: int = 0  # the plan dispatched last
    excused: int = 0  # plans up to this one were under way when the last failure was heard of: they are part of it
    failed: int = 0  # tries in a row

    def fail(self, step_id: int) -> None:
        if step_id > self.excused:
            self.failed += 1
            self.excused = self.newest


class HealthMonitor:
    """Failures in a row, by worker and phase: a worker that prefills well and fails at every step is lost as well."""

    def __init__(self, limit: int = LOST_AFTER) -> None:
        self._limit = limit
        self._lanes: dict[tuple[WorkerId, str], PlanHistory] = {}

    def dispatched(self, worker: WorkerId, plan: StepPlan) -> None:
        """A mixed step counts for decode."""
        lane = self._lanes.setdefault((worker, "prefill" if plan.decode is None else "decode"), PlanHistory())
        lane.in_flight.add(plan.step_id)
        lane.newest = plan.step_id

    def ended(self, worker: WorkerId, event: Event) -> bool:
        """Records a step's end; True once, when the worker is lost by it."""
        if not isinstance(event, StepDone | EngineFailed):
            return False
        lane = self._lane_of(worker, event.step_id)
        if lane is None:
            return False
        before = lane.failed
        if isinstance(event, EngineFailed):
            lane.fail(event.step_id or 0)
        else:
            lane.failed = 0
        return before < self._limit == lane.failed

    def _lane_of(self, worker: WorkerId, step_id: int | None) -> PlanHistory | None:
        for (owner, _), lane in self._lanes.items():
            if owner == worker and step_id in lane.in_flight:
                lane.in_flight.discard(step_id)
                return lane
        return None
