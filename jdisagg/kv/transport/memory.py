"""Receive buffers: aligned, pooled and leased to jax, which reads them in place.

jax adopts a 64-byte aligned buffer without a copy, and reads it as long as the array or a program that got it lives.
So a lease ends only when nothing refers to the memory any more.
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

ALIGNMENT = 64  # bytes; required by the CPU client for adoption
SMALLEST_BYTES = 1 << 16
SPARE_SHARE = 0.5  # share of the limit that stays mapped between transfers


def offsets_of(specs: Sequence[ArraySpec]) -> tuple[list[int], int]:
    """Returns the offset of each array in one buffer, and the buffer's length."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def size_class(nbytes: int) -> int:
    """Returns the next length of the form 2**n or 1.5 * 2**n: few sizes, and untouched pages cost nothing."""
    size = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return size * 3 // 4 if size * 3 // 4 >= max(nbytes, SMALLEST_BYTES) else size


def lease_views(buffer: Any, specs: Sequence[ArraySpec], note: Callable[[], None]) -> list[np.ndarray]:
    """Returns one array per spec, in place; `note` is called when they and jax's arrays of them are gone.

    The finaliser is on the array that all views derive from. numpy shortens chains of views, and jax keeps that root
    and not the view it was given, which dies while jax still reads its memory. The finaliser runs at any point of
    any thread, so `note` must not take a lock.
    """
    whole = np.frombuffer(buffer, np.uint8)
    weakref.finalize(whole, note).atexit = False
    starts = zip(specs, offsets_of(specs)[0], strict=True)
    views = [whole[at : at + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape) for spec, at in starts]
    assert all(view.base is whole for view in views)
    return views


@dataclass(frozen=True, slots=True)
class BufferLease:
    """A buffer cut into one view per array; the receiver empties `views` when it takes them."""

    id: int
    views: list[np.ndarray]


def anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


class BufferPool:
    """A pool of anonymous memory, at most `limit_bytes` leased and spare together. Any thread may call. With another
    `make`, which may register its memory with a device, buffers are kept until the end."""

    def __init__(self, limit_bytes: int, make: Callable[[int], mmap.mmap] = anonymous) -> None:
        self.limit_bytes, self._make = limit_bytes, make
        self._is_permanent = make is not anonymous
        self._lock = threading.RLock()
        self._leased: dict[int, mmap.mmap] = {}
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._dead: deque[int] = deque()
        self._numbers = itertools.count()

    def take(self, specs: Sequence[ArraySpec]) -> BufferLease:
        """Leases a buffer for the specs. Raises TransferFull if it does not fit beside the leased ones."""
        size = size_class(offsets_of(specs)[1])
        with self._lock:
            held_bytes = self.held_bytes
            if held_bytes + size > self.limit_bytes:
                gc.collect()  # jax releases adopted buffers at its next call, or now
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
        """Ends a lease whose views were not used."""
        lease.views.clear()
        self._dead.append(lease.id)
        self._collect()

    @property
    def held_bytes(self) -> int:
        """Returns the bytes leased, spare buffers not counted."""
        self._collect()
        with self._lock:
            return sum(len(buffer) for buffer in self._leased.values())

    @property
    def spare_bytes(self) -> int:
        with self._lock:
            return sum(size * len(buffers) for size, buffers in self._spare.items())

    def close(self) -> None:
        """Releases spare buffers; a leased one is released with its last view."""
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
                if self._is_permanent or self.spare_bytes + len(buffer) <= self.limit_bytes * SPARE_SHARE:
                    self._spare.setdefault(len(buffer), []).append(buffer)

    def _make_room(self, size: int) -> None:
        """Releases spare buffers of other lengths until leased and spare bytes stay within the limit."""
        leased_bytes = sum(len(buffer) for buffer in self._leased.values())
        if self._is_permanent and leased_bytes + self.spare_bytes + size > self.limit_bytes:
            raise TransferFull(f"{size} bytes beside {leased_bytes + self.spare_bytes} kept: limit {self.limit_bytes}")
        while self.spare_bytes and leased_bytes + self.spare_bytes + size > self.limit_bytes:
            largest = max(length for length, buffers in self._spare.items() if buffers)
            self._spare[largest].pop()
