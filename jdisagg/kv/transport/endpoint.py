"""The endpoint: what all transports between processes share. How the bytes themselves move is a `Backend`.

The source answers at its listener: PULL is answered once the arrays are computed, then the backend is sent over the
same connection; ACK, CANCEL and ASK are one round trip. A pull that breaks off in the middle ends its offer, since a
closed connection tells the source at once, and the destination then asks what became of it.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

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
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection_pool import ConnectionPool
from jdisagg.kv.transport.deadlines import Deadlines
from jdisagg.kv.transport.listener import Listener
from jdisagg.kv.transport.offers import Ended, Offer, OfferTable
from jdisagg.kv.transport.protocol import Held
from jdisagg.kv.transport.ticket import Parcel, Ticket, issue, verify
from jdisagg.kv.transport.wire import Wire

REFUSALS = {each.__name__: each for each in (TransferRefused, TransferFull, TransferTimeout, TransferCancelled)}


class Backend(Protocol):
    """How the bytes of a granted offer move. Any thread may call; what blocks is under a deadlines."""

    name: str

    def listen(self) -> tuple[socket.socket, str]:
        """Where the listener stands, and its address."""
        ...

    def prepare_offer(self, offer: Offer) -> None:
        """Source, at the offer: prepares without waiting. May raise TransferFull."""
        ...

    def grant(self, offer: Offer, wire: Wire) -> dict[str, Any]:
        """Source: waits until the offer can be sent; what the destination must know to receive it."""
        ...

    def send(self, offer: Offer, wire: Wire) -> None:
        """Source, after the grant."""
        ...

    def prepare(self, ticket: Ticket) -> Any:
        """Destination, before it asks: whatever `receive` needs room for. May raise TransferFull."""
        ...

    def receive(
        self, ticket: Ticket, room: Any, grant: dict[str, Any], wire: Wire, devices: Sequence[Any], p: Deadlines
    ) -> list[Array]:
        """Destination: the arrays, in place."""
        ...

    def abandon(self, room: Any) -> None:
        """Destination: `receive` will not be called, or failed."""
        ...

    def may_ack(self, ticket: Ticket) -> bool:
        """Destination: whether the source may have its memory back now."""
        ...

    def release(self, offer: Offer, how: Ended) -> None:
        """Source, once at the offer's end."""
        ...

    def sweep(self) -> None:
        """About twice a second."""
        ...

    @property
    def pull_bytes(self) -> int: ...

    def close(self) -> None: ...


class Endpoint:
    """A `Transport` between processes that carries one kind of backend."""

    def __init__(self, terms: TransportConfig, backend: Backend) -> None:
        self.terms, self.backend, self.name = terms, backend, backend.name
        self._offers = OfferTable(terms.offer_limit_bytes, terms.clock, backend.release)
        self._lines = ConnectionPool(terms)
        self._lock = threading.Lock()
        self._pulls: dict[int, tuple[Deadlines, list[Wire]]] = {}
        self._late_acks: dict[int, Ticket] = {}
        listener, self.address = backend.listen()
        self._listener = Listener(listener, terms, self._serve, self._tick)

    def offer(self, parcel: Parcel, arrays: Sequence[Array], deadline_s: float) -> Ticket:
        ticket = issue(self.name, self.address, parcel, arrays, self.terms.secret)
        offer = self._offers.add(ticket, list(arrays), deadline_s)
        try:
            self.backend.prepare_offer(offer)
        except BaseException:
            self._offers.end(ticket.id, Ended.CANCELLED)
            raise
        return ticket

    def pull(self, ticket: Ticket, devices: Sequence[Any], deadline_s: float) -> list[Array]:
        verify(ticket, self.terms.secret)
        if ticket.transport != self.name:
            raise TransferRefused(f"ticket {ticket.id} is for transport {ticket.transport!r}, this is {self.name!r}")
        assert len(devices) == len(ticket.arrays), (len(devices), len(ticket.arrays))
        deadlines = Deadlines(f"pull {ticket.id} of {ticket.parcel.handoff!r}", deadline_s, self.terms.clock)
        deadlines.left_s()
        self._flush_acks()
        with self._lock:
            if ticket.id in self._pulls:
                raise TransferRefused(f"ticket {ticket.id} is being pulled already")
            self._pulls[ticket.id] = deadlines, []
        try:
            return self._pull(ticket, devices, deadlines)
        finally:
            with self._lock:
                del self._pulls[ticket.id]

    def _pull(self, ticket: Ticket, devices: Sequence[Any], deadlines: Deadlines) -> list[Array]:
        room = self.backend.prepare(ticket)
        try:
            request = {"do": "pull", "id": ticket.id, "tag": ticket.tag}
            wire, grant = self._lines.ask(ticket.address, request, deadlines)
            with self._closed_on_failure(ticket, wire):
                raise_refusal(grant)
                lands_s = self._lands_s(ticket, grant)
                arrays = self.backend.receive(ticket, room, grant, wire, devices, deadlines)
                deadlines.wait_until(lands_s)
        except PeerDead as error:
            self.backend.abandon(room)
            raise self._autopsy(ticket, deadlines, error) from error
        except BaseException:
            self.backend.abandon(room)
            raise
        self._lines.give_back(ticket.address, wire)
        return arrays

    def _lands_s(self, ticket: Ticket, grant: dict[str, Any]) -> float:
        """When the bytes will be here at the earliest: at once, or as the emulated link says.

        What the source did with the bytes before its grant is part of the transfer, not of the wait for them.
        """
        if self.terms.link is None:
            return 0.0
        copied_s = grant.get("copied_s", 0.0)
        if not isinstance(copied_s, float) or copied_s < 0:
            raise BadTicket(f"the source granted {ticket.id} with a time of {str(copied_s)[:40]!r}")
        return self.terms.link.send(self.terms.clock() - copied_s, ticket.nbytes)

    @contextlib.contextmanager
    def _closed_on_failure(self, ticket: Ticket, wire: Wire):
        """The wire can be cut by `cancel`; a refusal leaves it whole, anything else ends it and so tells the source."""
        self._pulls[ticket.id][1].append(wire)
        try:
            yield
        except TransferRefused:
            self._lines.give_back(ticket.address, wire)
            raise
        except BaseException:
            wire.close()
            raise

    def _autopsy(self, ticket: Ticket, deadlines: Deadlines, error: PeerDead) -> TransportError:
        """Why the source hung up: it tells, if it lives."""
        deadline_s = min(deadlines.deadline_s, self.terms.clock() + self.terms.control_timeout_s)
        try:
            reply = self._control("ask", ticket, deadline_s)
        except TransportError:
            return error
        kinds = {Ended.CANCELLED: TransferCancelled, Ended.EXPIRED: TransferTimeout}
        end = str(reply.get("ended", ""))
        return kinds[Ended(end)](f"{deadlines.what}: the source ended it: {end}") if end in kinds else error

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
            deadlines, wires = self._pulls.get(ticket.id, (None, []))
            self._late_acks.pop(ticket.id, None)
        if deadlines is not None:
            deadlines.call_off("cancelled here")
            for wire in wires:
                wire.cut()
        if ticket.address == self.address:
            self._offers.end(ticket.id, Ended.CANCELLED)
            return True
        return self._tell("cancel", ticket)

    def expire(self, now_s: float) -> list[Ticket]:
        self._lines.sweep(now_s)
        self.backend.sweep()
        self._flush_acks()
        return self._offers.expire(now_s)

    def held(self) -> Held:
        connections = self._listener.connections + self._lines.connections
        return Held(len(self._offers), self._offers.held_bytes, self.backend.pull_bytes, connections)

    def close(self) -> None:
        with self._lock:
            pulls = list(self._pulls.values())
        for deadlines, wires in pulls:
            deadlines.call_off("the transport is closing")
            for wire in wires:
                wire.cut()
        self._offers.end_all()
        self._listener.close()
        self._lines.close()
        self.backend.close()

    def _tick(self) -> None:
        self.expire(self.terms.clock())

    def _flush_acks(self) -> None:
        with self._lock:
            ready = [ticket for ticket in self._late_acks.values() if self.backend.may_ack(ticket)]
            for ticket in ready:
                del self._late_acks[ticket.id]
        for ticket in ready:
            self._tell("ack", ticket)

    def _tell(self, what: str, ticket: Ticket) -> bool:
        try:
            self._control(what, ticket, self.terms.clock() + self.terms.control_timeout_s)
        except TransportError:
            return False  # the source's own deadline ends the offer
        return True

    def _control(self, what: str, ticket: Ticket, deadline_s: float) -> dict[str, Any]:
        verify(ticket, self.terms.secret)
        deadlines = Deadlines(f"{what} {ticket.id}", deadline_s, self.terms.clock)
        request = {"do": what, "id": ticket.id, "tag": ticket.tag}
        wire, reply = self._lines.ask(ticket.address, request, deadlines)
        self._lines.give_back(ticket.address, wire)
        return reply

    def _serve(self, wire: Wire, record: dict[str, Any]) -> None:
        """One request at the listener, in its connection's thread."""
        what, number, tag = record.get("do"), record.get("id"), record.get("tag")
        if not isinstance(number, int) or not isinstance(tag, str):
            raise BadTicket(f"{wire.peer} asks {str(record)[:80]}, which names no ticket")
        reply = Deadlines(f"answer to {wire.peer}", self.terms.clock() + self.terms.control_timeout_s, self.terms.clock)
        ended = self._offers.ended(number)
        if ended is None and not hmac.compare_digest(tag.encode(), self._offers.tag_of(number).encode()):
            wire.send_record(refusal(TransferRefused(f"offer {number} is unknown here")), reply)
        elif what == "pull":
            self._serve_pull(wire, number, reply)
        elif what in ("ack", "cancel"):
            self._offers.end(number, Ended.ACKED if what == "ack" else Ended.CANCELLED)
            wire.send_record({}, reply)
        elif what == "ask":
            wire.send_record({"ended": ended or ""}, reply)
        else:
            raise BadTicket(f"{wire.peer} asks for {str(what)[:40]!r}, which is none of pull, ack, cancel, ask")

    def _serve_pull(self, wire: Wire, number: int, reply: Deadlines) -> None:
        try:
            offer = self._offers.grant(number)
        except TransferRefused as error:
            wire.send_record(refusal(error), reply)
            return
        try:
            wire.send_record(self.backend.grant(offer, wire), offer.deadlines)
            self.backend.send(offer, wire)
        except BaseException as error:
            self._offers.end(number, Ended.BROKEN)
            if isinstance(error, TransferRefused):  # the arrays are lost; nothing of the backend has been sent
                wire.send_record(refusal(error), reply)
                return
            raise


def refusal(error: TransportError) -> dict[str, Any]:
    return {"refused": type(error).__name__, "detail": str(error)}


def raise_refusal(reply: dict[str, Any]) -> None:
    """Raises what the source's answer says, in its words."""
    if "refused" in reply:
        kind = REFUSALS.get(str(reply["refused"]), TransferRefused)
        raise kind(f"the source refuses: {str(reply.get('detail'))[:400]}")
