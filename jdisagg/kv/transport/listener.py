"""The source's listener: a listening socket, one thread that accepts, and one thread per connection that serves it."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from jdisagg.core.errors import ConfigError, TransportError
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection, tune
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.handshake import answer
from jdisagg.kv.transport.pending_handshakes import PendingHandshakes

log = logging.getLogger("jdisagg.kv")

TICK_S = 0.5
PAUSE_S = 0.05  # where no connection can be taken, for want of descriptors
BACKLOG = 128
MAX_STRANGERS = 64  # connections in the middle of their handshake
Serve = Callable[[Connection, dict[str, Any]], None]


def listen_tcp(config: TransportConfig) -> tuple[socket.socket, str]:
    """The listening socket and the address that tickets name. Raises ConfigError where it cannot be had."""
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
    """HOST:PORT or [IPv6]:PORT. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"an address is written HOST:PORT, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


class Listener:
    """`serve(connection, record)` answers one request; `tick` is called about twice a second."""

    def __init__(
        self, listener: socket.socket, config: TransportConfig, serve: Serve, tick: Callable[[], None]
    ) -> None:
        self._listener, self._config, self._serve, self._tick = listener, config, serve, tick
        self._lock = threading.Lock()
        self._handshakes = PendingHandshakes(MAX_STRANGERS, config.control_timeout_s, config.clock)
        self._connections: dict[threading.Thread, Connection] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Hangs up on everybody and waits for the threads."""
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
        except OSError:  # the peer left again, we are closing, or there are no descriptors: then not again at once
            time.sleep(PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        tune(sock)
        connection = Connection(sock, f"the peer at {_name_of(sock)}")
        thread = threading.Thread(target=self._attend, args=(connection,), name="kv-sender", daemon=True)
        with self._lock:
            if len(self._connections) >= self._config.max_connections + 2 * MAX_STRANGERS:
                connection.close()
                return
            self._connections[thread] = connection
        thread.start()

    def _attend(self, connection: Connection) -> None:
        try:
            handshake = Deadline("handshake", self._config.clock() + self._config.control_timeout_s, self._config.clock)
            with self._handshakes.admit(_host_of(connection.socket), connection.cut):
                self._secure(connection, handshake)
                answer(connection, self._config, handshake)
            while not self._closed:
                self._serve(connection, connection.receive_record(None))
        except TransportError:
            connection.cut()  # the peer sees it, and the ticket's own error has been told where there was a ticket
        except Exception as error:  # whatever it said: its connection goes, and nothing else
            log.warning("%s is cut off: %s: %r", connection.peer, type(error).__name__, str(error)[:200])
            connection.cut()
        finally:
            connection.close()
            with self._lock:
                del self._connections[threading.current_thread()]

    def _secure(self, connection: Connection, deadline: Deadline) -> None:
        if self._config.tls_server is not None and connection.socket.family != socket.AF_UNIX:
            connection.socket.settimeout(deadline.left_s())
            try:
                secured = self._config.tls_server.wrap_socket(
                    connection.socket, server_side=True, do_handshake_on_connect=False
                )
                connection.socket = secured  # before the handshake: it can be cut
                secured.do_handshake()
            except (ssl.SSLError, OSError) as error:
                raise TransportError(f"no TLS with {connection.peer}: {error}") from error


def _host_of(sock: socket.socket) -> str:
    """The same for all of a host; those of this host's own sockets have none."""
    with contextlib.suppress(OSError):
        name = sock.getpeername()
        return str(name[0]) if name and isinstance(name, tuple) else ""
    return "an address that is gone"


def _name_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(sock.getpeername())
    return "an address that is gone"
