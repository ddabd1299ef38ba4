"""The live driver of one process: it runs actors with the real clock and real executors, and decides nothing itself.

One *driver thread* owns the actors: it takes an event from the inbox, passes it to its actor, and carries out the
effects in order. Executors (`executors.py`) return before their devices are done; *reader threads* wait for results and
post them as events. So the driver thread never waits for a device, and the devices always have the next step queued.
Outcomes for clients are delivered once per event, however many tokens there are.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    EngineFailed,
    Event,
    Finish,
    InsertKV,
    KVArrived,
    OpenGates,
    Outcome,
    Received,
    Reject,
    Reshape,
    Reshaped,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    TimerFired,
    WorkerLost,
    WorkerStands,
)
from jdisagg.core.interpreter import interpret
from jdisagg.core.request import RequestId, WorkerId
from jdisagg.core.tiers import DropPages, InsertPages, MovePages
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.executor import Executor, Shipment
from jdisagg.serve.driver.executors import Executors, Inward, Landed, RemoteWorkers
from jdisagg.serve.driver.kv_moves import NO_STORES, PagesRead, WorkerStores
from jdisagg.serve.driver.role_change import Reshaper
from jdisagg.serve.observability.health import HealthMonitor

# Timers of the actors.


class Timers:
    """Timers of actors, one per actor and key, in seconds of the driver's clock. Used by one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, WorkerId, str]] = []
        self._armed: dict[tuple[WorkerId, str], float] = {}

    def set(self, at_s: float, actor: WorkerId, key: str) -> None:
        self._armed[actor, key] = at_s
        heapq.heappush(self._heap, (at_s, actor, key))

    def wait_s(self, now_s: float) -> float | None:
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None

    def due(self, now_s: float) -> Iterator[tuple[WorkerId, str]]:
        """Yields the timers due by `now_s`, earliest first; not those that are reset during the iteration."""
        while self._heap and self._heap[0][0] <= now_s:
            at_s, actor, key = heapq.heappop(self._heap)
            if self._armed.get((actor, key)) == at_s:
                del self._armed[actor, key]
                yield actor, key


# Effects of the actors, carried out on the driver thread without blocking it.

log = logging.getLogger("jdisagg.driver")


class ReshapingDriver(Protocol):
    """The part of a driver that changes of executors use."""

    executors: Executors

    def post(self, actor: WorkerId, item: Reshaped) -> None: ...

    def call(self, act: Callable[[], None]) -> None: ...

    def give_up(self, worker: WorkerId) -> None: ...


class Reshaping:
    """Rebuilds executors for role changes, each on a thread of its own."""

    def __init__(
        self, driver: ReshapingDriver, reshaper: Reshaper | None, stood: Callable[[WorkerStands], None]
    ) -> None:
        self._driver, self._reshaper, self.stood = driver, reshaper, stood

    def begin(self, worker: WorkerId, config: WorkerConfig) -> None:
        if self._reshaper is None:
            machine = self._driver.executors.by_worker[worker]
            why = "" if config == machine.config else "machines cannot be made anew here"
            self._driver.post(worker, Reshaped(machine.config, why))
            return
        args = (self._reshaper, worker, config)
        threading.Thread(target=self._run, args=args, name=f"reshape-{worker}", daemon=True).start()

    def _run(self, reshaper: Reshaper, worker: WorkerId, config: WorkerConfig) -> None:
        """Rebuilds one executor. A worker whose executor can be neither rebuilt nor restored is lost."""
        try:
            config, why = reshaper.reshape(worker, config, self._driver.call)
            self._driver.post(worker, Reshaped(config, why))
        except Exception:
            log.exception("%s is lost: its machine could not be made anew", worker)
            self._driver.give_up(worker)


class LiveEffects:
    """Carries out effects; messages for local actors and outcomes for clients wait until the driver takes them."""

    def __init__(
        self,
        here: Container[WorkerId],
        executors: Executors,
        health: HealthMonitor,
        remote: RemoteWorkers | None,
        reshaping: Reshaping,
    ) -> None:
        """`here` has the actors of this process; messages for others go to `remote`."""
        self.mail: deque[tuple[WorkerId, Event]] = deque()
        self.outcomes: list[tuple[RequestId, Outcome]] = []
        self.timers = Timers()
        self._here, self._executors, self._health, self._remote = here, executors, health, remote
        self._reshaping = reshaping

    def send(self, actor: WorkerId, effect: Send) -> None:
        if effect.to in self._here:
            self.mail.append((effect.to, Received(actor, effect.message)))
            return
        assert self._remote is not None, f"{effect.to} is not here"
        self._remote.send(actor, effect.to, effect.message)

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self.timers.set(effect.at_s, actor, effect.key)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        self._health.dispatched(actor, effect.plan)
        self._executors.run(actor, effect)

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._executors.ship(actor, effect.transfer)

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        self._executors.insert(actor, effect.transfer)

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        self._executors.drop(actor, effect.transfer)

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        self._executors.by_worker[actor].open_gates(effect.attempt)

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        self._executors.tiers.begin(actor, effect.move)

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        self._executors.insert_pages(actor, effect.move)

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        self._executors.tiers.drop(actor, effect.move)

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.outcomes.append((effect.request_id, effect))

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self.outcomes.append((effect.request_id, effect))

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self.outcomes.append((effect.request_id, effect))

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        self._reshaping.begin(actor, effect.config)

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        self._reshaping.stood(effect)


Observer = Callable[[WorkerId, Any, float], None]  # (actor, event or effect, now_s)


@dataclass(frozen=True, slots=True)
class Called:
    """A call that another thread queues for the driver's thread, the only one that uses the executors."""

    act: Callable[[], None]
    done: threading.Event


class Actor(Protocol):
    """A router, a worker or a front: it turns one event into effects."""

    def handle(self, event: Any, now_s: float) -> Sequence[Any]: ...


class LiveDriver:
    """Runs `router` and `workers` over `machines` until stopped.

    Public methods are safe from any thread, unless they say otherwise.
    """

    def __init__(
        self,
        router: Actor | None,
        workers: Mapping[WorkerId, Actor],
        machines: Mapping[WorkerId, Executor],
        *,
        deliver: Callable[[list[tuple[RequestId, Outcome]]], None],
        died: Callable[[BaseException], None],
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        remote: RemoteWorkers | None = None,
        reshaper: Reshaper | None = None,
        stood: Callable[[WorkerStands], None] = lambda effect: None,
        stores: Mapping[WorkerId, WorkerStores] = NO_STORES,
    ) -> None:
        """`deliver` is called with outcomes for clients, once per event; `died` with the error that ended the loop.

        Messages for actors of other processes go to `remote`; the router is one of them if `router` is None. `reshaper`
        rebuilds executors for role changes. `stood` is called with the status of such a change. All of them but
        `reshaper` are called on the driver's thread.
        """
        self.actors: dict[WorkerId, Actor] = ({} if router is None else {ROUTER: router}) | dict(workers)
        self._remote = remote
        self.executors = Executors(machines, self, clock, remote, stores)
        self._deliver, self._died, self._observers, self.now_s = deliver, died, observers, clock
        self._inbox: queue.SimpleQueue[tuple[WorkerId, Inward] | Called | None] = queue.SimpleQueue()
        self._broken: deque[tuple[WorkerId, Event]] = deque()  # immediate failures, handled before any further plan
        self._health = HealthMonitor()
        reshaping = Reshaping(self, reshaper, stood)
        self._effects = LiveEffects(self.actors, self.executors, self._health, remote, reshaping)
        self._round = self._effects.mail  # handled to its end before any event from outside
        self._lost: set[WorkerId] = set()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, actor: WorkerId, item: Inward) -> None:
        self._inbox.put((actor, item))

    def fail(self, actor: WorkerId, event: EngineFailed) -> None:
        """Queues an immediate failure ahead of any further plan. Called on the driver thread."""
        self._broken.append((actor, event))

    def land(self, shipment: Shipment, event: KVArrived) -> None:
        """Posts a part from another process that is on the devices of its destination, a worker of this process."""
        self.post(event.transfer.destination, Landed(shipment, event))

    def call(self, act: Callable[[], None]) -> None:
        """Runs `act` on the driver's thread between two rounds and waits for its end. Raises what `act` raises."""
        failed: list[BaseException] = []

        def caught() -> None:
            try:
                act()
            except Exception as error:
                failed.append(error)

        called = Called(caught, threading.Event())
        self._inbox.put(called)
        while not called.done.wait(0.5):
            if not self.alive:
                raise RuntimeError("the driver has stopped")
        if failed:
            raise failed[0]

    def give_up(self, worker: WorkerId) -> None:
        """Declares the worker lost and waits until it is. Safe from any thread but the driver's."""
        self.call(lambda: self.lose(worker))

    def stop(self) -> None:
        """Ends the threads. Steps in flight finish on the devices, and their results are not read."""
        self._inbox.put(None)
        self._thread.join(timeout=10)
        self.executors.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def able(self) -> bool:
        """True if every phase has a worker that is not lost."""
        roles = [
            machine.config.role for worker, machine in self.executors.by_worker.items() if worker not in self._lost
        ]
        return any(role.prefills for role in roles) and any(role.decodes for role in roles)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while self._one_round():
                continue
        except BaseException as error:
            log.exception("the driver thread ends: an actor or a machine raised")
            self._died(error)

    def _one_round(self) -> bool:
        """Waits for one event and handles it, with all events that it causes here. Returns False when stopped."""
        try:
            item = self._inbox.get(timeout=self._effects.timers.wait_s(self.now_s()))
        except queue.Empty:
            item = (ROUTER, None)
        if item is None:
            return False
        if isinstance(item, Called):
            item.act()
            item.done.set()
        elif item[1] is not None:
            self._take(*item)
        for timed, key in self._effects.timers.due(self.now_s()):
            self._round.append((timed, TimerFired(key)))
            self._settle()  # one by one: after a pause of this thread, a lease is renewed before its expiry is checked
        self._settle()
        return True

    def _take(self, actor: WorkerId, item: Inward) -> None:
        if isinstance(item, PagesRead):
            event = self.executors.tiers.landed(actor, item)
        else:
            event = self.executors.landed(actor, item) if isinstance(item, Landed) else item
        if event is not None:
            self._round.append((actor, event))

    def _settle(self) -> None:
        while waiting := self._broken or self._round:
            actor, event = waiting.popleft()
            now_s = self.now_s()
            self._observe(actor, event, now_s)
            if isinstance(event, EngineFailed):
                self.executors.note_failure(actor, event)
            for effect in self._decide(actor, event, now_s):
                self._observe(actor, effect, now_s)
                interpret(actor, effect, self._effects)
            if self._health.ended(actor, event):
                self.lose(actor)
        if self._effects.outcomes:
            outcomes, self._effects.outcomes = self._effects.outcomes, []
            self._deliver(outcomes)

    def _decide(self, actor: WorkerId, event: Event, now_s: float) -> Sequence[Any]:
        """Returns the actor's effects. If a message of another process raises, the session with its sender ends."""
        try:
            return self.actors[actor].handle(event, now_s)
        except Exception as error:
            if self._remote is None or not isinstance(event, Received) or event.sender in self.actors:
                raise
            if not isinstance(error, SenselessWord):
                log.exception("%s cannot follow what %s says", actor, event.sender)
            self._remote.end_session(event.sender, f"{type(error).__name__}: {error}")
            return ()

    def lose(self, worker: WorkerId) -> None:
        """Declares the worker lost and tells the router. Called on the driver thread."""
        log.error(
            "%s is lost: its plans fail again and again, or its machine could not be made anew, or filled", worker
        )
        self._lost.add(worker)
        if ROUTER in self.actors:
            self._round.append((ROUTER, WorkerLost(worker)))
        else:
            assert self._remote is not None, "the router is not here"
            self._remote.give_up(worker)

    def _observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        for observer in self._observers:
            observer(actor, item, now_s)
