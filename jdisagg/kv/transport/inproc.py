"""The transport within one process: every array goes to its device by asynchronous `device_put`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from jdisagg.core.errors import TransferRefused
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Deadline
from jdisagg.kv.transport.listener import Offer, OfferOutcome, OfferTable
from jdisagg.kv.transport.ticket import Held, Ticket, TransferId, issue, verify


class InprocTransport:
    """The transport whose two ends are this object. `pull` returns before the arrays have arrived or been computed."""

    name = "inproc"

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.address = f"inproc:{secrets.token_hex(8)}"
        self._offers = OfferTable(config.offer_limit_bytes, config.clock, _release_nothing)

    def offer(self, transfer: TransferId, arrays: Sequence[Array], deadline_s: float) -> Ticket:
        ticket = issue(self.name, self.address, transfer, arrays, self.config.secret)
        self._offers.add(ticket, list(arrays), deadline_s)
        return ticket

    def pull(self, ticket: Ticket, devices: Sequence[Any], deadline_s: float) -> list[Array]:
        verify(ticket, self.config.secret)
        if ticket.address != self.address:
            raise TransferRefused(f"ticket {ticket.id} is for {ticket.address!r} and not for {self.address!r}")
        assert len(devices) == len(ticket.arrays), (len(devices), len(ticket.arrays))
        self._offers.expire(self.config.clock())
        deadline = Deadline(f"pull {ticket.id}", deadline_s, self.config.clock)
        deadline.left_s()
        offer = self._offers.grant(ticket.id)
        sources = list(offer.arrays)
        try:
            arrays_there = jax.device_put(sources, list(devices))
        except RuntimeError as error:
            self._offers.end(ticket.id, OfferOutcome.BROKEN)
            raise TransferRefused(f"pull {ticket.id}: an offered array is lost ({error})") from error
        if self.config.link is not None:
            self._wait_for_link(offer, sources, deadline)
        return arrays_there

    def _wait_for_link(self, offer: Offer, sources: list[Array], deadline: Deadline) -> None:
        """Waits as long as the emulated link would take, from the moment the arrays are computed."""
        assert self.config.link is not None
        offer.on_end = lambda: deadline.call_off("the ticket ended")
        if offer.deadline.is_off:  # ended before `on_end` was set
            offer.on_end()
        deadline.wait_computed(sources)
        deadline.wait_until(self.config.link.send(self.config.clock(), offer.ticket.nbytes))

    def ack(self, ticket: Ticket) -> bool:
        self._offers.end(ticket.id, OfferOutcome.ACKED)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        self._offers.end(ticket.id, OfferOutcome.CANCELLED)
        return True

    def expire(self, now_s: float) -> list[Ticket]:
        return self._offers.expire(now_s)

    def held(self) -> Held:
        return Held(len(self._offers), self._offers.held_bytes, 0, 0)

    def close(self) -> None:
        self._offers.end_all()


def _release_nothing(_offer: Offer, _how: OfferOutcome) -> None:
    """Does nothing; the table drops the arrays itself."""
