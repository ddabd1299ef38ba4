"""The source's side of an endpoint: what it has on offer, and its answers to whoever pulls, acks, cancels or asks."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

from jax import Array

from jdisagg.core.errors import BadTicket, TransferRefused, TransportError
from jdisagg.kv.transport.backend import Backend
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.offers import Ended, OfferTable
from jdisagg.kv.transport.ticket import Ticket


class OfferServer:
    """`offers` is the table; `answer` serves one request. Any thread may call."""

    def __init__(self, config: TransportConfig, backend: Backend) -> None:
        self._config, self._backend = config, backend
        self.offers = OfferTable(config.offer_limit_bytes, config.clock, backend.release)

    def add(self, ticket: Ticket, arrays: Sequence[Array], deadline_s: float) -> None:
        """Holds the arrays for the ticket. Raises TransferFull; then nothing is held."""
        offer = self.offers.add(ticket, list(arrays), deadline_s)
        try:
            self._backend.prepare_offer(offer)
        except BaseException:
            self.offers.end(ticket.id, Ended.CANCELLED)
            raise

    def answer(self, connection: Connection, record: dict[str, Any]) -> None:
        """One request at the listener, in its connection's thread."""
        what, number, tag = record.get("do"), record.get("id"), record.get("tag")
        if not isinstance(number, int) or not isinstance(tag, str):
            raise BadTicket(f"{connection.peer} asks {str(record)[:80]}, which names no ticket")
        until_s = self._config.clock() + self._config.control_timeout_s
        reply = Deadline(f"answer to {connection.peer}", until_s, self._config.clock)
        ended = self.offers.ended(number)
        if ended is None and not hmac.compare_digest(tag.encode(), self.offers.tag_of(number).encode()):
            connection.send_record(refusal(TransferRefused(f"offer {number} is unknown here")), reply)
        elif what == "pull":
            self._answer_pull(connection, number, reply)
        elif what in ("ack", "cancel"):
            self.offers.end(number, Ended.ACKED if what == "ack" else Ended.CANCELLED)
            connection.send_record({}, reply)
        elif what == "ask":
            connection.send_record({"ended": ended or ""}, reply)
        else:
            raise BadTicket(f"{connection.peer} asks for {str(what)[:40]!r}, which is none of pull, ack, cancel, ask")

    def _answer_pull(self, connection: Connection, number: int, reply: Deadline) -> None:
        try:
            offer = self.offers.grant(number)
        except TransferRefused as error:
            connection.send_record(refusal(error), reply)
            return
        try:
            connection.send_record(self._backend.grant(offer, connection), offer.deadline)
            self._backend.send(offer, connection)
        except BaseException as error:
            self.offers.end(number, Ended.BROKEN)
            if isinstance(error, TransferRefused):  # the arrays are lost; nothing of the backend has been sent
                connection.send_record(refusal(error), reply)
                return
            raise


def refusal(error: TransportError) -> dict[str, Any]:
    return {"refused": type(error).__name__, "detail": str(error)}
