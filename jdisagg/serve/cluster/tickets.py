"""What this process has offered and is not known to be over, so that whoever ends a handoff ends its offers as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.kv.transport.ticket import Ticket


@dataclass(frozen=True, slots=True)
class _Given:
    ticket: Ticket
    destination: WorkerId
    until_s: float  # then the offer ends by itself


class Tickets:
    """By attempt. Any thread may call; to end what is over already changes nothing."""

    def __init__(self, cancel: Callable[[Ticket], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._cancel, self._clock = cancel, clock
        self._lock = threading.Lock()
        self._given: dict[Attempt, list[_Given]] = {}

    def add(self, ticket: Ticket, destination: WorkerId, until_s: float) -> None:
        with self._lock:
            self._forget_old()
            key = Attempt(RequestId(ticket.transfer.handoff), ticket.transfer.epoch)
            self._given.setdefault(key, []).append(_Given(ticket, destination, until_s))

    def end(self, attempt: Attempt) -> None:
        with self._lock:
            given = self._given.pop(attempt, [])
        self._cancel_all(given)

    def end_for(self, destination: WorkerId) -> None:
        """The destination has gone: it pulls nothing any more, and will not say that it has pulled."""
        with self._lock:
            given = [each for rows in self._given.values() for each in rows if each.destination == destination]
        self._cancel_all(given)

    def end_all(self) -> None:
        with self._lock:
            given = [each for rows in self._given.values() for each in rows]
            self._given.clear()
        self._cancel_all(given)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(rows) for rows in self._given.values())

    def _cancel_all(self, given: list[_Given]) -> None:
        for each in given:
            self._cancel(each.ticket)

    def _forget_old(self) -> None:
        """Handoffs in the order of their first offer: those before the first that may still be open have ended."""
        now_s = self._clock()
        while self._given:
            first = next(iter(self._given))
            if self._given[first][-1].until_s >= now_s:
                return
            del self._given[first]
