"""How many multi-device programs may be in flight: the one place that counts them.

On the CPU backend more than 32 un-awaited multi-device programs can starve each other's collectives of threads for
ever. Every such launch of this process passes here, and the launcher waits for the oldest beyond the limit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

MAX_IN_FLIGHT = 16


class Pace:
    """Counts launches by one result of each that nobody donates."""

    def __init__(self, limit: int = MAX_IN_FLIGHT) -> None:
        self.limit = limit
        self.observers: list[Callable[[str], None]] = []  # told of each launch: its program, and the shapes it is for
        self._results: deque[jax.Array] = deque()

    def launched(self, result: jax.Array, name: str = "", arguments: Sequence[Any] = ()) -> None:
        """Notes a multi-device program by `result`; blocks while more than the limit are in flight."""
        for observer in self.observers:
            observer(f"{name} {[_outline(each) for each in arguments]}")
        self._results.append(result)
        while len(self._results) > self.limit:
            jax.block_until_ready(self._results.popleft())

    @property
    def in_flight(self) -> int:
        """Upper bound: launches noted and not yet waited for."""
        return len(self._results)


def _outline(argument: Any) -> Any:
    """Of a batch's array its shape, of weights and pools how many there are: theirs do not change."""
    return len(argument) if isinstance(argument, list | tuple) else getattr(argument, "shape", None)


LAUNCHES = Pace()  # of this process: the limit is the backend's, whatever machines share it
