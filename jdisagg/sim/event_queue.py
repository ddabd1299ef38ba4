"""Events to come, by their times and then in the order of their pushing."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from jdisagg.core.events import TimerFired
from jdisagg.core.request import WorkerId

Timed = tuple[float, int, WorkerId, Any]


class EventQueue:
    """Timers lie apart: where all is over, those that are left are of no concern."""

    def __init__(self) -> None:
        self._heap: list[Timed] = []
        self._timers: list[Timed] = []
        self._ties = count()
        self._armed: dict[tuple[WorkerId, str], float] = {}

    def push(self, at_s: float, actor: WorkerId, event: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ties), actor, event))

    def push_first(self, at_s: float, actor: WorkerId, event: Any) -> None:
        """Before all else of its instant."""
        heapq.heappush(self._heap, (at_s, -1, actor, event))

    def set_timer(self, at_s: float, actor: WorkerId, key: str) -> None:
        """One timer a key: it replaces what was set before."""
        self.arm(at_s, actor, key)
        heapq.heappush(self._timers, (at_s, next(self._ties), actor, TimerFired(key)))

    def arm(self, at_s: float, actor: WorkerId, key: str) -> None:
        """The timer counts only if it fires at that time; whoever arms it apart from `set_timer` pushes it as well."""
        self._armed[actor, key] = at_s

    def is_armed(self, at_s: float, actor: WorkerId, key: str) -> bool:
        return self._armed.get((actor, key)) == at_s

    def disarm(self, actor: WorkerId, key: str) -> None:
        del self._armed[actor, key]

    def forget(self, which: Callable[[WorkerId, Any], bool]) -> None:
        """Nothing of these happens any more."""
        for queue in (self._heap, self._timers):
            queue[:] = [each for each in queue if not which(each[2], each[3])]
            heapq.heapify(queue)
        for actor, key in [*self._armed]:
            if which(actor, TimerFired(key)):
                del self._armed[actor, key]

    def pop(self, until_s: float, is_over: Callable[[], bool]) -> tuple[float, WorkerId, Any] | None:
        """The next thing to happen until then; None where nothing does, or only timers are left and all is over."""
        heap, timers = self._heap, self._timers
        if heap and (not timers or heap[0] < timers[0]):
            first = heap
        elif timers and (heap or not is_over()):
            first = timers
        else:
            return None
        if first[0][0] > until_s:
            return None
        at_s, _, actor, event = heapq.heappop(first)
        return at_s, actor, event
