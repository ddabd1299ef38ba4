"""Receive buffers: aligned, pooled and leased to jax, which reads them in place.

jax adopts a 64-byte aligned buffer without a copy and reads it for as long as the array, or a program that was given
it, lives. So a buffer is not taken back on anybody's word: a lease ends when nothing refers to the memory any more.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.core.errors import TransferFull
from jdisagg.kv.transport.ticket import DTYPES, ArraySpec

ALIGNMENT = 64  # bytes; what the CPU client adopts
SMALLEST_BYTES = 1 << 16
SPARE_SHARE = 0.5  # of the limit: as much as that stays mapped between transfers


def offsets_of(specs: Sequence[ArraySpec]) -> tuple[list[int], int]:
    """Where each array starts in one buffer, and the buffer's length."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def size_class(nbytes: int) -> int:
    """The next length of the form 2**n or 1.5 * 2**n: few, and untouched pages cost nothing."""
    size = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return size * 3 // 4 if size * 3 // 4 >= max(nbytes, SMALLEST_BYTES) else size


def lease_views(buffer: Any, specs: Sequence[ArraySpec], note: Callable[[], None]) -> list[np.ndarray]:
    """One array per spec, in place; `note` is called when they and whatever jax made of them are gone.

    The finaliser hangs on the array that all views stem from: numpy shortens chains of views, and jax keeps that root
    and not the view it was given, which dies while jax still reads its memory. It runs at any point of any thread, so
    `note` may take no lock.
    """
    whole = np.frombuffer(buffer, np.uint8)
    weakref.finalize(whole, note).atexit = False
    starts = zip(specs, offsets_of(specs)[0], strict=True)
    views = [whole[at : at + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape) for spec, at in starts]
    assert all(view.base is whole for view in views)
    return views


@dataclass(frozen=True, slots=True)
class BufferLease:
    """A buffer cut into one view per array; `views` is emptied by whoever takes them."""

    id: int
    views: list[np.ndarray]


def anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


class Buffers:
    """Anonymous memory, at most `limit_bytes` leased and spare together. Any thread may call.

    With another `make`, which may register what it maps with some device, buffers are kept until the end.
    """

    def __init__(self, limit_bytes: int, make: Callable[[int], mmap.mmap] = anonymous) -> None:
        self.limit_bytes, self._make = limit_bytes, make
        self._keeps_all = make is not anonymous
        self._lock = threading.RLock()
        self._leased: dict[int, mmap.mmap] = {}
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._dead: deque[int] = deque()
        self._numbers = itertools.count()

    def take(self, specs: Sequence[ArraySpec]) -> BufferLease:
        """Raises TransferFull where it would not fit beside what is leased."""
        size = size_class(offsets_of(specs)[1])
        with self._lock:
            held_bytes = self.held_bytes
            if held_bytes + size > self.limit_bytes:
                gc.collect()  # jax lets go of what it adopted at its next call, or now
                held_bytes = self.held_bytes
            if held_bytes + size > self.limit_bytes:
                raise TransferFull(
                    f"{size} bytes to receive beside {held_bytes} held is over the limit of {self.limit_bytes}"
                )
            buffer = self._spare[size].pop() if self._spare.get(size) else None
            if buffer is None:
                self._make_room(size)
                buffer = self._make(size)
            number = next(self._numbers)
            self._leased[number] = buffer
        return BufferLease(number, lease_views(buffer, specs, lambda: self._dead.append(number)))

    def give_back(self, lease: BufferLease) -> None:
        """Ends a lease whose views went nowhere."""
        lease.views.clear()
        self._dead.append(lease.id)
        self._collect()

    @property
    def held_bytes(self) -> int:
        """Bytes leased, spare buffers not counted."""
        self._collect()
        with self._lock:
            return sum(len(buffer) for buffer in self._leased.values())

    @property
    def spare_bytes(self) -> int:
        with self._lock:
            return sum(size * len(buffers) for size, buffers in self._spare.items())

    def close(self) -> None:
        """Lets spare buffers go; leased ones go with their last view."""
        with self._lock:
            self._spare.clear()
            self._leased.clear()
            self.limit_bytes = 0

    def _collect(self) -> None:
        with self._lock:
            while self._dead:
                buffer = self._leased.pop(self._dead.popleft(), None)
                if buffer is None:
                    continue
                if self._keeps_all or self.spare_bytes + len(buffer) <= self.limit_bytes * SPARE_SHARE:
                    self._spare.setdefault(len(buffer), []).append(buffer)

    def _make_room(self, size: int) -> None:
        """Lets spare buffers of other lengths go until leased and spare together stay within the limit."""
        lent_bytes = sum(len(buffer) for buffer in self._leased.values())
        if self._keeps_all and lent_bytes + self.spare_bytes + size > self.limit_bytes:
            raise TransferFull(f"{size} bytes beside {lent_bytes + self.spare_bytes} kept: limit {self.limit_bytes}")
        while self.spare_bytes and lent_bytes + self.spare_bytes + size > self.limit_bytes:
            largest = max(length for length, buffers in self._spare.items() if buffers)
            self._spare[largest].pop()
