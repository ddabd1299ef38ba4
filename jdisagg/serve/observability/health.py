"""Health of workers: failures in a row, counted plan by plan, so that the router learns that a worker is lost.

A program that fails takes with it what it was to write: pages, decode states. Where that was all it had, every later
plan of that machine fails as well, and its worker would take requests for ever and answer none.
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


# What an operator should know while requests are served: workers that went without a word, a journal that ended.

FORGOTTEN_S = 3600.0  # a worker that has not come back by then is not expected any more


class Troubles:
    """A fold of what the router was told; written on the driver's thread, read from anywhere."""

    def __init__(self, families: Families) -> None:
        self._leaving: set[WorkerId] = set()
        self._missing: dict[WorkerId, float] = {}  # since when, by the driver's clock
        self._journal = ""
        gauge = families.gauge("workers_missing", "Workers that went without leaving, and are not back").of()
        gauge.set_function(lambda: len(self._missing))

    def folds(self) -> Mapping[Kind, Fold]:
        return {WorkerJoined: self._joined, WorkerLeaving: self._left, WorkerLost: self._lost}

    def journal_ended(self) -> None:
        self._journal = "the journal of --record_dir takes no more"

    def told(self, now_s: float) -> list[str]:
        """One line for each, none where all is well."""
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


# How late the event loop is: what somebody's request holds up shows here first, for everybody.

PERIOD_S = 0.01


async def watch(on_late: Callable[[float], object]) -> None:
    """Calls `on_late` for ever, every PERIOD_S, with how many seconds the loop, or the interpreter, was held up."""
    while True:
        due_s = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        on_late(max(0.0, time.monotonic() - due_s))
