"""Peers that have connected and not yet proved that they share our secret: so many at once, and each for so long.

Whoever has the secret proves it in milliseconds. So where all seats are taken it is one of those who have sat the
longest, of the host that sends the most, that has to go: strangers who say nothing are in nobody's way but their own.
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
class _Guest:
    host: str
    since_s: float
    show_out: Callable[[], object]
    is_out: bool = False


class Lobby:
    """At most `seats` guests at once, each for at most `patience_s` seconds. Any thread may call."""

    def __init__(self, seats: int, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seats, self._patience_s, self._clock = seats, patience_s, clock
        self._lock = threading.Lock()
        self._guests: dict[_Guest, None] = {}  # in the order they came

    def __len__(self) -> int:
        return len(self._guests)

    @contextmanager
    def seat(self, host: str, show_out: Callable[[], object]) -> Iterator[None]:
        """For the time of a handshake; `show_out` ends it, from any thread. Raises PeerDead where it was called."""
        guest = _Guest(host, self._clock(), show_out)
        with self._lock:
            self._guests[guest] = None
            crowded = [self._take_longest()] if len(self._guests) > self._seats else []
        self._show_out(crowded)
        try:
            yield
        finally:
            with self._lock:
                self._guests.pop(guest, None)
        if guest.is_out:
            raise PeerDead(f"a guest of {host} was shown out in the middle of its handshake")

    def sweep(self) -> None:
        """Shows out who was here too long."""
        oldest_s = self._clock() - self._patience_s
        with self._lock:
            late = [guest for guest in self._guests if guest.since_s < oldest_s]
            for guest in late:
                self._take(guest)
        self._show_out(late)

    def _take_longest(self) -> _Guest:
        """Who has sat longest, of the host that most guests are of."""
        fullest = Counter(guest.host for guest in self._guests).most_common(1)[0][0]
        guest = next(guest for guest in self._guests if guest.host == fullest)
        self._take(guest)
        return guest

    def _take(self, guest: _Guest) -> None:
        del self._guests[guest]
        guest.is_out = True

    def _show_out(self, guests: list[_Guest]) -> None:
        for guest in guests:
            guest.show_out()
