"""Virtual time: the very router and workers that serve, a queue of what is to happen, and clients that ask.

How long anything takes is said by who inherits from here. No tokens are computed: a prompt is a length, a drawn token
is always the same, and every output ends by its max_tokens. Equal inputs give equal outcomes, event for event: nothing
here draws lots. Pages have names where the trace has, and workers that keep pages find them again.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    Event,
    Finish,
    InsertKV,
    OpenGates,
    Received,
    Reject,
    Reshape,
    Reshaped,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    Submit,
    TimerFired,
    WorkerStands,
)
from jdisagg.core.interpreter import interpret
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.tiers import DropPages, InsertPages, MovePages
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.router import CAPACITY_TIMER, Router
from jdisagg.policy.worker import Worker
from jdisagg.sim.event_queue import EventQueue
from jdisagg.sim.requests import Requests
from jdisagg.sim.traces import Trace


class Simulation:
    """Runs the actors. Messages take `message_s`; steps and transfers what the class that inherits says."""

    def __init__(self, workers: Sequence[WorkerConfig], router: RouterConfig, message_s: float) -> None:
        self.router = Router(router, workers)
        self.workers = {config.worker: Worker(config) for config in workers}
        self.message_s, self.now_s, self.events = message_s, 0.0, 0
        self.requests, self._queue = Requests(), EventQueue()

    def _catch_up_all(self, at_s: float) -> bool:
        """What ended by `at_s` without an event of its own is told now; whether there was anything."""
        return False

    # ------------------------------------------------------------ running

    def _run(self, trace: Trace, until_s: float = math.inf, clients: int = 0, think_s: float = 0.0) -> None:
        """Until all requests have ended and nothing is left to happen, or until `until_s`."""
        caches = any(worker.config.prefix_caching for worker in self.workers.values())
        self.requests.begin(trace if caches else trace.unnamed(), clients > 0, think_s)
        for _ in range(max(1, clients)):
            self._next_arrival()
        with _no_collection():
            while self._run_until(until_s) or self._catch_up_all(until_s):
                continue

    def _run_until(self, until_s: float) -> bool:
        """Whatever happens until then; False where nothing does."""
        happened = False
        while (found := self._queue.pop(until_s, self._all_over)) is not None:
            self.now_s, actor, event = found
            self._take(actor, event)
            happened = True
        return happened

    def _all_over(self) -> bool:
        return not self.router.rows and all(worker.idle for worker in self.workers.values())

    def _take(self, actor: WorkerId, event: Any) -> None:
        kind = type(event)
        if kind is TimerFired:
            if not self._queue.is_armed(self.now_s, actor, event.key):
                return  # moved since
            if actor == ROUTER and event.key != CAPACITY_TIMER and self._catch_up_all(self.now_s - self.message_s):
                self._at(self.now_s, actor, event)  # whether a token is late depends on all that were told before
                return
            self._queue.disarm(actor, event.key)
        elif kind is Submit and not self.requests.closed:
            self._next_arrival()
        self._deliver(actor, event)

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        self.events += 1
        for effect in (self.router if actor == ROUTER else self.workers[actor]).handle(event, self.now_s):
            interpret(actor, effect, self)

    def _at(self, at_s: float, actor: WorkerId, event: Any) -> None:
        self._queue.push(at_s, actor, event)

    def _next_arrival(self, after_s: float = 0.0) -> None:
        """Only the next request is in the queue, however long the trace."""
        request = self.requests.next(self.now_s + after_s)
        if request is not None:
            self._at(request.arrival_s, ROUTER, Submit(request))

    # ------------------------------------------------------------ effects

    def send(self, actor: WorkerId, effect: Send) -> None:
        self._at(self.now_s + self.message_s, effect.to, Received(actor, effect.message))

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self._queue.set_timer(effect.at_s, actor, effect.key)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        raise NotImplementedError

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        raise NotImplementedError

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        """A write into pages takes no time, beside the way there."""

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        """It takes no time and holds nothing."""

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        """Only where steps wait at gates."""

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        raise AssertionError("simulated workers have no tiers below HBM")

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        """A write into pages takes no time, beside the way there."""

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        """It takes no time and holds nothing."""

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.requests.emit(effect, self.now_s)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self._end(effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self._end(effect)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Only who inherits from here knows what a change of role costs: here it is done at once."""
        self._at(self.now_s, actor, Reshaped(effect.config))

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        """It is for people."""

    def _end(self, effect: Finish | Reject) -> None:
        self.requests.end(effect, self.now_s)
        if self.requests.closed:
            self._next_arrival(self.requests.think_s)

    def check_all_ended(self) -> None:
        """Asserts that each request ended once, and that every page is back."""
        assert not self.router.rows, f"still running: {sorted(self.router.rows)[:5]}"
        self.requests.check_all_ended()
        for name, worker in self.workers.items():
            held = worker.config.num_pages - worker.shared.available
            assert worker.idle and held == 0, f"{name} holds {held} pages"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A simulation makes much that lasts and nothing that goes round: to look for cycles takes time and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
