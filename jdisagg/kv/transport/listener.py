"""The source's side of a transport: its offers, the handshake, and the listener with one thread per connection."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from jax import Array

from jdisagg.core.errors import (
    BadTicket,
    ConfigError,
    PeerDead,
    PeerMismatch,
    TransferFull,
    TransferRefused,
    TransportError,
)
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.connection import Clock, Deadline, KVConnection, tune
from jdisagg.kv.transport.ticket import Ticket

# The source's offers, each from its creation to its one end, with its bytes and the reason of its end.

REMEMBERED = 4096  # ended offers whose outcome a late pull can still learn


class OfferOutcome(StrEnum):
    ACKED = "acked"  # the destination acknowledged, and no longer reads our memory
    ACKED_HERE = "acked at the source"  # the destination may still read the memory it adopted
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    BROKEN = "broken off"  # the peer went away, or the arrays were lost, during the transfer


@dataclass(eq=False, slots=True)
class Offer:
    """One ticket's arrays. `deadline` is called off when the offer ends, so that threads working on it stop."""

    ticket: Ticket
    arrays: list[Array]
    deadline: Deadline
    is_pulled: bool = False
    staged: Any = None  # state of the transport for this offer
    on_end: Callable[[], None] | None = None  # wakes a pull of the same process


class OfferTable:
    """Offers by id. Any thread may call; `release(offer, how)` runs once per offer, outside the lock."""

    def __init__(self, limit_bytes: int, clock: Clock, release: Callable[[Offer, OfferOutcome], None]) -> None:
        self.limit_bytes, self._clock, self._release = limit_bytes, clock, release
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}
        self._past: OrderedDict[int, OfferOutcome] = OrderedDict()

    def add(self, ticket: Ticket, arrays: list[Array], deadline_s: float) -> Offer:
        """Adds an offer. Raises TransferFull if its bytes would exceed the limit."""
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
        """Returns the offer and marks it pulled. Raises TransferRefused if it is unknown, has ended or was pulled
        before."""
        with self._lock:
            offer = self._offers.get(number)
            if offer is None:
                end = self._past.get(number)
                raise TransferRefused(f"offer {number} {f'has ended: {end}' if end else 'is unknown here'}")
            if offer.is_pulled:
                raise TransferRefused(f"offer {number} was pulled before; a ticket is good for one pull")
            offer.is_pulled = True
        return offer

    def end(self, number: int, how: OfferOutcome) -> bool:
        """Ends an offer. Returns False if it had ended before or never existed."""
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
        """Ends every offer whose deadline has passed."""
        with self._lock:
            due = [each.ticket for each in self._offers.values() if each.deadline.deadline_s <= now_s]
        return [ticket for ticket in due if self.end(ticket.id, OfferOutcome.EXPIRED)]

    def end_all(self) -> None:
        with self._lock:
            left = list(self._offers)
        for number in left:
            self.end(number, OfferOutcome.CANCELLED)

    def ended(self, number: int) -> OfferOutcome | None:
        """Returns how the offer ended; None if it has not, or is no longer remembered."""
        with self._lock:
            return self._past.get(number)

    def tag_of(self, number: int) -> str:
        """Returns the offer's tag; if there is no offer, a text that no tag equals."""
        with self._lock:
            offer = self._offers.get(number)
            return offer.ticket.tag if offer else "none"

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(offer.ticket.nbytes for offer in self._offers.values())


# The handshake: both ends prove that they know the secret, then send what they run.
#
# Challenge and response use HMAC-SHA256 over two fresh nonces, the role and the identity, so that no part of it can be
# replayed or reflected. A peer learns our identity only after it has proved that it knows the secret.

PROTOCOL = 1
NONCE_BYTES = 32
HANDSHAKE_BYTES = 8 << 10  # the longest record of a handshake


def answer(connection: KVConnection, config: TransportConfig, deadline: Deadline) -> None:
    """Runs the source's half of the handshake. Raises PeerMismatch after a reply to the peer."""
    nonce = secrets.token_hex(NONCE_BYTES)
    connection.send_record({"jdisagg": PROTOCOL, "nonce": nonce}, deadline)
    reply = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if not _proves(reply, "pulls", nonce + _nonce(reply), config.secret):
        connection.send_record({"refused": "secret"}, deadline)
        raise PeerMismatch(f"{connection.peer} does not share our secret")
    connection.send_record(_proof("offers", nonce + _nonce(reply), config), deadline)
    compare(config.identity, reply["identity"], connection.peer)


def greet(connection: KVConnection, config: TransportConfig, deadline: Deadline) -> None:
    """Runs the destination's half of the handshake. Raises PeerMismatch."""
    challenge = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if challenge.get("jdisagg") != PROTOCOL:
        reason = f"{connection.peer} speaks protocol {challenge.get('jdisagg')!r:.40}"
        raise PeerMismatch(f"{reason}, we speak {PROTOCOL}: install the same jdisagg")
    nonce = secrets.token_hex(NONCE_BYTES)
    both = _nonce(challenge) + nonce
    connection.send_record({"nonce": nonce} | _proof("pulls", both, config), deadline)
    reply = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if not _proves(reply, "offers", both, config.secret):
        raise PeerMismatch(f"{connection.peer} does not share our secret")
    compare(config.identity, reply["identity"], connection.peer)


def compare(ours: Identity, record: Any, peer: str) -> None:
    """Raises PeerMismatch with both fingerprints and the differing fields if the identities differ."""
    try:
        theirs = Identity(**{each.name: str(record[each.name]) for each in fields(Identity)})
    except (KeyError, TypeError) as error:
        raise PeerMismatch(f"{peer} shows no identity that we can read: {str(record)[:80]}") from error
    mine, other = asdict(ours), asdict(theirs)
    differing = [f"{name} {other[name]!r} there, {mine[name]!r} here" for name in mine if mine[name] != other[name]]
    if differing:
        prints = f"fingerprint {theirs.fingerprint} there, {ours.fingerprint} here"
        remedy = "start both with the same version, --model, --mesh and dtypes"
        raise PeerMismatch(f"{peer} is not of our kind ({prints}): {'; '.join(differing)}; {remedy}")


def _nonce(record: dict[str, Any]) -> str:
    nonce = record.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise BadTicket(f"a handshake needs a nonce of {2 * NONCE_BYTES} hex digits, got {str(nonce)[:20]!r}")
    return nonce


def _proof(role: str, nonces: str, config: TransportConfig) -> dict[str, Any]:
    identity = asdict(config.identity)
    return {"identity": identity, "mac": _mac(role, nonces, identity, config.secret)}


def _proves(record: dict[str, Any], role: str, nonces: str, secret: bytes) -> bool:
    mac = record.get("mac")
    wanted = _mac(role, nonces, record.get("identity"), secret)
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(errors="replace"), wanted.encode())


def _mac(role: str, nonces: str, identity: Any, secret: bytes) -> str:
    text = json.dumps(["jdisagg", PROTOCOL, role, nonces, identity], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


# Peers that have connected and not yet proved that they know the secret, limited in number and in time.
#
# A peer with the secret proves it in milliseconds. If there are too many, the longest waiting one of the host with the
# most pending handshakes is cut off, so that silent connections of one host cannot block the others.


@dataclass(eq=False, slots=True)
class _Handshake:
    host: str
    since_s: float
    cut: Callable[[], object]
    was_cut: bool = False


class PendingHandshakes:
    """Peers in the middle of their handshake: at most `limit`, each for at most `timeout_s` seconds. Any thread may
    call."""

    def __init__(self, limit: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._timeout_s, self._clock = limit, timeout_s, clock
        self._lock = threading.Lock()
        self._pending: dict[_Handshake, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def admit(self, host: str, cut: Callable[[], object]) -> Iterator[None]:
        """Counts a peer as pending for the `with` block; `cut` may end it from any thread. Raises PeerDead if it was
        called."""
        handshake = _Handshake(host, self._clock(), cut)
        with self._lock:
            self._pending[handshake] = None
            excess = [self._take_longest()] if len(self._pending) > self._limit else []
        self._cut(excess)
        try:
            yield
        finally:
            with self._lock:
                self._pending.pop(handshake, None)
        if handshake.was_cut:
            raise PeerDead(f"a peer of {host} was cut off in the middle of its handshake")

    def sweep(self) -> None:
        """Cuts off the peers whose handshake has taken too long."""
        oldest_s = self._clock() - self._timeout_s
        with self._lock:
            late = [handshake for handshake in self._pending if handshake.since_s < oldest_s]
            for handshake in late:
                self._take(handshake)
        self._cut(late)

    def _take_longest(self) -> _Handshake:
        """Removes and returns the longest waiting handshake of the host that has the most."""
        busiest_host = Counter(handshake.host for handshake in self._pending).most_common(1)[0][0]
        handshake = next(handshake for handshake in self._pending if handshake.host == busiest_host)
        self._take(handshake)
        return handshake

    def _take(self, handshake: _Handshake) -> None:
        del self._pending[handshake]
        handshake.was_cut = True

    def _cut(self, handshakes: list[_Handshake]) -> None:
        for handshake in handshakes:
            handshake.cut()


log = logging.getLogger("jdisagg.kv")

TICK_S = 0.5
PAUSE_S = 0.05  # before the next try if no connection can be accepted for lack of descriptors
BACKLOG = 128
MAX_PENDING_HANDSHAKES = 64  # connections in the middle of their handshake
Serve = Callable[[KVConnection, dict[str, Any]], None]


def listen_tcp(config: TransportConfig) -> tuple[socket.socket, str]:
    """Returns the listening socket and the address that tickets name. Raises ConfigError if it cannot be opened."""
    host, port = split_address(config.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.listen}: {error}") from error
    listener.listen(BACKLOG)
    named = config.advertise or host
    return listener, f"[{named}]:{port_of(listener)}" if ":" in named else f"{named}:{port_of(listener)}"


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [IPv6]:PORT. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"an address is written HOST:PORT, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


class Listener:
    """Accepts connections; `serve(connection, record)` answers a request, `tick` is called about twice a second."""

    def __init__(
        self, listener: socket.socket, config: TransportConfig, serve: Serve, tick: Callable[[], None]
    ) -> None:
        self._listener, self._config, self._serve, self._tick = listener, config, serve, tick
        self._lock = threading.Lock()
        self._handshakes = PendingHandshakes(MAX_PENDING_HANDSHAKES, config.control_timeout_s, config.clock)
        self._connections: dict[threading.Thread, KVConnection] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Cuts all connections and waits for the threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            connection.cut()
        for thread in connections:
            thread.join()

    def _accept(self) -> None:
        self._listener.settimeout(TICK_S)
        ticked_s = self._config.clock()
        while not self._closed:
            self._accept_one()
            if self._config.clock() >= ticked_s + TICK_S:
                ticked_s = self._config.clock()
                self._handshakes.sweep()
                self._tick()

    def _accept_one(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                self._admit(self._listener.accept()[0])
        except OSError:  # the peer left, we are closing, or no descriptors are left: pause before the next try
            time.sleep(PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        tune(sock)
        connection = KVConnection(sock, f"the peer at {_name_of(sock)}")
        thread = threading.Thread(target=self._serve_connection, args=(connection,), name="kv-sender", daemon=True)
        with self._lock:
            if len(self._connections) >= self._config.max_connections + 2 * MAX_PENDING_HANDSHAKES:
                connection.close()
                return
            self._connections[thread] = connection
        thread.start()

    def _serve_connection(self, connection: KVConnection) -> None:
        try:
            handshake = Deadline("handshake", self._config.clock() + self._config.control_timeout_s, self._config.clock)
            with self._handshakes.admit(_host_of(connection.socket), connection.cut):
                self._secure(connection, handshake)
                answer(connection, self._config, handshake)
            while not self._closed:
                self._serve(connection, connection.receive_record(None))
        except TransportError:
            connection.cut()  # the peer sees the cut, and the error was reported with the ticket if there was one
        except Exception as error:  # any other fault of the peer ends only its own connection
            log.warning("%s is cut off: %s: %r", connection.peer, type(error).__name__, str(error)[:200])
            connection.cut()
        finally:
            connection.close()
            with self._lock:
                del self._connections[threading.current_thread()]

    def _secure(self, connection: KVConnection, deadline: Deadline) -> None:
        if self._config.tls_server is not None and connection.socket.family != socket.AF_UNIX:
            connection.socket.settimeout(deadline.left_s())
            try:
                secured = self._config.tls_server.wrap_socket(
                    connection.socket, server_side=True, do_handshake_on_connect=False
                )
                connection.socket = secured  # before the handshake, so that it can be cut
                secured.do_handshake()
            except (ssl.SSLError, OSError) as error:
                raise TransportError(f"no TLS with {connection.peer}: {error}") from error


def _host_of(sock: socket.socket) -> str:
    """Returns the address of the peer's host; "" for a Unix socket."""
    with contextlib.suppress(OSError):
        name = sock.getpeername()
        return str(name[0]) if name and isinstance(name, tuple) else ""
    return "an address that is gone"


def _name_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(sock.getpeername())
    return "an address that is gone"
