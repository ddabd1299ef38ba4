"""The source's ledger: every offer from its making to its one end, with its bytes, and why it ended."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jax import Array

from jdisagg.core.errors import TransferFull, TransferRefused
from jdisagg.kv.transport.deadline import Clock, Deadline
from jdisagg.kv.transport.ticket import Ticket

REMEMBERED = 4096  # ended offers whose end a late pull is told


class Ended(StrEnum):
    ACKED = "acked"  # the destination says so, and that it reads no memory of ours any more
    ACKED_HERE = "acked at the source"  # the destination may still read what it adopted
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    BROKEN = "broken off"  # the peer went away, or the arrays were lost, in the middle


@dataclass(eq=False, slots=True)
class Offer:
    """One ticket's arrays. `deadline` is called off when the offer ends, so whoever works on it stops."""

    ticket: Ticket
    arrays: list[Array]
    deadline: Deadline
    pulled: bool = False
    staged: Any = None  # what the transport keeps with it
    on_end: Callable[[], None] | None = None  # wakes a pull of the same process


class OfferTable:
    """Offers by id. Any thread may call; `release(offer, how)` runs once per offer, outside the lock."""

    def __init__(self, limit_bytes: int, clock: Clock, release: Callable[[Offer, Ended], None]) -> None:
        self.limit_bytes, self._clock, self._release = limit_bytes, clock, release
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}
        self._past: OrderedDict[int, Ended] = OrderedDict()

    def add(self, ticket: Ticket, arrays: list[Array], deadline_s: float) -> Offer:
        """Raises TransferFull where the bytes would go over the limit."""
        deadline = Deadline(f"offer {ticket.id} of {ticket.transfer.handoff!r}", deadline_s, self._clock)
        offer = Offer(ticket, arrays, deadline)
        with self._lock:
            held_bytes = sum(each.ticket.nbytes for each in self._offers.values())
            if held_bytes + ticket.nbytes > self.limit_bytes:
                raise TransferFull(
                    f"{ticket.nbytes} bytes to offer beside {held_bytes} held is over the limit of {self.limit_bytes}"
                )
            self._offers[ticket.id] = offer
        return offer

    def grant(self, number: int) -> Offer:
        """The offer, now pulled. Raises TransferRefused: there is none, it has ended, or it was pulled before."""
        with self._lock:
            offer = self._offers.get(number)
            if offer is None:
                end = self._past.get(number)
                raise TransferRefused(f"offer {number} {f'has ended: {end}' if end else 'is unknown here'}")
            if offer.pulled:
                raise TransferRefused(f"offer {number} was pulled before; a ticket is good for one pull")
            offer.pulled = True
        return offer

    def end(self, number: int, how: Ended) -> bool:
        """Whether this was its end: False where it had ended before or was never there."""
        with self._lock:
            offer = self._offers.pop(number, None)
            if offer is None:
                return False
            self._past[number] = how
            while len(self._past) > REMEMBERED:
                self._past.popitem(last=False)
        offer.deadline.call_off(how)
        if offer.on_end is not None:
            offer.on_end()
        self._release(offer, how)
        offer.arrays.clear()
        return True

    def expire(self, now_s: float) -> list[Ticket]:
        """Ends what is past its deadline."""
        with self._lock:
            due = [each.ticket for each in self._offers.values() if each.deadline.deadline_s <= now_s]
        return [ticket for ticket in due if self.end(ticket.id, Ended.EXPIRED)]

    def end_all(self) -> None:
        with self._lock:
            left = list(self._offers)
        for number in left:
            self.end(number, Ended.CANCELLED)

    def ended(self, number: int) -> Ended | None:
        """How it ended, where that is still remembered."""
        with self._lock:
            return self._past.get(number)

    def tag_of(self, number: int) -> str:
        """The offer's tag; where there is none, a text that no tag equals."""
        with self._lock:
            offer = self._offers.get(number)
            return offer.ticket.tag if offer else "none"

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(offer.ticket.nbytes for offer in self._offers.values())
