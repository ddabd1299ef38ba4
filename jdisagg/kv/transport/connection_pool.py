"""The destination's pool: connections to sources, kept and used again, and opened anew where a source restarted."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from typing import Any

from jdisagg.core.errors import PeerDead, PeerMismatch, TransferTimeout
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection, tune
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.handshake import greet
from jdisagg.kv.transport.listener import split_address

UNIX = "unix:"  # an abstract socket's name follows


class ConnectionPool:
    """Idle connections by address; a connection is nobody else's from `ask` until `give_back` or its end."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[Connection, float]]] = {}
        self._closed = False

    def ask(self, address: str, record: dict[str, Any], deadline: Deadline) -> tuple[Connection, dict[str, Any]]:
        """The reply, and the connection it came by. A kept one that has died is replaced by a fresh one, once."""
        kept = self._take(address)
        if kept is not None:
            try:
                return kept, exchange(kept, record, deadline)
            except PeerDead:
                self._drop(address)
        connection = self._open(address, deadline)
        return connection, exchange(connection, record, deadline)

    def give_back(self, address: str, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(address, []).append((connection, self._config.clock()))
                return
        connection.close()

    def sweep(self, now_s: float) -> None:
        """Closes what was idle too long."""
        oldest_s = now_s - self._config.idle_timeout_s
        with self._lock:
            stale = [
                connection
                for connections in self._idle.values()
                for connection, since_s in connections
                if since_s < oldest_s
            ]
            kept = {at: [each for each in connections if each[1] >= oldest_s] for at, connections in self._idle.items()}
            self._idle = {at: connections for at, connections in kept.items() if connections}
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

    def _take(self, address: str) -> Connection | None:
        with self._lock:
            connections = self._idle.get(address)
            return connections.pop()[0] if connections else None

    def _drop(self, address: str) -> None:
        """All idle connections to a source that has died once are to its earlier life."""
        with self._lock:
            connections = self._idle.pop(address, [])
        for connection, _ in connections:
            connection.close()

    def _open(self, address: str, deadline: Deadline) -> Connection:
        deadline_s = min(deadline.deadline_s, self._config.clock() + self._config.control_timeout_s)
        sock = connect(address, deadline, deadline_s)
        connection = Connection(sock, f"the source at {address}")
        try:
            self._secure(connection, address, deadline)
            self._greet(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: Connection, deadline: Deadline) -> None:
        """A source that takes the connection and then says nothing holds up no pull for longer than a control word."""
        most_s = self._config.control_timeout_s
        try:
            greet(connection, self._config, deadline.within(most_s))
        except TransferTimeout as error:
            deadline.left_s()  # where the whole pull is over, that is what it is
            raise PeerDead(f"{deadline.what}: {connection.peer} did not greet us within {most_s:g} s") from error

    def _secure(self, connection: Connection, address: str, deadline: Deadline) -> None:
        if self._config.tls_client is not None and not address.startswith(UNIX):
            connection.socket.settimeout(min(deadline.left_s(), self._config.control_timeout_s))
            try:
                connection.socket = self._config.tls_client.wrap_socket(
                    connection.socket, server_hostname=split_address(address)[0]
                )
            except (ssl.SSLError, OSError) as error:
                raise PeerMismatch(f"no TLS with {connection.peer}: {error}") from error


def exchange(connection: Connection, record: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
    """Sends a request and waits for its answer; the connection is closed where either fails."""
    try:
        connection.send_record(record, deadline)
        return connection.receive_record(deadline)
    except BaseException:
        connection.close()
        raise


def connect(address: str, deadline: Deadline, deadline_s: float) -> socket.socket:
    """A connected socket. Raises PeerDead where nobody answers by the deadline, or what `deadline` raises."""
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerDead(f"the host of {address} is not known ({error})") from error
    return found[0][0], found[0][4]
