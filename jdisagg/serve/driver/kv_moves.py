"""Moves of pages between tiers, and between workers: packed and inserted by the driver, copied by readers.

A move never holds up the driver's thread: pages of HBM are packed in program order and read when they are there, and
what comes back is on the devices before its worker hears of it. A store that raises, or does not answer, is a move
that brought nothing.
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
from jdisagg.engine.executor import PagesPacked, Shipment, TieredExecutor
from jdisagg.kv.tiers.stores import Good, Store
from jdisagg.serve.driver.readers import Readers

log = logging.getLogger("jdisagg.tiers")


@dataclass(frozen=True, slots=True)
class WorkerStores:
    """What keeps one worker's pages below HBM. Records of one fingerprint mean the same."""

    record_bytes: int
    stores: Mapping[Tier, Store]
    fingerprint: str = ""

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


NO_STORES: Mapping[WorkerId, WorkerStores] = {}


@dataclass(frozen=True, slots=True)
class PagesRead:
    """What a move to HBM brought, on the devices of its worker, and the event that says so."""

    shipment: Shipment
    event: PagesMoved
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Lent:
    """Records on their way to the worker that asked for them: the first of the pages that it has named."""

    lender: WorkerId
    asker: WorkerId
    asked: Attempt
    records: np.ndarray  # u8[n, record_bytes]
    fingerprint: str


class Lender(Protocol):
    def lend(self, lent: Lent) -> None:
        """Brings records to a worker of another process; blocks no longer than offering takes. Raises TransportError
        where there is no way there."""
        ...


class Inbox(Protocol):
    def post(self, actor: WorkerId, item: PagesMoved | PagesRead) -> None:
        """From any thread."""
        ...


class TierMoves:
    """By worker. Public methods but `stop` are called on the driver thread and return at once."""

    def __init__(
        self,
        stores: Mapping[WorkerId, WorkerStores],
        machines: Mapping[WorkerId, Any],
        readers: Readers,
        inbox: Inbox,
        now_s: Callable[[], float],
        remote: Lender | None = None,
    ) -> None:
        """machines: that of a worker may become another while none of its pages moves. `remote` brings pages to workers
        that are not here."""
        self._stores, self._machines, self._readers = stores, machines, readers
        self._inbox, self._now_s, self._remote = inbox, now_s, remote
        self._coming: dict[tuple[WorkerId, Attempt], tuple[PageMove, float]] = {}  # asked of peers, and since when
        self._read: dict[tuple[WorkerId, PageMove], Shipment] = {}

    def _machine(self, actor: WorkerId) -> TieredExecutor:
        return self._machines[actor]

    def begin(self, actor: WorkerId, move: PageMove) -> None:
        began_s = self._now_s()
        if move.source is Tier.PEER:
            self._coming[actor, move.owner] = move, began_s
            return
        if move.destination is Tier.HBM:
            self._readers.read(f"up-{actor}-{move.source}", lambda: self._fetch(actor, move, began_s))
            return
        packed = None
        if move.source is Tier.HBM:
            try:
                packed = self._machine(actor).pack_pages(move.source_pages)
            except Exception as error:
                self._inbox.post(actor, _nothing(move, error))
                return
        put = self._lend if move.destination is Tier.PEER else self._put
        self._readers.read(f"down-{actor}-{move.peer or move.destination}", lambda: put(actor, move, packed, began_s))

    def _put(self, actor: WorkerId, move: PageMove, packed: PagesPacked | None, began_s: float) -> None:
        stores = self._stores[actor]
        try:
            records, good = self._read_source(stores, move, packed)
            if all(good):
                good = stores.stores[move.destination].put(move.destination_pages, _names(move), records)
            else:
                good = (False,) * len(good)
            event = PagesMoved(move, good, self._now_s() - began_s, sum(good) * stores.record_bytes)
        except Exception as error:
            event = _nothing(move, error)
        self._inbox.post(actor, event)

    def _read_source(self, stores: WorkerStores, move: PageMove, packed: PagesPacked | None) -> tuple[np.ndarray, Good]:
        if packed is None:
            return self._get(stores, move)
        records, fine = packed.read()
        return records, (fine,) * len(records)

    def _lend(self, actor: WorkerId, move: PageMove, packed: PagesPacked | None, began_s: float) -> None:
        """What can be read without a gap goes to who asked."""
        stores = self._stores[actor]
        try:
            records, good = self._read_source(stores, move, packed)
            whole = next((at for at, fine in enumerate(good) if not fine), len(good))
            if whole and move.asked is not None:
                self._bring(Lent(actor, move.peer, move.asked, records[:whole], stores.fingerprint))
            event = PagesMoved(move, good, self._now_s() - began_s, whole * stores.record_bytes)
            if not whole:
                event = replace(event, good=(False,) * len(good))
        except Exception as error:
            event = _nothing(move, error)
        self._inbox.post(actor, event)

    def _bring(self, lent: Lent) -> None:
        if lent.asker in self._stores:
            self.arrive(lent)
            return
        if self._remote is None:
            raise TransferRefused(f"{lent.asker} has gone, with the pages that were for it")
        self._remote.lend(lent)

    def arrive(self, lent: Lent) -> None:
        """Records that another worker lent are here. From any thread; who waits for them no longer gets none."""
        move, began_s = self._coming.pop((lent.asker, lent.asked), (None, 0.0))
        if move is None or move.peer != lent.lender:
            return
        stores = self._stores[lent.asker]
        try:
            records, good = _spread(lent, stores, len(move.destination_pages))
            self._land(lent.asker, move, records, good, began_s)
        except Exception as error:
            self._inbox.post(lent.asker, _nothing(move, error))

    def awaits(self, asker: WorkerId, asked: Attempt) -> bool:
        return (asker, asked) in self._coming

    def lost(self, asker: WorkerId, asked: Attempt, error: Exception) -> None:
        """What was lent did not come. From any thread."""
        move, _ = self._coming.pop((asker, asked), (None, 0.0))
        if move is not None:
            self._inbox.post(asker, _nothing(move, error))

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
            self._inbox.post(actor, _nothing(move, error))

    def _land(self, actor: WorkerId, move: PageMove, records: np.ndarray, good: Good, began_s: float) -> None:
        shipment = self._machine(actor).land_pages(move, records, good)
        shipment.wait()
        event = PagesMoved(move, good, self._now_s() - began_s, sum(good) * self._stores[actor].record_bytes)
        self._inbox.post(actor, PagesRead(shipment, event))

    # ------------------------------------------------------------ on the driver thread again

    def landed(self, actor: WorkerId, read: PagesRead) -> PagesMoved | None:
        """What the worker is to hear; None while digests are compared on the devices."""
        if not read.checked:
            try:
                check = self._machine(actor).check(read.shipment)
            except Exception as error:
                return _nothing(read.event.move, error)
            if check is not None:
                self._readers.read(f"check-{actor}", lambda: self._read_verdict(actor, read, check))
                return None
        self._read[actor, read.event.move] = read.shipment
        return read.event

    def _read_verdict(self, actor: WorkerId, read: PagesRead, verdict: Callable[[], bool]) -> None:
        try:
            event = read.event if verdict() else replace(read.event, good=(False,) * len(read.event.good), num_bytes=0)
            self._inbox.post(actor, PagesRead(read.shipment, event, checked=True))
        except Exception as error:
            self._inbox.post(actor, _nothing(read.event.move, error))

    def insert(self, actor: WorkerId, move: PageMove) -> None:
        """Raises what the machine raises: its pages hold nobody knows what."""
        self._machine(actor).insert(self._read.pop((actor, move)))

    def drop(self, actor: WorkerId, move: PageMove) -> None:
        self._read.pop((actor, move), None)
        self._coming.pop((actor, move.owner), None)

    def stop(self) -> None:
        for each in self._stores.values():
            each.close()


def _spread(lent: Lent, stores: WorkerStores, wanted: int) -> tuple[np.ndarray, Good]:
    """What was lent as the first of the records that are wanted. Raises BadTicket where it is of another form."""
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


def _nothing(move: PageMove, error: Exception) -> PagesMoved:
    log.warning("pages from %s to %s: %s: %s", move.source, move.destination, type(error).__name__, error)
    good = (False,) * (len(move.names) // PAGE_NAME_BYTES)
    return PagesMoved(move, good, failed=f"{type(error).__name__}: {str(error)[:200]}")
