"""Shared memory: anonymous segments that their maker hands to a peer as descriptors, and what the peer maps of them.

A segment has no name (memfd), so no stranger can guess it, and no crash leaves it behind: the kernel frees it when the
last process that maps it is gone. It is sealed at its size, so that a reader cannot be made to fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jdisagg.core.errors import TransferCancelled, TransferFull, TransferRefused
from jdisagg.kv.transport.deadline import Clock
from jdisagg.kv.transport.memory import lease_views, offsets_of, size_class
from jdisagg.kv.transport.ticket import ArraySpec

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
