"""Deadline: one operation's deadline and its off switch, asked by everything that waits.

No wait of this package is longer than `TICK_S` without asking again, so an operation ends within its deadline and
soon after it is called off, whatever the other end does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jdisagg.core.errors import TransferCancelled, TransferRefused, TransferTimeout

Clock = Callable[[], float]
TICK_S = 0.05
POLL_S = (0.00005, 0.001)  # first and longest pause between two looks at an array that is being computed


class Deadline:
    """Ends at `deadline_s` of `clock`, or when `call_off` is called from any thread."""

    def __init__(self, what: str, deadline_s: float, clock: Clock = time.monotonic) -> None:
        self.what, self.deadline_s, self.clock = what, deadline_s, clock
        self._off = threading.Event()
        self._reasons: list[str] = []  # why it was called off; the first counts

    def call_off(self, why: str) -> None:
        self._reasons.append(why)
        self._off.set()

    def within(self, seconds: float) -> Deadline:
        """For a part of the operation: over after so many seconds from now, or with the whole."""
        part = Deadline(self.what, min(self.deadline_s, self.clock() + seconds), self.clock)
        part._off, part._reasons = self._off, self._reasons
        return part

    @property
    def is_off(self) -> bool:
        return self._off.is_set()

    def left_s(self) -> float:
        """Seconds left. Raises TransferCancelled or TransferTimeout where there are none."""
        if self._off.is_set():
            raise TransferCancelled(f"{self.what}: {self._reasons[0]}")
        now_s = self.clock()
        if now_s >= self.deadline_s:
            raise TransferTimeout(f"{self.what}: not over at {now_s:.3f} s, the deadline was {self.deadline_s:.3f} s")
        return self.deadline_s - now_s

    def slice_s(self) -> float:
        """How long to wait before asking again."""
        return min(self.left_s(), TICK_S)

    def sleep(self, seconds: float) -> None:
        self._off.wait(min(seconds, self.left_s()))

    def wait_until(self, at_s: float) -> None:
        """Sleeps until `at_s` of the clock."""
        while (left_s := at_s - self.clock()) > 0:
            self.sleep(left_s)
        self.left_s()

    def wait_computed(self, arrays: Sequence[Array], look: Callable[[], None] = lambda: None) -> None:
        """Until every array is computed: by polling, since `block_until_ready` knows no deadline.

        `look` is called between two polls. Raises TransferRefused where an array was deleted or donated, or its
        program failed.
        """
        pause_s, longest_s = POLL_S
        for array in arrays:
            while not _is_computed(array, self.what):
                look()
                self.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        self.left_s()


def _is_computed(array: Any, what: str) -> bool:
    if array.is_deleted():  # asked first: `is_ready` of a deleted array brings the process down
        raise TransferRefused(f"{what}: an offered array is lost (it was deleted or donated)")
    try:
        if array.is_ready():
            array.block_until_ready()  # returns at once, and raises what its program raised
            return True
        return False
    except RuntimeError as error:  # XLA's own
        raise TransferRefused(f"{what}: an offered array is lost ({error})") from error
