"""On one host: the source copies once, into shared memory, and the destination's arrays lie there.

The destination adopts the memory without a copy, so the source may not write there again before the last of those
arrays has died: an ack waits for that by itself, and a segment whose ticket ends otherwise is never written again.
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
from jdisagg.kv.transport.connection import Clock, Connection, Deadline
from jdisagg.kv.transport.endpoint import UNIX, Endpoint
from jdisagg.kv.transport.listener import BACKLOG, Ended, Offer
from jdisagg.kv.transport.memory import SPARE_SHARE, lease_views, offsets_of, size_class
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.ticket import ArraySpec, Ticket

# Shared memory: anonymous segments that their maker hands to a peer as descriptors, and what the peer maps of
# them.
#
# A segment has no name (memfd), so no stranger can guess it, and no crash leaves it behind: the kernel frees it
# when the last process that maps it is gone. It is sealed at its size, so that a reader cannot be made to fault.

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAPPED_IDLE_S = 30.0  # then a mapping that nobody reads is let go; to map it again costs its page faults


@dataclass(eq=False, slots=True)
class Segment:
    """One of ours: writable memory and the descriptor that a peer is given."""

    descriptor: int
    memory: mmap.mmap
    inode: int
    written: bool = False  # with what its ticket offers: nobody writes there any more

    def views(self, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
        return lease_views(self.memory, specs, _nobody_asks)


def _nobody_asks() -> None:
    """The source's own views die before the segment is used again."""


class Segments:
    """The source's segments: in use by a ticket, or spare. Any thread may call."""

    def __init__(self, spare_limit_bytes: float) -> None:
        self._spare_limit_bytes = spare_limit_bytes
        self._lock = threading.Lock()
        self._used: dict[int, Segment] = {}
        self._spare: list[Segment] = []

    def take(self, number: int, nbytes: int) -> Segment:
        """A segment of at least `nbytes` for ticket `number`: a spare one of that length, or a new one."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [each for each in self._spare if len(each.memory) == size]
            if fitting:
                self._spare.remove(fitting[-1])
            self._used[number] = segment = fitting[-1] if fitting else make_segment(size)
            segment.written = False
        return segment

    def descriptor(self, number: int) -> int:
        """One more of the ticket's segment, for the caller to close. Raises TransferCancelled where it has ended."""
        with self._lock:
            if number not in self._used:
                raise TransferCancelled(f"offer {number} ended before its segment was sent")
            return os.dup(self._used[number].descriptor)

    def release(self, number: int, reuse: bool) -> None:
        """The ticket's segment, where it has one, back among the spare ones; or away, where a peer may still read it.

        Away means that we never write there again: the memory itself lives until the peer lets go.
        """
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
        """Of all segments that there are: what peers have mapped besides can be let go."""
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
    """Raises TransferFull where the kernel has none."""
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
class Mapping:
    """One of a peer's, read only."""

    address: str  # of the peer
    memory: mmap.mmap
    used_s: float
    readers: set[int] = field(default_factory=set)  # tickets whose arrays lie here


class Mappings:
    """The destination's view of its peers' segments, by inode: our mapping keeps the inode from being used anew."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._lock = threading.RLock()
        self._mapped: dict[int, Mapping] = {}
        self._leased: dict[int, tuple[int, Mapping]] = {}  # ticket -> bytes and where they lie
        self._dead: deque[int] = deque()

    def check_room(self, nbytes: int) -> None:
        """Raises TransferFull."""
        if self.held_bytes + nbytes > self._limit_bytes:
            raise TransferFull(
                f"{nbytes} bytes to map beside {self.held_bytes} held is over the limit of {self._limit_bytes}"
            )

    def adopt(
        self, number: int, address: str, descriptor: int, specs: Sequence[ArraySpec], alive: Sequence[int]
    ) -> list[np.ndarray]:
        """Read-only views of a peer's segment; takes the descriptor. Raises TransferRefused: short, or not sealed."""
        try:
            inode = _checked_inode(descriptor, offsets_of(specs)[1])
            with self._lock:
                self._forget(address, set(alive))
                mapping = self._mapped.get(inode)
                if mapping is None:
                    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                    mapping = self._mapped[inode] = Mapping(address, memory, 0.0)
                mapping.used_s = self._clock()
                mapping.readers.add(number)
                self._leased[number] = sum(spec.nbytes for spec in specs), mapping
        finally:
            os.close(descriptor)
        return lease_views(mapping.memory, specs, lambda: self._dead.append(number))

    def is_read(self, number: int) -> bool:
        """Whether arrays of that ticket are still alive here."""
        self._collect()
        with self._lock:
            return number in self._leased

    @property
    def held_bytes(self) -> int:
        self._collect()
        with self._lock:
            return sum(nbytes for nbytes, _ in self._leased.values())

    def sweep(self) -> None:
        """Lets mappings go that nobody has read for a while."""
        self._collect()
        oldest_s = self._clock() - MAPPED_IDLE_S
        with self._lock:
            kept = {at: each for at, each in self._mapped.items() if each.readers or each.used_s >= oldest_s}
            self._mapped = kept

    def close(self) -> None:
        """What is read stays mapped until its last reader, who holds the memory itself, has gone."""
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
        gone = [at for at, each in self._mapped.items() if each.address == address and at not in alive]
        for inode in gone:
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


LONG_BYTES = 4 << 20  # worth another thread, and a word ahead
CHUNK_BYTES = 4 << 20  # between two looks at the deadline
COPIERS = 1  # beside the connection's own thread
NOT_YET, WRITTEN = b"\0", b"\1"  # what comes with the descriptor, or after it


def shm(config: TransportConfig) -> Endpoint:
    """Between two processes of one Linux host and user."""
    return Endpoint(config, ShmBackend(config))


class ShmBackend:
    name = "shm"

    def __init__(self, config: TransportConfig) -> None:
        self._segments = Segments(config.offer_limit_bytes * SPARE_SHARE)
        self._mappings = Mappings(config.pull_limit_bytes, config.clock)
        self._copiers = ThreadPoolExecutor(COPIERS, "kv-copier")

    def listen(self) -> tuple[socket.socket, str]:
        """An abstract socket: of this network namespace, and gone with the process."""
        name = f"jdisagg-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
        return listener, UNIX + name

    def prepare_offer(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, connection: Connection) -> dict[str, Any]:
        """Takes a segment; what is in it follows."""
        offer.deadline.wait_computed(list(offer.arrays), connection.must_be_quiet)
        number = offer.ticket.id
        offer.staged = self._segments.take(number, offsets_of(offer.ticket.arrays)[1])
        try:
            offer.deadline.left_s()
        except BaseException:
            self._segments.release(number, reuse=False)  # the ticket ended before the segment was taken
            raise
        return {"segments": self._segments.inodes()}

    def send(self, offer: Offer, connection: Connection) -> None:
        """Copies, and then lets the arrays go: from there on the segment is what the ticket holds.

        A long copy is announced by the descriptor, so that the destination maps the segment meanwhile.
        """
        arrays, segment, long = list(offer.arrays), offer.staged, offer.ticket.nbytes >= LONG_BYTES
        offer.deadline.left_s()  # an offer is called off before its arrays are dropped: now these are all
        if long:
            self._send_descriptor(offer, connection, NOT_YET)
        self._copy(list(zip(segment.views(offer.ticket.arrays), arrays, strict=True)), offer.deadline)
        segment.written = True
        if long:
            connection.send(memoryview(WRITTEN), offer.deadline)
        else:
            self._send_descriptor(offer, connection, WRITTEN)
        offer.arrays.clear()  # after the word: to unmap what was copied takes as long as to copy it

    def _send_descriptor(self, offer: Offer, connection: Connection, state: bytes) -> None:
        descriptor = self._segments.descriptor(offer.ticket.id)
        try:
            connection.socket.settimeout(offer.deadline.left_s())
            socket.send_fds(connection.socket, [state], [descriptor])
        except OSError as error:
            raise PeerDead(f"{offer.deadline.what}: {connection.peer} is gone ({error})") from error
        finally:
            os.close(descriptor)

    def _copy(self, pairs: Sequence[tuple[np.ndarray, Array]], deadline: Deadline) -> None:
        """By several threads where there is much of it: one alone does not fill the memory's bandwidth."""
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

        more = sum(view.nbytes for view, _ in pairs) // LONG_BYTES
        others = [self._copiers.submit(copy_what_is_left) for _ in range(min(more, COPIERS))]
        try:
            copy_what_is_left()
        finally:
            for each in others:
                each.cancel()
            wait(others)  # nobody writes to the segment from here on
        for each in others:
            if not each.cancelled():
                each.result()

    def prepare(self, ticket: Ticket) -> None:
        self._mappings.check_room(ticket.nbytes)

    def receive(
        self,
        ticket: Ticket,
        room: None,
        grant: dict[str, Any],
        connection: Connection,
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
        """Views that were made die with the failed pull."""

    def may_ack(self, ticket: Ticket) -> bool:
        return not self._mappings.is_read(ticket.id)

    def release(self, offer: Offer, how: Ended) -> None:
        segment = offer.staged
        self._segments.release(offer.ticket.id, reuse=how is Ended.ACKED and segment is not None and segment.written)

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
    """(destination, source) of a computed array, bytes, a few MiB each."""
    there, here = view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8)
    for start in range(0, here.size, CHUNK_BYTES):
        yield there[start : start + CHUNK_BYTES], here[start : start + CHUNK_BYTES]
