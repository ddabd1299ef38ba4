"""The endpoint that all transports between processes share. A `TransportBackend` moves the bytes.

The source answers at its listener: PULL is answered once the arrays are computed, then the backend sends over the
same connection; ACK, CANCEL and ASK are one round trip each. A pull that breaks off ends its offer, since the closed
connection informs the source at once, and the destination then asks for the reason.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from jax import Array

from jdisagg.core.errors import (
    BadTicket,
    PeerDead,
    PeerMismatch,
    TransferCancelled,
    TransferFull,
    TransferRefused,
    TransferTimeout,
    TransportError,
)
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Deadline, KVConnection, tune
from jdisagg.kv.transport.listener import Listener, Offer, OfferOutcome, OfferTable, greet, split_address
from jdisagg.kv.transport.ticket import Held, Ticket, TransferId, issue, verify

# The part that differs between transports: how the bytes move.


class TransportBackend(Protocol):
    """The data path of one transport. Any thread may call; calls that block take a deadline."""

    name: str

    def listen(self) -> tuple[socket.socket, str]:
        """Returns the listening socket and its address."""
        ...

    def prepare_offer(self, offer: Offer) -> None:
        """Source, at the offer: prepares without waiting. May raise TransferFull."""
        ...

    def grant(self, offer: Offer, connection: KVConnection) -> dict[str, Any]:
        """Source: waits until the offer can be sent; returns what the destination needs to receive it."""
        ...

    def send(self, offer: Offer, connection: KVConnection) -> None:
        """Source, after the grant: sends the bytes."""
        ...

    def prepare(self, ticket: Ticket) -> Any:
        """Destination, before the request: reserves room for `receive`. May raise TransferFull."""
        ...

    def receive(
        self,
        ticket: Ticket,
        room: Any,
        grant: dict[str, Any],
        connection: KVConnection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        """Destination: returns the arrays on `devices`."""
        ...

    def abandon(self, room: Any) -> None:
        """Destination: frees the room after `receive` failed or if it will not be called."""
        ...

    def may_ack(self, ticket: Ticket) -> bool:
        """Destination: returns True if the source may reuse its memory now."""
        ...

    def release(self, offer: Offer, how: OfferOutcome) -> None:
        """Source: frees what the offer holds, called once at its end."""
        ...

    def sweep(self) -> None:
        """Frees what is no longer used; called about twice a second."""
        ...

    @property
    def pull_bytes(self) -> int: ...

    def close(self) -> None: ...


# The destination's pool of connections to sources, reused, and opened again after a source restarted.

UNIX = "unix:"  # prefix of the name of an abstract socket


class ConnectionPool:
    """Idle connections by address; a connection belongs to its caller from `ask` until `give_back` or its end."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[KVConnection, float]]] = {}
        self._closed = False

    def ask(self, address: str, record: dict[str, Any], deadline: Deadline) -> tuple[KVConnection, dict[str, Any]]:
        """Returns the reply and its connection. An idle connection that has died is replaced by a new one, once."""
        idle = self._take(address)
        if idle is not None:
            try:
                return idle, exchange(idle, record, deadline)
            except PeerDead:
                self._drop(address)
        connection = self._open(address, deadline)
        return connection, exchange(connection, record, deadline)

    def give_back(self, address: str, connection: KVConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(address, []).append((connection, self._config.clock()))
                return
        connection.close()

    def sweep(self, now_s: float) -> None:
        """Closes connections that were idle too long."""
        oldest_s = now_s - self._config.idle_timeout_s
        with self._lock:
            stale = [
                connection
                for connections in self._idle.values()
                for connection, since_s in connections
                if since_s < oldest_s
            ]
            fresh = {
                at: [each for each in connections if each[1] >= oldest_s] for at, connections in self._idle.items()
            }
            self._idle = {at: connections for at, connections in fresh.items() if connections}
        for connection in stale:
            connection.close()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            addresses = list(self._idle)
        for address in addresses:
            self._drop(address)

    @property
    def connections(self) -> int:
        with self._lock:
            return sum(len(connections) for connections in self._idle.values())

    def _take(self, address: str) -> KVConnection | None:
        with self._lock:
            connections = self._idle.get(address)
            return connections.pop()[0] if connections else None

    def _drop(self, address: str) -> None:
        """Closes all idle connections to a source, which are stale once one of them has died."""
        with self._lock:
            connections = self._idle.pop(address, [])
        for connection, _ in connections:
            connection.close()

    def _open(self, address: str, deadline: Deadline) -> KVConnection:
        deadline_s = min(deadline.deadline_s, self._config.clock() + self._config.control_timeout_s)
        sock = connect(address, deadline, deadline_s)
        connection = KVConnection(sock, f"the source at {address}")
        try:
            self._secure(connection, address, deadline)
            self._handshake(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _handshake(self, connection: KVConnection, deadline: Deadline) -> None:
        """Runs the handshake within the time of a control message, so that a silent source fails the pull early."""
        most_s = self._config.control_timeout_s
        try:
            greet(connection, self._config, deadline.within(most_s))
        except TransferTimeout as error:
            deadline.left_s()  # raises if the whole pull is over
            raise PeerDead(f"{deadline.what}: {connection.peer} did not greet us within {most_s:g} s") from error

    def _secure(self, connection: KVConnection, address: str, deadline: Deadline) -> None:
        if self._config.tls_client is not None and not address.startswith(UNIX):
            connection.socket.settimeout(min(deadline.left_s(), self._config.control_timeout_s))
            try:
                connection.socket = self._config.tls_client.wrap_socket(
                    connection.socket, server_hostname=split_address(address)[0]
                )
            except (ssl.SSLError, OSError) as error:
                raise PeerMismatch(f"no TLS with {connection.peer}: {error}") from error


def exchange(connection: KVConnection, record: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
    """Sends a request and returns its reply; closes the connection if either fails."""
    try:
        connection.send_record(record, deadline)
        return connection.receive_record(deadline)
    except BaseException:
        connection.close()
        raise


def connect(address: str, deadline: Deadline, deadline_s: float) -> socket.socket:
    """Returns a connected socket. Raises PeerDead if there is no answer by the deadline, or what `deadline` raises."""
    family, target = _target(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect_ex(target)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(1000 * deadline.slice_s()):
            if deadline.clock() >= deadline_s:
                raise PeerDead(f"{deadline.what}: nobody answers at {address}")
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerDead(f"{deadline.what}: nobody answers at {address} ({os.strerror(code)})")
        tune(sock)
        return sock
    except BaseException:
        sock.close()
        raise


def _target(address: str) -> tuple[socket.AddressFamily, Any]:
    if address.startswith(UNIX):
        return socket.AF_UNIX, "\0" + address.removeprefix(UNIX)
    host, port = split_address(address)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerDead(f"the host of {address} is not known ({error})") from error
    return addresses[0][0], addresses[0][4]


# The source's half of an endpoint: its offers, and its replies to pull, ack, cancel and ask.


class OfferServer:
    """Answers requests about the offers in `offers`. Any thread may call."""

    def __init__(self, config: TransportConfig, backend: TransportBackend) -> None:
        self._config, self._backend = config, backend
        self.offers = OfferTable(config.offer_limit_bytes, config.clock, backend.release)

    def add(self, ticket: Ticket, arrays: Sequence[Array], deadline_s: float) -> None:
        """Holds the arrays for the ticket. Raises TransferFull and then holds nothing."""
        offer = self.offers.add(ticket, list(arrays), deadline_s)
        try:
            self._backend.prepare_offer(offer)
        except BaseException:
            self.offers.end(ticket.id, OfferOutcome.CANCELLED)
            raise

    def answer(self, connection: KVConnection, record: dict[str, Any]) -> None:
        """Serves one request of the listener, in its connection's thread."""
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
            self.offers.end(number, OfferOutcome.ACKED if what == "ack" else OfferOutcome.CANCELLED)
            connection.send_record({}, reply)
        elif what == "ask":
            connection.send_record({"ended": ended or ""}, reply)
        else:
            raise BadTicket(f"{connection.peer} asks for {str(what)[:40]!r}, which is none of pull, ack, cancel, ask")

    def _answer_pull(self, connection: KVConnection, number: int, reply: Deadline) -> None:
        try:
            offer = self.offers.grant(number)
        except TransferRefused as error:
            connection.send_record(refusal(error), reply)
            return
        try:
            connection.send_record(self._backend.grant(offer, connection), offer.deadline)
            self._backend.send(offer, connection)
        except BaseException as error:
            self.offers.end(number, OfferOutcome.BROKEN)
            if isinstance(error, TransferRefused):  # the arrays are lost, and the backend has sent nothing
                connection.send_record(refusal(error), reply)
                return
            raise


def refusal(error: TransportError) -> dict[str, Any]:
    return {"refused": type(error).__name__, "detail": str(error)}


REFUSALS = {each.__name__: each for each in (TransferRefused, TransferFull, TransferTimeout, TransferCancelled)}


class Endpoint:
    """The `Transport` between processes over one backend."""

    def __init__(self, config: TransportConfig, backend: TransportBackend) -> None:
        self.config, self.backend, self.name = config, backend, backend.name
        self._server = OfferServer(config, backend)
        self._offers = self._server.offers
        self._pool = ConnectionPool(config)
        self._lock = threading.Lock()
        self._pulls: dict[int, tuple[Deadline, list[KVConnection]]] = {}
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
                arrival_s = self._arrival_s(ticket, grant)
                arrays = self.backend.receive(ticket, room, grant, connection, devices, deadline)
                deadline.wait_until(arrival_s)
        except PeerDead as error:
            self.backend.abandon(room)
            raise self._error_of_hangup(ticket, deadline, error) from error
        except BaseException:
            self.backend.abandon(room)
            raise
        self._pool.give_back(ticket.address, connection)
        return arrays

    def _arrival_s(self, ticket: Ticket, grant: dict[str, Any]) -> float:
        """Returns the earliest arrival time of the bytes: 0, or the time that the emulated link needs. The time in
        which the source copied the bytes before its grant counts as part of the transfer."""
        if self.config.link is None:
            return 0.0
        copied_s = grant.get("copied_s", 0.0)
        if not isinstance(copied_s, float) or copied_s < 0:
            raise BadTicket(f"the source granted {ticket.id} with a time of {str(copied_s)[:40]!r}")
        return self.config.link.send(self.config.clock() - copied_s, ticket.nbytes)

    @contextlib.contextmanager
    def _closed_on_failure(self, ticket: Ticket, connection: KVConnection):
        """Lets `cancel` cut the connection. A refusal keeps it open; any other error closes it, which informs the
        source."""
        self._pulls[ticket.id][1].append(connection)
        try:
            yield
        except TransferRefused:
            self._pool.give_back(ticket.address, connection)
            raise
        except BaseException:
            connection.close()
            raise

    def _error_of_hangup(self, ticket: Ticket, deadline: Deadline, error: PeerDead) -> TransportError:
        """Returns the error to raise after the source hung up: the source's own reason if it still answers."""
        deadline_s = min(deadline.deadline_s, self.config.clock() + self.config.control_timeout_s)
        try:
            reply = self._control("ask", ticket, deadline_s)
        except TransportError:
            return error
        kinds = {OfferOutcome.CANCELLED: TransferCancelled, OfferOutcome.EXPIRED: TransferTimeout}
        end = str(reply.get("ended", ""))
        return kinds[OfferOutcome(end)](f"{deadline.what}: the source ended it: {end}") if end in kinds else error

    def ack(self, ticket: Ticket) -> bool:
        assert ticket.id not in self._pulls, f"ticket {ticket.id} was acked while it is being pulled"
        if ticket.address == self.address:
            self._offers.end(ticket.id, OfferOutcome.ACKED_HERE)
            return True
        if self.backend.may_ack(ticket):
            return self._notify("ack", ticket)
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
            self._offers.end(ticket.id, OfferOutcome.CANCELLED)
            return True
        return self._notify("cancel", ticket)

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
            self._notify("ack", ticket)

    def _notify(self, what: str, ticket: Ticket) -> bool:
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
    """Raises the error that the source's reply names, with its text."""
    if "refused" in reply:
        kind = REFUSALS.get(str(reply["refused"]), TransferRefused)
        raise kind(f"the source refuses: {str(reply.get('detail'))[:400]}")
