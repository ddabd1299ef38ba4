"""Peers that have connected and not yet proved that they share our secret: so many at once, and each for so long.

Whoever has the secret proves it in milliseconds. So where there are too many, one of those that wait the longest is
cut off, of the host that has the most: strangers who say nothing are in nobody's way but their own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jdisagg.core.errors import PeerDead


@dataclass(eq=False, slots=True)
class _Handshake:
    host: str
    since_s: float
    cut: Callable[[], object]
    was_cut: bool = False


class PendingHandshakes:
    """At most `limit` at once, each for at most `timeout_s` seconds. Any thread may call."""

    def __init__(self, limit: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._timeout_s, self._clock = limit, timeout_s, clock
        self._lock = threading.Lock()
        self._pending: dict[_Handshake, None] = {}  # in the order they came

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def admit(self, host: str, cut: Callable[[], object]) -> Iterator[None]:
        """For the time of a handshake; `cut` ends it, from any thread. Raises PeerDead where it was called."""
        handshake = _Handshake(host, self._clock(), cut)
        with self._lock:
            self._pending[handshake] = None
            crowded = [self._take_longest()] if len(self._pending) > self._limit else []
        self._cut(crowded)
        try:
            yield
        finally:
            with self._lock:
                self._pending.pop(handshake, None)
        if handshake.was_cut:
            raise PeerDead(f"a peer of {host} was cut off in the middle of its handshake")

    def sweep(self) -> None:
        """Cuts off who has taken too long."""
        oldest_s = self._clock() - self._timeout_s
        with self._lock:
            late = [handshake for handshake in self._pending if handshake.since_s < oldest_s]
            for handshake in late:
                self._take(handshake)
        self._cut(late)

    def _take_longest(self) -> _Handshake:
        """The one that has waited longest, of the host that has the most."""
        fullest = Counter(handshake.host for handshake in self._pending).most_common(1)[0][0]
        handshake = next(handshake for handshake in self._pending if handshake.host == fullest)
        self._take(handshake)
        return handshake

    def _take(self, handshake: _Handshake) -> None:
        del self._pending[handshake]
        handshake.was_cut = True

    def _cut(self, handshakes: list[_Handshake]) -> None:
        for handshake in handshakes:
            handshake.cut()
