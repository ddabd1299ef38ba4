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
from jdisagg.kv.transport.deadlines import Deadlines
from jdisagg.kv.transport.hello import answer
from jdisagg.kv.transport.lobby import Lobby
from jdisagg.kv.transport.wire import Wire, tune

log = logging.getLogger("jdisagg.kv")

TICK_S = 0.5
PAUSE_S = 0.05  # where no connection can be taken, for want of descriptors
BACKLOG = 128
MAX_STRANGERS = 64  # connections in the middle of their handshake
Serve = Callable[[Wire, dict[str, Any]], None]


def listen_tcp(terms: TransportConfig) -> tuple[socket.socket, str]:
    """The listening socket and the address that tickets name. Raises ConfigError where it cannot be had."""
    host, port = split_address(terms.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {terms.listen}: {error}") from error
    listener.listen(BACKLOG)
    named = terms.advertise or host
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
    """`serve(wire, record)` answers one request; `tick` is called about twice a second."""

    def __init__(self, listener: socket.socket, terms: TransportConfig, serve: Serve, tick: Callable[[], None]) -> None:
        self._listener, self._terms, self._serve, self._tick = listener, terms, serve, tick
        self._lock = threading.Lock()
        self._lobby = Lobby(MAX_STRANGERS, terms.control_timeout_s, terms.clock)
        self._wires: dict[threading.Thread, Wire] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._wires)

    def close(self) -> None:
        """Hangs up on everybody and waits for the threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            wires = dict(self._wires)
        for wire in wires.values():
            wire.cut()
        for thread in wires:
            thread.join()

    def _accept(self) -> None:
        self._listener.settimeout(TICK_S)
        ticked_s = self._terms.clock()
        while not self._closed:
            self._accept_one()
            if self._terms.clock() >= ticked_s + TICK_S:
                ticked_s = self._terms.clock()
                self._lobby.sweep()
                self._tick()

    def _accept_one(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                self._admit(self._listener.accept()[0])
        except OSError:  # the peer left again, we are closing, or there are no descriptors: then not again at once
            time.sleep(PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        tune(sock)
        wire = Wire(sock, f"the peer at {_name_of(sock)}")
        thread = threading.Thread(target=self._attend, args=(wire,), name="kv-sender", daemon=True)
        with self._lock:
            if len(self._wires) >= self._terms.max_connections + 2 * MAX_STRANGERS:
                wire.close()
                return
            self._wires[thread] = wire
        thread.start()

    def _attend(self, wire: Wire) -> None:
        try:
            hello = Deadlines("handshake", self._terms.clock() + self._terms.control_timeout_s, self._terms.clock)
            with self._lobby.seat(_host_of(wire.socket), wire.cut):
                self._secure(wire, hello)
                answer(wire, self._terms, hello)
            while not self._closed:
                self._serve(wire, wire.receive_record(None))
        except TransportError:
            wire.cut()  # the peer sees it, and the ticket's own error has been told where there was a ticket
        except Exception as error:  # whatever it said: its connection goes, and nothing else
            log.warning("%s is cut off: %s: %r", wire.peer, type(error).__name__, str(error)[:200])
            wire.cut()
        finally:
            wire.close()
            with self._lock:
                del self._wires[threading.current_thread()]

    def _secure(self, wire: Wire, deadlines: Deadlines) -> None:
        if self._terms.tls_server is not None and wire.socket.family != socket.AF_UNIX:
            wire.socket.settimeout(deadlines.left_s())
            try:
                secured = self._terms.tls_server.wrap_socket(
                    wire.socket, server_side=True, do_handshake_on_connect=False
                )
                wire.socket = secured  # before the handshake: it can be cut
                secured.do_handshake()
            except (ssl.SSLError, OSError) as error:
                raise TransportError(f"no TLS with {wire.peer}: {error}") from error


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
