"""The shared memory transport of one host: the source copies once, and the destination's arrays use that memory.

The destination adopts the memory without a copy, so the source may not write there before the last of those arrays
has died. The ack waits for that. A segment whose ticket ends otherwise is never written again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from jdisagg.core.errors import BadTicket, PeerDead, TransferCancelled, TransferFull, TransferRefused
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Clock, Deadline, KVConnection
from jdisagg.kv.transport.endpoint import UNIX, Endpoint
from jdisagg.kv.transport.listener import BACKLOG, Offer, OfferOutcome
from jdisagg.kv.transport.memory import SPARE_SHARE, lease_views, offsets_of, size_class
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.ticket import ArraySpec, Ticket

# Anonymous shared memory segments, handed to a peer as descriptors, and the mappings of a peer's segments.
#
# A segment has no name (memfd), so other processes cannot guess it, and no crash leaves it behind: the kernel frees it
# when the last process unmaps it. Its size is sealed, so that a reader cannot be made to fault.

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAPPED_IDLE_S = 30.0  # an unread mapping is closed after this time; mapping it again costs page faults


@dataclass(eq=False, slots=True)
class Segment:
    """One of our segments: writable memory and the descriptor that a peer is given."""

    descriptor: int
    memory: mmap.mmap
    inode: int
    is_written: bool = False  # holds what its ticket offers, complete

    def views(self, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
        return lease_views(self.memory, specs, _note_nothing)


def _note_nothing() -> None:
    """Does nothing: the source's own views die before the segment is reused."""


class SegmentPool:
    """The source's segments, in use by a ticket or spare. Any thread may call."""

    def __init__(self, spare_limit_bytes: float) -> None:
        self._spare_limit_bytes = spare_limit_bytes
        self._lock = threading.Lock()
        self._used: dict[int, Segment] = {}
        self._spare: list[Segment] = []

    def take(self, number: int, nbytes: int) -> Segment:
        """Returns a segment of at least `nbytes` for ticket `number`: a spare one of that length, or a new one."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [each for each in self._spare if len(each.memory) == size]
            if fitting:
                self._spare.remove(fitting[-1])
            self._used[number] = segment = fitting[-1] if fitting else make_segment(size)
            segment.is_written = False
        return segment

    def descriptor(self, number: int) -> int:
        """Returns a duplicate descriptor of the ticket's segment; the caller closes it. Raises TransferCancelled if it
        ended."""
        with self._lock:
            if number not in self._used:
                raise TransferCancelled(f"offer {number} ended before its segment was sent")
            return os.dup(self._used[number].descriptor)

    def release(self, number: int, reuse: bool) -> None:
        """Returns the ticket's segment to the spare ones, or closes it if a peer may still read it. A closed segment is
        never written again; its memory lives until the peer unmaps it."""
        with self._lock:
            segment = self._used.pop(number, None)
            if segment is None:
                return
            spare_bytes = sum(len(each.memory) for each in self._spare)
            if reuse and spare_bytes + len(segment.memory) <= self._spare_limit_bytes:
                self._spare.append(segment)
                return
        os.close(segment.descriptor)

    def inodes(self) -> list[int]:
        """Returns the inodes of all segments; a peer may close its other mappings."""
        with self._lock:
            return [each.inode for each in (*self._used.values(), *self._spare)]

    def close(self) -> None:
        with self._lock:
            segments = [*self._used.values(), *self._spare]
            self._used.clear()
            self._spare.clear()
        for segment in segments:
            os.close(segment.descriptor)


def make_segment(size: int) -> Segment:
    """Creates a sealed segment. Raises TransferFull if the kernel has no memory."""
    try:
        descriptor = os.memfd_create("jdisagg", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return Segment(descriptor, mmap.mmap(descriptor, size), os.fstat(descriptor).st_ino)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise TransferFull(f"the kernel gives no shared memory of {size} bytes ({error})") from error


@dataclass(eq=False, slots=True)
class MappedSegment:
    """A read-only mapping of one segment of a peer."""

    address: str  # address of the peer
    memory: mmap.mmap
    used_s: float
    readers: set[int] = field(default_factory=set)  # tickets whose arrays are in this mapping


class MappedSegmentTable:
    """The destination's mappings of its peers' segments, by inode; a mapping keeps the inode from being reused."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._lock = threading.RLock()
        self._mapped: dict[int, MappedSegment] = {}
        self._leased: dict[int, tuple[int, MappedSegment]] = {}  # ticket -> bytes and mapping
        self._dead: deque[int] = deque()

    def check_room(self, nbytes: int) -> None:
        """Raises TransferFull if `nbytes` more would exceed the limit."""
        if self.held_bytes + nbytes > self._limit_bytes:
            raise TransferFull(
                f"{nbytes} bytes to map beside {self.held_bytes} held is over the limit of {self._limit_bytes}"
            )

    def adopt(
        self, number: int, address: str, descriptor: int, specs: Sequence[ArraySpec], alive: Sequence[int]
    ) -> list[np.ndarray]:
        """Returns read-only views of a peer's segment and closes the descriptor. Raises TransferRefused if the segment
        is too short or not sealed. Mappings of `address` not in `alive` are dropped."""
        try:
            inode = _checked_inode(descriptor, offsets_of(specs)[1])
            with self._lock:
                self._forget(address, set(alive))
                mapping = self._mapped.get(inode)
                if mapping is None:
                    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                    mapping = self._mapped[inode] = MappedSegment(address, memory, 0.0)
                mapping.used_s = self._clock()
                mapping.readers.add(number)
                self._leased[number] = sum(spec.nbytes for spec in specs), mapping
        finally:
            os.close(descriptor)
        return lease_views(mapping.memory, specs, lambda: self._dead.append(number))

    def is_read(self, number: int) -> bool:
        """Returns True if arrays of that ticket are still alive here."""
        self._collect()
        with self._lock:
            return number in self._leased

    @property
    def held_bytes(self) -> int:
        self._collect()
        with self._lock:
            return sum(nbytes for nbytes, _ in self._leased.values())

    def sweep(self) -> None:
        """Closes mappings that were not read for a while."""
        self._collect()
        oldest_s = self._clock() - MAPPED_IDLE_S
        with self._lock:
            read_or_recent = {at: each for at, each in self._mapped.items() if each.readers or each.used_s >= oldest_s}
            self._mapped = read_or_recent

    def close(self) -> None:
        """Drops the mappings; one that is read stays mapped until its last reader, which holds the memory, is gone."""
        with self._lock:
            self._mapped.clear()
            self._leased.clear()

    def _collect(self) -> None:
        with self._lock:
            while self._dead:
                number = self._dead.popleft()
                if number in self._leased:
                    self._leased.pop(number)[1].readers.discard(number)

    def _forget(self, address: str, alive: set[int]) -> None:
        closed = [at for at, each in self._mapped.items() if each.address == address and at not in alive]
        for inode in closed:
            del self._mapped[inode]


def _checked_inode(descriptor: int, nbytes: int) -> int:
    status = os.fstat(descriptor)
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed or status.st_size < nbytes:
        raise TransferRefused(
            f"a segment of {status.st_size} bytes (seals {sealed}) was sent where {nbytes} are needed"
        )
    return status.st_ino


LONG_BYTES = 4 << 20  # from this size on, another thread copies too and the descriptor is sent ahead
CHUNK_BYTES = 4 << 20  # between two checks of the deadline
COPIERS = 1  # threads beside the connection's own
NOT_YET, WRITTEN = b"\0", b"\1"  # the byte sent with the descriptor, or after it


def shm(config: TransportConfig) -> Endpoint:
    """Returns an endpoint between two processes of one Linux host and user."""
    return Endpoint(config, ShmBackend(config))


class ShmBackend:
    name = "shm"

    def __init__(self, config: TransportConfig) -> None:
        self._segments = SegmentPool(config.offer_limit_bytes * SPARE_SHARE)
        self._mappings = MappedSegmentTable(config.pull_limit_bytes, config.clock)
        self._copiers = ThreadPoolExecutor(COPIERS, "kv-copier")

    def listen(self) -> tuple[socket.socket, str]:
        """Opens an abstract socket, which is local to this network namespace and ends with the process."""
        name = f"jdisagg-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
        return listener, UNIX + name

    def prepare_offer(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, connection: KVConnection) -> dict[str, Any]:
        """Takes a segment; its contents are sent later."""
        offer.deadline.wait_computed(list(offer.arrays), connection.must_be_quiet)
        number = offer.ticket.id
        offer.staged = self._segments.take(number, offsets_of(offer.ticket.arrays)[1])
        try:
            offer.deadline.left_s()
        except BaseException:
            self._segments.release(number, reuse=False)  # the ticket ended before the segment was taken
            raise
        return {"segments": self._segments.inodes()}

    def send(self, offer: Offer, connection: KVConnection) -> None:
        """Copies the arrays into the segment and then drops them. For a long copy the descriptor is sent ahead, so that
        the destination maps the segment meanwhile."""
        arrays, segment, long = list(offer.arrays), offer.staged, offer.ticket.nbytes >= LONG_BYTES
        offer.deadline.left_s()  # an offer is called off before its arrays are dropped, so here all of them are there
        if long:
            self._send_descriptor(offer, connection, NOT_YET)
        self._copy(list(zip(segment.views(offer.ticket.arrays), arrays, strict=True)), offer.deadline)
        segment.is_written = True
        if long:
            connection.send(memoryview(WRITTEN), offer.deadline)
        else:
            self._send_descriptor(offer, connection, WRITTEN)
        offer.arrays.clear()  # after the message: unmapping the copied arrays takes as long as copying them

    def _send_descriptor(self, offer: Offer, connection: KVConnection, state: bytes) -> None:
        descriptor = self._segments.descriptor(offer.ticket.id)
        try:
            connection.socket.settimeout(offer.deadline.left_s())
            socket.send_fds(connection.socket, [state], [descriptor])
        except OSError as error:
            raise PeerDead(f"{offer.deadline.what}: {connection.peer} is gone ({error})") from error
        finally:
            os.close(descriptor)

    def _copy(self, pairs: Sequence[tuple[np.ndarray, Array]], deadline: Deadline) -> None:
        """Copies with several threads if there is much to copy: one thread does not use the full memory bandwidth."""
        chunks = iter([chunk for view, array in pairs for chunk in _chunks(view, array)])
        lock = threading.Lock()

        def copy_what_is_left() -> None:
            while True:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                deadline.left_s()
                np.copyto(*chunk)

        helper_count = sum(view.nbytes for view, _ in pairs) // LONG_BYTES
        helpers = [self._copiers.submit(copy_what_is_left) for _ in range(min(helper_count, COPIERS))]
        try:
            copy_what_is_left()
        finally:
            for each in helpers:
                each.cancel()
            wait(helpers)  # no thread writes to the segment after this
        for each in helpers:
            if not each.cancelled():
                each.result()

    def prepare(self, ticket: Ticket) -> None:
        self._mappings.check_room(ticket.nbytes)

    def receive(
        self,
        ticket: Ticket,
        room: None,
        grant: dict[str, Any],
        connection: KVConnection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        alive = grant.get("segments")
        if not isinstance(alive, list):
            raise BadTicket(f"{connection.peer} grants {str(grant)[:80]}, which names no segments")
        descriptor, state = connection.receive_descriptor(deadline)
        views = self._mappings.adopt(ticket.id, ticket.address, descriptor, ticket.arrays, alive)
        if state == NOT_YET:
            state = connection.receive_byte(deadline)
        if state != WRITTEN:
            raise BadTicket(
                f"{connection.peer} says {state!r} of a segment, which is neither {NOT_YET!r} nor {WRITTEN!r}"
            )
        return [jax.device_put(view, device) for view, device in zip(views, devices, strict=True)]

    def abandon(self, room: None) -> None:
        """Does nothing: the views die with the failed pull."""

    def may_ack(self, ticket: Ticket) -> bool:
        return not self._mappings.is_read(ticket.id)

    def release(self, offer: Offer, how: OfferOutcome) -> None:
        segment = offer.staged
        self._segments.release(
            offer.ticket.id, reuse=how is OfferOutcome.ACKED and segment is not None and segment.is_written
        )

    def sweep(self) -> None:
        self._mappings.sweep()

    @property
    def pull_bytes(self) -> int:
        return self._mappings.held_bytes

    def close(self) -> None:
        self._copiers.shutdown()
        self._segments.close()
        self._mappings.close()


def _chunks(view: np.ndarray, array: Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (destination, source) bytes of a computed array, a few MiB each."""
    destination, source = view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8)
    for start in range(0, source.size, CHUNK_BYTES):
        yield destination[start : start + CHUNK_BYTES], source[start : start + CHUNK_BYTES]
