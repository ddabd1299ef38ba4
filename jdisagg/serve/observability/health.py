"""Health of workers and of the event loop: consecutive failures, missing workers, a lost journal, late timers.

A program that fails loses the buffers that it was to write: pages, decode states. Every later plan of that executor may
then fail as well, and its worker would take requests and answer none. So a worker with too many consecutive failures is
declared lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jdisagg.core.events import EngineFailed, Event, StepDone, WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import StepPlan
from jdisagg.serve.observability.metric_families import Families, Fold, Kind

LOST_AFTER = 8  # consecutive failures; more than max_retries, so that one request alone cannot end a worker


@dataclass(slots=True)
class PlanHistory:
    """The plans of one worker and one phase."""

    in_flight: set[int] = field(default_factory=set)
    newest: int = 0  # the plan dispatched last
    excused: int = 0  # plans up to this one were in flight at the last failure and count as part of it
    failed: int = 0  # consecutive failures

    def fail(self, step_id: int) -> None:
        if step_id > self.excused:
            self.failed += 1
            self.excused = self.newest


class HealthMonitor:
    """Counts consecutive failures by worker and phase; a worker that fails in one phase alone is lost as well."""

    def __init__(self, limit: int = LOST_AFTER) -> None:
        self._limit = limit
        self._lanes: dict[tuple[WorkerId, str], PlanHistory] = {}

    def dispatched(self, worker: WorkerId, plan: StepPlan) -> None:
        """Notes a dispatched plan; a mixed step counts as decode."""
        lane = self._lanes.setdefault((worker, "prefill" if plan.decode is None else "decode"), PlanHistory())
        lane.in_flight.add(plan.step_id)
        lane.newest = plan.step_id

    def ended(self, worker: WorkerId, event: Event) -> bool:
        """Records a step's end. Returns True once, when it makes the worker lost."""
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


# Problems that an operator should see while requests are served.

FORGOTTEN_S = 3600.0  # a missing worker is forgotten after this time


class Troubles:
    """Workers that vanished without leaving, and a journal that ended. Read from any thread."""

    def __init__(self, families: Families) -> None:
        self._leaving: set[WorkerId] = set()
        self._missing: dict[WorkerId, float] = {}  # seconds of the driver's clock at which each was lost
        self._journal = ""
        gauge = families.gauge("workers_missing", "Workers that went without leaving, and are not back").of()
        gauge.set_function(lambda: len(self._missing))

    def folds(self) -> Mapping[Kind, Fold]:
        return {WorkerJoined: self._joined, WorkerLeaving: self._left, WorkerLost: self._lost}

    def journal_ended(self) -> None:
        self._journal = "the journal of --record_dir takes no more"

    def told(self, now_s: float) -> list[str]:
        """Returns one line per problem; none if there is no problem."""
        since = [(worker, now_s - at_s) for worker, at_s in [*self._missing.items()]]
        gone = [f"{worker} is gone for {gone_s:.0f} s" for worker, gone_s in since if gone_s < FORGOTTEN_S]
        return gone + ([self._journal] if self._journal else [])

    def _joined(self, actor: str, item: WorkerJoined, now_s: float) -> None:
        self._missing.pop(item.config.worker, None)
        self._leaving.discard(item.config.worker)

    def _left(self, actor: str, item: WorkerLeaving, now_s: float) -> None:
        self._leaving.add(item.worker)

    def _lost(self, actor: str, item: WorkerLost, now_s: float) -> None:
        if item.worker in self._leaving:
            self._leaving.discard(item.worker)
            return
        self._missing = {worker: at_s for worker, at_s in self._missing.items() if now_s - at_s < FORGOTTEN_S}
        self._missing[item.worker] = now_s


# Lag of the event loop: a request that blocks the loop delays all clients.

PERIOD_S = 0.01


async def watch(on_late: Callable[[float], object]) -> None:
    """Calls `on_late` every PERIOD_S seconds with the seconds by which the event loop was late. Never returns."""
    while True:
        due_s = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        on_late(max(0.0, time.monotonic() - due_s))
