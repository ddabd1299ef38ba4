"""The destination's lines: connections to sources, kept and used again, and opened anew where a source restarted."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from typing import Any

from jdisagg.core.errors import PeerDead, PeerMismatch
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.deadlines import Deadlines
from jdisagg.kv.transport.hello import greet
from jdisagg.kv.transport.listener import split_address
from jdisagg.kv.transport.wire import Wire, tune

UNIX = "unix:"  # an abstract socket's name follows


class ConnectionPool:
    """Idle wires by address; a wire is nobody else's from `ask` until `give_back` or its end."""

    def __init__(self, terms: TransportConfig) -> None:
        self._terms = terms
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[Wire, float]]] = {}
        self._closed = False

    def ask(self, address: str, record: dict[str, Any], deadlines: Deadlines) -> tuple[Wire, dict[str, Any]]:
        """The reply, and the wire it came by. A kept wire that has died is replaced by a fresh one, once."""
        kept = self._take(address)
        if kept is not None:
            try:
                return kept, exchange(kept, record, deadlines)
            except PeerDead:
                self._drop(address)
        wire = self._open(address, deadlines)
        return wire, exchange(wire, record, deadlines)

    def give_back(self, address: str, wire: Wire) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(address, []).append((wire, self._terms.clock()))
                return
        wire.close()

    def sweep(self, now_s: float) -> None:
        """Closes what was idle too long."""
        oldest_s = now_s - self._terms.idle_timeout_s
        with self._lock:
            stale = [wire for wires in self._idle.values() for wire, since_s in wires if since_s < oldest_s]
            kept = {at: [each for each in wires if each[1] >= oldest_s] for at, wires in self._idle.items()}
            self._idle = {at: wires for at, wires in kept.items() if wires}
        for wire in stale:
            wire.close()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            addresses = list(self._idle)
        for address in addresses:
            self._drop(address)

    @property
    def connections(self) -> int:
        with self._lock:
            return sum(len(wires) for wires in self._idle.values())

    def _take(self, address: str) -> Wire | None:
        with self._lock:
            wires = self._idle.get(address)
            return wires.pop()[0] if wires else None

    def _drop(self, address: str) -> None:
        """All idle wires to a source that has died once are to its earlier life."""
        with self._lock:
            wires = self._idle.pop(address, [])
        for wire, _ in wires:
            wire.close()

    def _open(self, address: str, deadlines: Deadlines) -> Wire:
        deadline_s = min(deadlines.deadline_s, self._terms.clock() + self._terms.control_timeout_s)
        sock = connect(address, deadlines, deadline_s)
        wire = Wire(sock, f"the source at {address}")
        try:
            self._secure(wire, address, deadlines)
            greet(wire, self._terms, deadlines)
        except BaseException:
            wire.close()
            raise
        return wire

    def _secure(self, wire: Wire, address: str, deadlines: Deadlines) -> None:
        if self._terms.tls_client is not None and not address.startswith(UNIX):
            wire.socket.settimeout(min(deadlines.left_s(), self._terms.control_timeout_s))
            try:
                wire.socket = self._terms.tls_client.wrap_socket(wire.socket, server_hostname=split_address(address)[0])
            except (ssl.SSLError, OSError) as error:
                raise PeerMismatch(f"no TLS with {wire.peer}: {error}") from error


def exchange(wire: Wire, record: dict[str, Any], deadlines: Deadlines) -> dict[str, Any]:
    """Sends a request and waits for its answer; the wire is closed where either fails."""
    try:
        wire.send_record(record, deadlines)
        return wire.receive_record(deadlines)
    except BaseException:
        wire.close()
        raise


def connect(address: str, deadlines: Deadlines, deadline_s: float) -> socket.socket:
    """A connected socket. Raises PeerDead where nobody answers by the deadline, or what `deadlines` raises."""
    family, target = _target(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect_ex(target)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(1000 * deadlines.slice_s()):
            if deadlines.clock() >= deadline_s:
                raise PeerDead(f"{deadlines.what}: nobody answers at {address}")
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerDead(f"{deadlines.what}: nobody answers at {address} ({os.strerror(code)})")
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerDead(f"the host of {address} is not known ({error})") from error
    return found[0][0], found[0][4]
