"""Limits how many multi-device programs of this process are in flight.

On the CPU backend more than 32 un-awaited multi-device programs can deadlock, because their collectives exhaust the
threads. Every such launch is counted here, and the launcher waits for the oldest beyond the limit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

MAX_IN_FLIGHT = 16


class LaunchCounter:
    """A counter of launches, which tracks one non-donated result of each."""

    def __init__(self, limit: int = MAX_IN_FLIGHT) -> None:
        self.limit = limit
        self.observers: list[Callable[[str], None]] = []  # called with each launch's program and argument shapes
        self._results: deque[jax.Array] = deque()

    def launched(self, result: jax.Array, name: str = "", arguments: Sequence[Any] = ()) -> None:
        """Records a multi-device program by `result`; blocks while more than the limit are in flight."""
        for observer in self.observers:
            observer(f"{name} {[_outline(each) for each in arguments]}")
        self._results.append(result)
        while len(self._results) > self.limit:
            jax.block_until_ready(self._results.popleft())

    @property
    def in_flight(self) -> int:
        """Upper bound on the launches in flight: recorded and not yet awaited."""
        return len(self._results)


def _outline(argument: Any) -> Any:
    """Returns an array's shape, or the length of a list of weights or pools, whose shapes are fixed."""
    return len(argument) if isinstance(argument, list | tuple) else getattr(argument, "shape", None)


LAUNCHES = LaunchCounter()  # one per process, because the limit is the backend's
