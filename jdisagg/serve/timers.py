"""Timers of the actors of one process: one for each key of an actor, of which the last that was set counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jdisagg.core.request import WorkerId


class Timers:
    """Used by one thread. Times are of the driver's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, WorkerId, str]] = []
        self._armed: dict[tuple[WorkerId, str], float] = {}

    def set(self, at_s: float, actor: WorkerId, key: str) -> None:
        self._armed[actor, key] = at_s
        heapq.heappush(self._heap, (at_s, actor, key))

    def wait_s(self, now_s: float) -> float | None:
        """Until the first, moved ones included; None where there is none."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None

    def due(self, now_s: float) -> Iterator[tuple[WorkerId, str]]:
        """Those whose time has come by `now_s`, in its order. What is set meanwhile counts: one may be moved away."""
        while self._heap and self._heap[0][0] <= now_s:
            at_s, actor, key = heapq.heappop(self._heap)
            if self._armed.get((actor, key)) == at_s:
                del self._armed[actor, key]
                yield actor, key
