"""Runs a driver's effects on the executors of one process and reports each result as an event.

Executors return before their devices are done; reader threads wait for results. An immediate failure is reported before
any further step runs, because a step that was planned before its actor learnt of the failure may depend on it.
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
    """A shipment on its destination's devices, and the event that reports it."""

    shipment: Shipment
    event: KVArrived
    is_checked: bool = False


Inward = Event | Landed | PagesRead  # an input of an actor; the last two go to its executor first


class RemoteWorkers(Protocol):
    """The connection to actors of other processes. Called on the driver thread; methods return at once."""

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None: ...

    def ship(self, machine: Executor, transfer: KVTransfer) -> Shipment:
        """Packs pages and offers them to the other process. Raises TransferRefused without a peer."""
        ...

    def lend(self, lent: Lent) -> None:
        """Sends lent records, as `kv_moves.Lender` does. Safe from any thread."""

    def give_up(self, worker: WorkerId) -> None:
        """Tells the router that a worker of this process is lost."""

    def end_session(self, peer: WorkerId, why: str) -> None:
        """Ends the session with the peer's process after a message that breaks the protocol."""


class Inbox(Protocol):
    """The queue of a driver for events of its executors."""

    def post(self, actor: WorkerId, item: Inward) -> None:
        """Queues an event for an actor. Safe from any thread."""

    def fail(self, actor: WorkerId, event: EngineFailed) -> None:
        """Queues an immediate failure ahead of other events. Called on the driver thread."""

    def lose(self, worker: WorkerId) -> None:
        """Declares the worker lost. Called on the driver thread."""


class Executors:
    """The executors of one process by worker. All methods but `stop` run on the driver thread and return at once."""

    def __init__(
        self,
        executors: Mapping[WorkerId, Executor],
        inbox: Inbox,
        clock: Callable[[], float],
        remote: RemoteWorkers | None = None,
        stores: Mapping[WorkerId, WorkerStores] = NO_STORES,
    ) -> None:
        """`stores` has an entry for each worker with tiers below HBM."""
        self.by_worker, self.now_s = executors, clock
        self._inbox, self._remote = inbox, remote
        self._landed: dict[KVTransfer, Shipment] = {}  # until the worker decides, in the same round
        self._unreported: dict[WorkerId, set[int]] = {}  # steps that failed at once, their events not yet handled
        self._readers = Readers()
        self.tiers = TierMoves(stores, executors, self._readers, inbox, clock, remote)

    def stop(self) -> None:
        self._readers.stop()
        self.tiers.stop()

    # ------------------------------------------------------------ steps

    def run(self, actor: WorkerId, effect: RunStep) -> None:
        """Dispatches a step. A step after a failure that its actor has not handled yet fails without being run."""
        plan = effect.plan
        try:
            if self._unreported.get(actor):
                raise RuntimeError(f"step {plan.step_id} follows step {min(self._unreported[actor])}, which failed")
            pending = self._dispatch(actor, effect)
        except Exception as error:
            self._unreported.setdefault(actor, set()).add(plan.step_id)
            self._inbox.fail(actor, failure_of(actor, error, step_id=plan.step_id))
            return
        self._readers.read(f"{actor}-{plan.lane}", lambda: self._read_step(actor, pending.read, plan.step_id))

    def note_failure(self, actor: WorkerId, event: EngineFailed) -> None:
        """Notes that the actor handles a failure: its later steps do not depend on the failed one."""
        if event.step_id is not None:
            self._unreported.get(actor, set()).discard(event.step_id)

    def _dispatch(self, actor: WorkerId, effect: RunStep) -> PendingStep:
        """Dispatches the step; KV parts are shipped between layer groups, the last after the first token is sampled."""
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
        local = self.by_worker.get(transfer.destination)
        try:
            if local is None:
                assert self._remote is not None, f"{transfer.destination} is not here"
                shipment = self._remote.ship(self.by_worker[actor], transfer)
            else:
                shipment = self.by_worker[actor].ship(transfer, local)
        except Exception as error:
            self._inbox.fail(actor, failure_of(actor, error, transfer=transfer))
            return
        if local is None:
            return
        lane = f"ship-{actor}-{transfer.destination}"  # parts of one source arrive in the order in which they were sent
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
        """Returns the event for a part that arrived; None while its digests are compared on the devices.

        The worker then inserts or drops the part (`insert`, `drop`); until then its bytes are in no page.
        """
        if not landed.is_checked:
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
            self._inbox.post(actor, Landed(landed.shipment, event, is_checked=True))
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
        """Writes fetched pages. A worker is lost if that fails, because the pages then have unknown content."""
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
    """Logs an error and returns the event that reports it to the actor."""
    log.error("%s failed: %s: %s", worker, type(error).__name__, error)
    reason = f"{type(error).__name__}: {error}"
    if transfer is None:
        return EngineFailed(step_id, reason)
    return EngineFailed(None, reason, transfer.attempt, transfer.part)


# Work of several executors at once, each on a thread of its own.

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class Stopped(Exception):
    """Raised in a thread when another of the parallel calls failed, or the caller was interrupted."""


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the calls in parallel and returns their results in order. The first error is raised at once."""
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
    """The summed progress of several executors. Any thread may report; after `stop` a report raises Stopped."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, Lock()
        self._counts: dict[WorkerId, tuple[int, int]] = {}
        self._stopped = False

    def report(self, worker: WorkerId, label: str, done: int, total: int) -> None:
        """Reports that `done` of the worker's `total` programs are compiled. Raises Stopped after `stop`."""
        with self._lock:
            if self._stopped:
                raise Stopped(worker)
            self._counts[worker] = done, total
            self._progress(f"{worker} {label}", *map(sum, zip(*self._counts.values(), strict=True)))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
