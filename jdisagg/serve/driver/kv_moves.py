"""Moves of pages between tiers and between workers: the driver packs and inserts pages, reader threads copy them.

A move never blocks the driver's thread: pages of HBM are packed in program order and read by another thread, and
fetched pages are on the devices before their worker gets the event. If a store raises or does not answer, the move
brings no pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jdisagg.core.errors import BadTicket, TransferRefused
from jdisagg.core.messages import PAGE_NAME_BYTES
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.engine.executor import PendingPages, Shipment, TieredExecutor
from jdisagg.kv.tiers.stores import Good, PageStore
from jdisagg.serve.driver.readers import Readers

log = logging.getLogger("jdisagg.tiers")


@dataclass(frozen=True, slots=True)
class WorkerStores:
    """The stores that keep one worker's pages below HBM. Stores of one fingerprint have interchangeable records."""

    record_bytes: int
    stores: Mapping[Tier, PageStore]
    fingerprint: str = ""

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


NO_STORES: Mapping[WorkerId, WorkerStores] = {}


@dataclass(frozen=True, slots=True)
class PagesRead:
    """The pages that a move brought to its worker's devices, and the event that reports them."""

    shipment: Shipment
    event: PagesMoved
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Lent:
    """Records that one worker sends to another that asked for them: those of the first pages of the request."""

    lender: WorkerId
    asker: WorkerId
    asked: Attempt
    records: np.ndarray  # u8[n, record_bytes]
    fingerprint: str


class Lender(Protocol):
    """The connection by which records are lent to workers of other processes."""

    def lend(self, lent: Lent) -> None:
        """Offers records to a worker of another process and returns. Raises TransportError without a connection."""


class Inbox(Protocol):
    """The queue of a driver for ended moves."""

    def post(self, actor: WorkerId, item: PagesMoved | PagesRead) -> None:
        """Queues the result of a move for its actor. Safe from any thread."""


class TierMoves:
    """Moves of pages by worker. Public methods return at once; most are called on the driver thread."""

    def __init__(
        self,
        stores: Mapping[WorkerId, WorkerStores],
        machines: Mapping[WorkerId, Any],
        readers: Readers,
        inbox: Inbox,
        now_s: Callable[[], float],
        remote: Lender | None = None,
    ) -> None:
        """A worker's executor in `machines` may be replaced while none of its pages moves.

        `remote` sends pages to workers of other processes.
        """
        self._stores, self._machines, self._readers = stores, machines, readers
        self._inbox, self._now_s, self._remote = inbox, now_s, remote
        self._fetches: dict[tuple[WorkerId, Attempt], tuple[PageMove, float]] = {}  # from peers, with their start time
        self._read: dict[tuple[WorkerId, PageMove], Shipment] = {}

    def _machine(self, actor: WorkerId) -> TieredExecutor:
        return self._machines[actor]

    def begin(self, actor: WorkerId, move: PageMove) -> None:
        began_s = self._now_s()
        if move.source is Tier.PEER:
            self._fetches[actor, move.owner] = move, began_s
            return
        if move.destination is Tier.HBM:
            self._readers.read(f"up-{actor}-{move.source}", lambda: self._fetch(actor, move, began_s))
            return
        packed = None
        if move.source is Tier.HBM:
            try:
                packed = self._machine(actor).pack_pages(move.source_pages)
            except Exception as error:
                self._inbox.post(actor, _failed_move(move, error))
                return
        put = self._lend if move.destination is Tier.PEER else self._put
        self._readers.read(f"down-{actor}-{move.peer or move.destination}", lambda: put(actor, move, packed, began_s))

    def _put(self, actor: WorkerId, move: PageMove, packed: PendingPages | None, began_s: float) -> None:
        stores = self._stores[actor]
        try:
            records, good = self._read_source(stores, move, packed)
            if all(good):
                good = stores.stores[move.destination].put(move.destination_pages, _names(move), records)
            else:
                good = (False,) * len(good)
            event = PagesMoved(move, good, self._now_s() - began_s, sum(good) * stores.record_bytes)
        except Exception as error:
            event = _failed_move(move, error)
        self._inbox.post(actor, event)

    def _read_source(
        self, stores: WorkerStores, move: PageMove, packed: PendingPages | None
    ) -> tuple[np.ndarray, Good]:
        if packed is None:
            return self._get(stores, move)
        records, fine = packed.read()
        return records, (fine,) * len(records)

    def _lend(self, actor: WorkerId, move: PageMove, packed: PendingPages | None, began_s: float) -> None:
        """Sends the records before the first gap to the worker that asked for them."""
        stores = self._stores[actor]
        try:
            records, good = self._read_source(stores, move, packed)
            whole = next((at for at, fine in enumerate(good) if not fine), len(good))
            if whole and move.asked is not None:
                self._send(Lent(actor, move.peer, move.asked, records[:whole], stores.fingerprint))
            event = PagesMoved(move, good, self._now_s() - began_s, whole * stores.record_bytes)
            if not whole:
                event = replace(event, good=(False,) * len(good))
        except Exception as error:
            event = _failed_move(move, error)
        self._inbox.post(actor, event)

    def _send(self, lent: Lent) -> None:
        if lent.asker in self._stores:
            self.arrive(lent)
            return
        if self._remote is None:
            raise TransferRefused(f"{lent.asker} has gone, with the pages that were for it")
        self._remote.lend(lent)

    def arrive(self, lent: Lent) -> None:
        """Puts lent records on the devices, if a move waits for them. Safe from any thread."""
        move, began_s = self._fetches.pop((lent.asker, lent.asked), (None, 0.0))
        if move is None or move.peer != lent.lender:
            return
        stores = self._stores[lent.asker]
        try:
            records, good = _spread(lent, stores, len(move.destination_pages))
            self._land(lent.asker, move, records, good, began_s)
        except Exception as error:
            self._inbox.post(lent.asker, _failed_move(move, error))

    def awaits(self, asker: WorkerId, asked: Attempt) -> bool:
        """Returns True if a move of `asker` waits for records of this attempt. Safe from any thread."""
        return (asker, asked) in self._fetches

    def lost(self, asker: WorkerId, asked: Attempt, error: Exception) -> None:
        """Fails the move that waits for lent records. Safe from any thread."""
        move, _ = self._fetches.pop((asker, asked), (None, 0.0))
        if move is not None:
            self._inbox.post(asker, _failed_move(move, error))

    def _get(self, stores: WorkerStores, move: PageMove) -> tuple[np.ndarray, Good]:
        names = _names(move)
        records = np.empty((len(names), stores.record_bytes), np.uint8)
        return records, stores.stores[move.source].get(move.source_pages, names, records)

    def _fetch(self, actor: WorkerId, move: PageMove, began_s: float) -> None:
        stores = self._stores[actor]
        try:
            records, good = self._get(stores, move)
            if not any(good):
                self._inbox.post(actor, PagesMoved(move, good, self._now_s() - began_s))
                return
            self._land(actor, move, records, good, began_s)
        except Exception as error:
            self._inbox.post(actor, _failed_move(move, error))

    def _land(self, actor: WorkerId, move: PageMove, records: np.ndarray, good: Good, began_s: float) -> None:
        shipment = self._machine(actor).land_pages(move, records, good)
        shipment.wait()
        event = PagesMoved(move, good, self._now_s() - began_s, sum(good) * self._stores[actor].record_bytes)
        self._inbox.post(actor, PagesRead(shipment, event))

    # ------------------------------------------------------------ on the driver thread again

    def landed(self, actor: WorkerId, read: PagesRead) -> PagesMoved | None:
        """Returns the event for pages that were read; None while their digests are compared on the devices."""
        if not read.is_checked:
            try:
                check = self._machine(actor).check(read.shipment)
            except Exception as error:
                return _failed_move(read.event.move, error)
            if check is not None:
                self._readers.read(f"check-{actor}", lambda: self._read_verdict(actor, read, check))
                return None
        self._read[actor, read.event.move] = read.shipment
        return read.event

    def _read_verdict(self, actor: WorkerId, read: PagesRead, verdict: Callable[[], bool]) -> None:
        try:
            event = read.event if verdict() else replace(read.event, good=(False,) * len(read.event.good), num_bytes=0)
            self._inbox.post(actor, PagesRead(read.shipment, event, is_checked=True))
        except Exception as error:
            self._inbox.post(actor, _failed_move(read.event.move, error))

    def insert(self, actor: WorkerId, move: PageMove) -> None:
        """Writes fetched pages. Raises what the executor raises; the pages then have unknown content."""
        self._machine(actor).insert(self._read.pop((actor, move)))

    def drop(self, actor: WorkerId, move: PageMove) -> None:
        self._read.pop((actor, move), None)
        self._fetches.pop((actor, move.owner), None)

    def stop(self) -> None:
        for each in self._stores.values():
            each.close()


def _spread(lent: Lent, stores: WorkerStores, wanted: int) -> tuple[np.ndarray, Good]:
    """Returns lent records as the first of `wanted` records. Raises BadTicket for another size or fingerprint."""
    shape = lent.records.shape
    if lent.fingerprint != stores.fingerprint or shape[1:] != (stores.record_bytes,) or shape[0] > wanted:
        ours = f"{wanted} of {stores.record_bytes} bytes of {stores.fingerprint} are wanted"
        raise BadTicket(f"{lent.lender} lends records {list(shape)} of {lent.fingerprint}, {ours}")
    records = np.empty((wanted, stores.record_bytes), np.uint8)
    records[: shape[0]] = lent.records
    return records, tuple(at < shape[0] for at in range(wanted))


def _names(move: PageMove) -> Sequence[bytes]:
    starts = range(0, len(move.names), PAGE_NAME_BYTES)
    return [move.names[start : start + PAGE_NAME_BYTES] for start in starts]


def _failed_move(move: PageMove, error: Exception) -> PagesMoved:
    log.warning("pages from %s to %s: %s: %s", move.source, move.destination, type(error).__name__, error)
    good = (False,) * (len(move.names) // PAGE_NAME_BYTES)
    return PagesMoved(move, good, failed=f"{type(error).__name__}: {str(error)[:200]}")
