"""The endpoint: what all transports between processes share. How the bytes themselves move is a `Backend`.

The source answers at its listener: PULL is answered once the arrays are computed, then the backend is sent over the
same connection; ACK, CANCEL and ASK are one round trip. A pull that breaks off in the middle ends its offer, since a
closed connection tells the source at once, and the destination then asks what became of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from jax import Array

from jdisagg.core.errors import (
    BadTicket,
    PeerDead,
    TransferCancelled,
    TransferFull,
    TransferRefused,
    TransferTimeout,
    TransportError,
)
from jdisagg.kv.transport.backend import Backend
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection
from jdisagg.kv.transport.connection_pool import ConnectionPool
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.listener import Listener
from jdisagg.kv.transport.offer_server import OfferServer
from jdisagg.kv.transport.offers import Ended
from jdisagg.kv.transport.protocol import Held
from jdisagg.kv.transport.ticket import Ticket, TransferId, issue, verify

REFUSALS = {each.__name__: each for each in (TransferRefused, TransferFull, TransferTimeout, TransferCancelled)}


class Endpoint:
    """A `Transport` between processes that carries one kind of backend."""

    def __init__(self, config: TransportConfig, backend: Backend) -> None:
        self.config, self.backend, self.name = config, backend, backend.name
        self._server = OfferServer(config, backend)
        self._offers = self._server.offers
        self._pool = ConnectionPool(config)
        self._lock = threading.Lock()
        self._pulls: dict[int, tuple[Deadline, list[Connection]]] = {}
        self._late_acks: dict[int, Ticket] = {}
        listener, self.address = backend.listen()
        self._listener = Listener(listener, config, self._server.answer, self._tick)

    def offer(self, transfer: TransferId, arrays: Sequence[Array], deadline_s: float) -> Ticket:
        ticket = issue(self.name, self.address, transfer, arrays, self.config.secret)
        self._server.add(ticket, arrays, deadline_s)
        return ticket

    def pull(self, ticket: Ticket, devices: Sequence[Any], deadline_s: float) -> list[Array]:
        verify(ticket, self.config.secret)
        if ticket.transport != self.name:
            raise TransferRefused(f"ticket {ticket.id} is for transport {ticket.transport!r}, this is {self.name!r}")
        assert len(devices) == len(ticket.arrays), (len(devices), len(ticket.arrays))
        deadline = Deadline(f"pull {ticket.id} of {ticket.transfer.handoff!r}", deadline_s, self.config.clock)
        deadline.left_s()
        self._flush_acks()
        with self._lock:
            if ticket.id in self._pulls:
                raise TransferRefused(f"ticket {ticket.id} is being pulled already")
            self._pulls[ticket.id] = deadline, []
        try:
            return self._pull(ticket, devices, deadline)
        finally:
            with self._lock:
                del self._pulls[ticket.id]

    def _pull(self, ticket: Ticket, devices: Sequence[Any], deadline: Deadline) -> list[Array]:
        room = self.backend.prepare(ticket)
        try:
            request = {"do": "pull", "id": ticket.id, "tag": ticket.tag}
            connection, grant = self._pool.ask(ticket.address, request, deadline)
            with self._closed_on_failure(ticket, connection):
                raise_refusal(grant)
                lands_s = self._lands_s(ticket, grant)
                arrays = self.backend.receive(ticket, room, grant, connection, devices, deadline)
                deadline.wait_until(lands_s)
        except PeerDead as error:
            self.backend.abandon(room)
            raise self._diagnosis(ticket, deadline, error) from error
        except BaseException:
            self.backend.abandon(room)
            raise
        self._pool.give_back(ticket.address, connection)
        return arrays

    def _lands_s(self, ticket: Ticket, grant: dict[str, Any]) -> float:
        """When the bytes will be here at the earliest: at once, or as the emulated link says.

        What the source did with the bytes before its grant is part of the transfer, not of the wait for them.
        """
        if self.config.link is None:
            return 0.0
        copied_s = grant.get("copied_s", 0.0)
        if not isinstance(copied_s, float) or copied_s < 0:
            raise BadTicket(f"the source granted {ticket.id} with a time of {str(copied_s)[:40]!r}")
        return self.config.link.send(self.config.clock() - copied_s, ticket.nbytes)

    @contextlib.contextmanager
    def _closed_on_failure(self, ticket: Ticket, connection: Connection):
        """`cancel` can cut the connection; a refusal leaves it whole, anything else ends it and so tells the source."""
        self._pulls[ticket.id][1].append(connection)
        try:
            yield
        except TransferRefused:
            self._pool.give_back(ticket.address, connection)
            raise
        except BaseException:
            connection.close()
            raise

    def _diagnosis(self, ticket: Ticket, deadline: Deadline, error: PeerDead) -> TransportError:
        """Why the source hung up: it tells, if it lives."""
        deadline_s = min(deadline.deadline_s, self.config.clock() + self.config.control_timeout_s)
        try:
            reply = self._control("ask", ticket, deadline_s)
        except TransportError:
            return error
        kinds = {Ended.CANCELLED: TransferCancelled, Ended.EXPIRED: TransferTimeout}
        end = str(reply.get("ended", ""))
        return kinds[Ended(end)](f"{deadline.what}: the source ended it: {end}") if end in kinds else error

    def ack(self, ticket: Ticket) -> bool:
        assert ticket.id not in self._pulls, f"ticket {ticket.id} was acked while it is being pulled"
        if ticket.address == self.address:
            self._offers.end(ticket.id, Ended.ACKED_HERE)
            return True
        if self.backend.may_ack(ticket):
            return self._tell("ack", ticket)
        with self._lock:
            self._late_acks[ticket.id] = ticket
        return True

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            deadline, connections = self._pulls.get(ticket.id, (None, []))
            self._late_acks.pop(ticket.id, None)
        if deadline is not None:
            deadline.call_off("cancelled here")
            for connection in connections:
                connection.cut()
        if ticket.address == self.address:
            self._offers.end(ticket.id, Ended.CANCELLED)
            return True
        return self._tell("cancel", ticket)

    def expire(self, now_s: float) -> list[Ticket]:
        self._pool.sweep(now_s)
        self.backend.sweep()
        self._flush_acks()
        return self._offers.expire(now_s)

    def held(self) -> Held:
        connections = self._listener.connections + self._pool.connections
        return Held(len(self._offers), self._offers.held_bytes, self.backend.pull_bytes, connections)

    def close(self) -> None:
        with self._lock:
            pulls = list(self._pulls.values())
        for deadline, connections in pulls:
            deadline.call_off("the transport is closing")
            for connection in connections:
                connection.cut()
        self._offers.end_all()
        self._listener.close()
        self._pool.close()
        self.backend.close()

    def _tick(self) -> None:
        self.expire(self.config.clock())

    def _flush_acks(self) -> None:
        with self._lock:
            ready = [ticket for ticket in self._late_acks.values() if self.backend.may_ack(ticket)]
            for ticket in ready:
                del self._late_acks[ticket.id]
        for ticket in ready:
            self._tell("ack", ticket)

    def _tell(self, what: str, ticket: Ticket) -> bool:
        try:
            self._control(what, ticket, self.config.clock() + self.config.control_timeout_s)
        except TransportError:
            return False  # the source's own deadline ends the offer
        return True

    def _control(self, what: str, ticket: Ticket, deadline_s: float) -> dict[str, Any]:
        verify(ticket, self.config.secret)
        deadline = Deadline(f"{what} {ticket.id}", deadline_s, self.config.clock)
        request = {"do": what, "id": ticket.id, "tag": ticket.tag}
        connection, reply = self._pool.ask(ticket.address, request, deadline)
        self._pool.give_back(ticket.address, connection)
        return reply


def raise_refusal(reply: dict[str, Any]) -> None:
    """Raises what the source's answer says, in its words."""
    if "refused" in reply:
        kind = REFUSALS.get(str(reply["refused"]), TransferRefused)
        raise kind(f"the source refuses: {str(reply.get('detail'))[:400]}")
