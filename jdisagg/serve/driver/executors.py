"""The executors of one process: runs a driver's effects on them, and reports what comes of each as an event.

Executors return before their devices are done; reader threads wait for results. What fails at once is reported before
any further step is run: a step made before its actor heard of a failed one may build on that one.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol, TypeVar

from jdisagg.core.events import EngineFailed, Event, KVArrived, RunStep
from jdisagg.core.messages import Message
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer, last_layer
from jdisagg.core.tiers import PageMove
from jdisagg.engine.executor import Executor, PendingStep, Shipment
from jdisagg.serve.driver.kv_moves import NO_STORES, Lent, PagesRead, TierMoves, WorkerStores
from jdisagg.serve.driver.readers import Readers

log = logging.getLogger("jdisagg.driver")


@dataclass(frozen=True, slots=True)
class Landed:
    """A shipment on its destination's devices, and the event that says so."""

    shipment: Shipment
    event: KVArrived
    checked: bool = False


Inward = Event | Landed | PagesRead  # what comes to an actor, or first to its machine


class RemoteWorkers(Protocol):
    """Where the actors of other processes are reached. Called on the driver thread; returns at once."""

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None: ...

    def ship(self, machine: Executor, transfer: KVTransfer) -> Shipment:
        """Packs, and offers what was packed; the other process calls `land`. Raises where there is no way there."""
        ...

    def lend(self, lent: Lent) -> None:
        """As `tier_moves.Lender`; from any thread."""
        ...

    def give_up(self, worker: WorkerId) -> None:
        """The router is to know that a worker of this process is of no more use."""
        ...

    def end_session(self, peer: WorkerId, why: str) -> None:
        """The peer said what makes no sense: everything with its process is over."""
        ...


class Inbox(Protocol):
    """Where what happened goes."""

    def post(self, actor: WorkerId, item: Inward) -> None:
        """From any thread."""
        ...

    def fail(self, actor: WorkerId, event: EngineFailed) -> None:
        """On the driver thread, of what failed at once."""
        ...

    def lose(self, worker: WorkerId) -> None:
        """On the driver thread: the worker is of no more use."""
        ...


class Executors:
    """By worker. All methods but `stop` are called on the driver thread and return at once."""

    def __init__(
        self,
        executors: Mapping[WorkerId, Executor],
        inbox: Inbox,
        clock: Callable[[], float],
        remote: RemoteWorkers | None = None,
        stores: Mapping[WorkerId, WorkerStores] = NO_STORES,
    ) -> None:
        """stores: of the workers that have tiers below HBM."""
        self.by_worker, self.now_s = executors, clock
        self._inbox, self._remote = inbox, remote
        self._landed: dict[KVTransfer, Shipment] = {}  # the worker decides in this very round
        self._unheard: dict[WorkerId, set[int]] = {}  # steps that failed at once, of which their actor has not heard
        self._readers = Readers()
        self.tiers = TierMoves(stores, executors, self._readers, inbox, clock, remote)

    def stop(self) -> None:
        self._readers.stop()
        self.tiers.stop()

    # ------------------------------------------------------------ steps

    def run(self, actor: WorkerId, effect: RunStep) -> None:
        """A step behind a failed one that its actor has not heard of fails as well, unrun."""
        plan = effect.plan
        try:
            if self._unheard.get(actor):
                raise RuntimeError(f"step {plan.step_id} follows step {min(self._unheard[actor])}, which failed")
            pending = self._dispatch(actor, effect)
        except Exception as error:
            self._unheard.setdefault(actor, set()).add(plan.step_id)
            self._inbox.fail(actor, failure_of(actor, error, step_id=plan.step_id))
            return
        self._readers.read(f"{actor}-{plan.lane}", lambda: self._read_step(actor, pending.read, plan.step_id))

    def hears(self, actor: WorkerId, event: EngineFailed) -> None:
        """The actor is told of a failure: what it dispatches from now on does not build on it."""
        if event.step_id is not None:
            self._unheard.get(actor, set()).discard(event.step_id)

    def _dispatch(self, actor: WorkerId, effect: RunStep) -> PendingStep:
        """Parts leave between the layer groups' programs, those of the last group behind the first token's draw."""
        executor, waiting = self.by_worker[actor], deque(sorted(effect.ships, key=last_layer))

        def group_done(layers: float) -> None:
            while waiting and last_layer(waiting[0]) <= layers:
                self.ship(actor, waiting.popleft())

        pending = executor.run(effect.plan, group_done if waiting else None)
        group_done(math.inf)
        return pending

    def _read_step(self, actor: WorkerId, read: Callable[[], Event], step_id: int) -> None:
        try:
            self._inbox.post(actor, read())
        except Exception as error:
            self._inbox.post(actor, failure_of(actor, error, step_id=step_id))

    # ------------------------------------------------------------ KV

    def ship(self, actor: WorkerId, transfer: KVTransfer) -> None:
        near = self.by_worker.get(transfer.destination)
        try:
            if near is None:
                assert self._remote is not None, f"{transfer.destination} is not here"
                shipment = self._remote.ship(self.by_worker[actor], transfer)
            else:
                shipment = self.by_worker[actor].ship(transfer, near)
        except Exception as error:
            self._inbox.fail(actor, failure_of(actor, error, transfer=transfer))
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
            arrived = KVArrived(shipment.transfer, wire_s=landed_s - packed_s)
            self._inbox.post(shipment.transfer.destination, Landed(shipment, arrived))
        except Exception as error:
            self._inbox.post(source, failure_of(source, error, transfer=shipment.transfer))

    def landed(self, actor: WorkerId, landed: Landed) -> KVArrived | None:
        """What the worker is to hear of a part that landed; None while its digests are compared on the devices.

        The worker says whether its reservation still waits (`insert` or `drop`): until then the bytes are in no page.
        """
        if not landed.checked:
            try:
                check = self.by_worker[actor].check(landed.shipment) if landed.event.intact else None
            except Exception as error:
                self._inbox.fail(actor, failure_of(actor, error, transfer=landed.event.transfer))
                return None
            if check is not None:
                self._readers.read(f"check-{actor}", lambda: self._read_verdict(actor, landed, check))
                return None
        self._landed[landed.event.transfer] = landed.shipment
        return landed.event

    def _read_verdict(self, actor: WorkerId, landed: Landed, verdict: Callable[[], bool]) -> None:
        try:
            event = replace(landed.event, intact=verdict())
            self._inbox.post(actor, Landed(landed.shipment, event, checked=True))
        except Exception as error:
            self._inbox.post(actor, failure_of(actor, error, transfer=landed.event.transfer))

    def insert(self, actor: WorkerId, transfer: KVTransfer) -> None:
        shipment = self._landed.pop(transfer)
        try:
            self.by_worker[actor].insert(shipment)
        except Exception as error:
            self._inbox.fail(actor, failure_of(actor, error, transfer=shipment.transfer))
            self.by_worker[actor].open_gates(shipment.transfer.attempt)  # the handoff ends

    def insert_pages(self, actor: WorkerId, move: PageMove) -> None:
        """Where this fails, pages that the actor counts on hold nobody knows what: it is lost."""
        try:
            self.tiers.insert(actor, move)
        except Exception:
            log.exception("%s: pages from %s were not written", actor, move.source)
            self._inbox.lose(actor)

    def drop(self, actor: WorkerId, transfer: KVTransfer) -> None:
        shipment = self._landed.pop(transfer, None)
        if shipment is not None:
            self.by_worker[actor].drop(shipment)


def failure_of(
    worker: WorkerId, error: Exception, step_id: int | None = None, transfer: KVTransfer | None = None
) -> EngineFailed:
    """What its actor is told of an error, which is logged here."""
    log.error("%s failed: %s: %s", worker, type(error).__name__, error)
    reason = f"{type(error).__name__}: {error}"
    if transfer is None:
        return EngineFailed(step_id, reason)
    return EngineFailed(None, reason, transfer.attempt, transfer.part)


# Work of several machines at once, each on a thread of its own: what they wait for passes together.

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class Stopped(Exception):
    """Another of the calls failed, or the caller was interrupted."""


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each returns, in order. As soon as one fails its error is raised, and the others are not waited for."""
    if len(calls) < 2:
        return [call() for call in calls]
    pool = ThreadPoolExecutor(len(calls), thread_name_prefix="start")
    try:
        futures = [pool.submit(call) for call in calls]
        ended = wait(futures, return_when=FIRST_EXCEPTION).done
        return [each.result() for each in futures if each in ended]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class JointProgress:
    """One progress of several machines, told by any thread; after `stop` whoever tells it anything ends."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, Lock()
        self._counts: dict[WorkerId, tuple[int, int]] = {}
        self._stopped = False

    def tell(self, worker: WorkerId, label: str, done: int, total: int) -> None:
        """So many of the programs of this worker are done; raises Stopped."""
        with self._lock:
            if self._stopped:
                raise Stopped(worker)
            self._counts[worker] = done, total
            self._progress(f"{worker} {label}", *map(sum, zip(*self._counts.values(), strict=True)))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
