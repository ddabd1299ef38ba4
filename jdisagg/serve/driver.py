"""The live driver of one process: real clock, in-process messages, real machines. It decides nothing.

One *driver thread* owns the actors: it takes an event from the inbox, hands it to its actor, and carries out the
effects in order. Executors return before their devices are done; *reader threads* (one a machine and phase) block on
results and post them back as events, so the driver thread is never behind a device, and the devices always have the
next step queued. Tokens go to their request's listener, which is told once an event, however many tokens there are.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    Received,
    Reject,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    TimerFired,
    WorkerLost,
)
from jdisagg.core.messages import Message
from jdisagg.core.request import RequestId, WorkerId
from jdisagg.core.steps import KVTransfer, last_layer
from jdisagg.engine.executor import Executor, PendingStep, Shipment
from jdisagg.serve.health_monitor import HealthMonitor
from jdisagg.serve.timers import Timers

log = logging.getLogger("jdisagg.driver")

Outcome = EmitTokens | Finish | Reject
Observer = Callable[[WorkerId, Any, float], None]  # (actor, event or effect, now_s)


@dataclass(frozen=True, slots=True)
class Landed:
    """A shipment on its destination's devices, and the event that says so."""

    shipment: Shipment
    event: KVArrived
    checked: bool = False


class Actor(Protocol):
    def handle(self, event: Any, now_s: float) -> Sequence[Any]: ...


class Readers:
    """Threads that wait for devices, one a lane; results of a lane come in the order they were asked for."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []

    def read(self, lane: str, wait: Callable[[], None]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._lanes[lane],), name=f"read-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._lanes[lane].put(wait)

    def end(self, lane: str) -> None:
        """Nobody reads there any more: its thread ends behind what it was asked for."""
        ending = self._lanes.pop(lane, None)
        if ending is not None:
            ending.put(None)
            self._threads = [thread for thread in self._threads if thread.is_alive()]

    @staticmethod
    def _run(lane: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (wait := lane.get()) is not None:
            wait()
            del wait  # it may hold KV that has been inserted

    def stop(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout=5)


class RemoteWorkers(Protocol):
    """Where the actors of other processes are reached. Called on the driver thread; returns at once."""

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None: ...

    def ship(self, machine: Executor, transfer: KVTransfer) -> Shipment:
        """Packs, and offers what was packed; the other process calls `land`. Raises where there is no way there."""
        ...

    def give_up(self, worker: WorkerId) -> None:
        """The router is to know that a worker of this process is of no more use."""
        ...

    def end_session(self, peer: WorkerId, why: str) -> None:
        """The peer said what makes no sense: everything with its process is over."""
        ...


class LiveDriver:
    """Runs `router` and `workers` over `machines` until stopped. Public methods are safe from any thread."""

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
    ) -> None:
        """`deliver` takes the outcomes for clients, once an event; `died` why the loop ended; both on its thread.

        Whatever is for an actor that is not here, the router too where it is None, goes by way of `remote`.
        """
        self.actors: dict[WorkerId, Actor] = ({} if router is None else {ROUTER: router}) | dict(workers)
        self._machines, self._remote = machines, remote
        self._deliver, self._died, self._observers, self.now_s = deliver, died, observers, clock
        self._inbox: queue.SimpleQueue[tuple[WorkerId, Event | Landed] | None] = queue.SimpleQueue()
        self._round: deque[tuple[WorkerId, Event]] = deque()  # messages between actors: before anything from outside
        self._broken: deque[tuple[WorkerId, Event]] = deque()  # failures met here: before any further plan is made
        self._told: list[tuple[RequestId, Outcome]] = []
        self._landed: dict[KVTransfer, Shipment] = {}  # the worker decides in this very round
        self._unheard: dict[WorkerId, set[int]] = {}  # steps that failed at once, of which their actor has not heard
        self._health = HealthMonitor()
        self._lost: set[WorkerId] = set()
        self._timers = Timers()
        self._readers = Readers()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, actor: WorkerId, event: Event) -> None:
        self._inbox.put((actor, event))

    def land(self, shipment: Shipment, event: KVArrived) -> None:
        """A part that came from another process is on the devices of its destination, which is here."""
        self._inbox.put((event.transfer.destination, Landed(shipment, event)))

    def stop(self) -> None:
        """Ends the threads; what is in flight on the devices is left to finish unread."""
        self._inbox.put(None)
        self._thread.join(timeout=10)
        self._readers.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def able(self) -> bool:
        """Every phase has a worker whose machine works."""
        roles = [machine.config.role for worker, machine in self._machines.items() if worker not in self._lost]
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
        """Waits for one thing to happen and follows it, and everything it causes here, to the end."""
        try:
            item = self._inbox.get(timeout=self._timers.wait_s(self.now_s()))
        except queue.Empty:
            item = (ROUTER, None)
        if item is None:
            return False
        if item[1] is not None:
            self._take(*item)
        for timed, key in self._timers.due(self.now_s()):
            self._round.append((timed, TimerFired(key)))
            self._settle()  # one by one: after a pause of this thread, a lease is renewed before it is seen to be over
        self._settle()
        return True

    def _take(self, actor: WorkerId, item: Event | Landed) -> None:
        """Of a part that landed, the worker says whether its reservation still waits: until then the bytes are in
        no page.
        """
        if isinstance(item, Landed):
            if not item.checked:
                self._check(actor, item)
                return
            self._landed[item.event.transfer] = item.shipment
            item = item.event
        self._round.append((actor, item))

    def _check(self, actor: WorkerId, landed: Landed) -> None:
        """Its digests are compared on the devices before the worker hears of it."""
        try:
            verdict = self._machines[actor].check(landed.shipment) if landed.event.intact else None
        except Exception as error:
            self._broken.append((actor, _failure(actor, error, transfer=landed.event.transfer)))
            return
        if verdict is None:
            self._take(actor, replace(landed, checked=True))
        else:
            self._readers.read(f"check-{actor}", lambda: self._read_verdict(actor, landed, verdict))

    def _read_verdict(self, actor: WorkerId, landed: Landed, verdict: Callable[[], bool]) -> None:
        try:
            event = replace(landed.event, intact=verdict())
            self._inbox.put((actor, Landed(landed.shipment, event, checked=True)))
        except Exception as error:
            self.post(actor, _failure(actor, error, transfer=landed.event.transfer))

    def _settle(self) -> None:
        while waiting := self._broken or self._round:
            actor, event = waiting.popleft()
            now_s = self.now_s()
            self._observe(actor, event, now_s)
            if isinstance(event, EngineFailed) and event.step_id is not None:
                self._unheard.get(actor, set()).discard(event.step_id)
            for effect in self._decide(actor, event, now_s):
                self._observe(actor, effect, now_s)
                self._act(actor, effect)
            if self._health.ended(actor, event):
                self._lose(actor)
        if self._told:
            self._deliver(self._told)
            self._told = []

    def _decide(self, actor: WorkerId, event: Event, now_s: float) -> Sequence[Any]:
        """What follows; a message of another process that cannot be followed ends the session with its sender."""
        try:
            return self.actors[actor].handle(event, now_s)
        except Exception as error:
            if self._remote is None or not isinstance(event, Received) or event.sender in self.actors:
                raise
            if not isinstance(error, SenselessWord):
                log.exception("%s cannot follow what %s says", actor, event.sender)
            self._remote.end_session(event.sender, f"{type(error).__name__}: {error}")
            return ()

    def _lose(self, worker: WorkerId) -> None:
        log.error("%s is lost: its plans fail again and again", worker)
        self._lost.add(worker)
        if ROUTER in self.actors:
            self._round.append((ROUTER, WorkerLost(worker)))
        else:
            assert self._remote is not None, "the router is not here"
            self._remote.give_up(worker)

    def _observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        for observer in self._observers:
            observer(actor, item, now_s)

    # ------------------------------------------------------------ effects

    def _act(self, actor: WorkerId, effect: Any) -> None:
        match effect:
            case EmitTokens() | Finish() | Reject():
                self._told.append((effect.request_id, effect))
            case RunStep():
                self._run_step(actor, effect)
            case Send(to, message) if to in self.actors:
                self._round.append((to, Received(actor, message)))
            case Send(to, message):
                assert self._remote is not None, f"{to} is not here"
                self._remote.send(actor, to, message)
            case ShipKV(transfer):
                self._ship(actor, transfer)
            case InsertKV(transfer):
                self._insert(actor, self._landed.pop(transfer))
            case DropKV(transfer):
                self._landed.pop(transfer, None)
            case OpenGates(attempt):
                self._machines[actor].open_gates(attempt)
            case SetTimer(at_s, key):
                self._timers.set(at_s, actor, key)
            case _:
                raise AssertionError(f"no driver knows the effect {effect!r}")

    def _run_step(self, actor: WorkerId, effect: RunStep) -> None:
        """A step made before its actor heard of a failed one may build on that one: it fails as well, unrun."""
        plan = effect.plan
        self._health.dispatched(actor, plan)
        try:
            if self._unheard.get(actor):
                raise RuntimeError(f"step {plan.step_id} follows step {min(self._unheard[actor])}, which failed")
            pending = self._dispatch(actor, effect)
        except Exception as error:
            self._unheard.setdefault(actor, set()).add(plan.step_id)
            self._broken.append((actor, _failure(actor, error, step_id=plan.step_id)))
            return
        self._readers.read(f"{actor}-{plan.lane}", lambda: self._read_step(actor, pending.read, plan.step_id))

    def _dispatch(self, actor: WorkerId, effect: RunStep) -> PendingStep:
        """Parts leave between the layer groups' programs, those of the last group behind the first token's draw."""
        machine, waiting = self._machines[actor], deque(sorted(effect.ships, key=last_layer))

        def group_done(layers: float) -> None:
            while waiting and last_layer(waiting[0]) <= layers:
                self._ship(actor, waiting.popleft())

        pending = machine.run(effect.plan, group_done if waiting else None)
        group_done(math.inf)
        return pending

    def _read_step(self, actor: WorkerId, read: Callable[[], Event], step_id: int) -> None:
        try:
            self.post(actor, read())
        except Exception as error:
            self.post(actor, _failure(actor, error, step_id=step_id))

    def _ship(self, actor: WorkerId, transfer: KVTransfer) -> None:
        near = self._machines.get(transfer.destination)
        try:
            if near is None:
                assert self._remote is not None, f"{transfer.destination} is not here"
                shipment = self._remote.ship(self._machines[actor], transfer)
            else:
                shipment = self._machines[actor].ship(transfer, near)
        except Exception as error:
            self._broken.append((actor, _failure(actor, error, transfer=transfer)))
            return
        if near is None:
            return
        lane = f"ship-{actor}-{transfer.destination}"  # one source's parts land in the order of their leaving
        self._readers.read(lane, lambda: self._await_landing(actor, shipment))

    def _await_landing(self, source: WorkerId, shipment: Shipment) -> None:
        try:
            shipment.wait_packed()
            packed_s = self.now_s()
            shipment.wait()
            landed_s = self.now_s()
            self.land(shipment, KVArrived(shipment.transfer, wire_s=landed_s - packed_s))
        except Exception as error:
            self.post(source, _failure(source, error, transfer=shipment.transfer))

    def _insert(self, actor: WorkerId, shipment: Shipment) -> None:
        try:
            self._machines[actor].insert(shipment)
        except Exception as error:
            self._broken.append((actor, _failure(actor, error, transfer=shipment.transfer)))
            self._machines[actor].open_gates(shipment.transfer.attempt)  # the handoff ends


def _failure(
    worker: WorkerId, error: Exception, step_id: int | None = None, transfer: KVTransfer | None = None
) -> EngineFailed:
    log.error("%s failed: %s: %s", worker, type(error).__name__, error)
    reason = f"{type(error).__name__}: {error}"
    if transfer is None:
        return EngineFailed(step_id, reason)
    return EngineFailed(None, reason, transfer.attempt, transfer.part)
