"""Frames on one socket: four bytes of length, then so many bytes; TLS or not, read by one thread and written by many.

The socket never blocks, since a TLS session must not be read and written at once, and since a peer that is stopped
takes nothing: whoever waits does so outside the lock, and wakes within a slice when the socket is cut.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES
from jdisagg.core.errors import BadTicket, PeerDead, TransferTimeout
from jdisagg.kv.transport.connection import tune

HEAD_BYTES = 4
READ_BYTES = 1 << 18
SLICE_MS = 200
T = TypeVar("T")


class FrameSocket:
    """`peer` says in errors who is at the other end."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        tune(sock)
        sock.setblocking(False)
        self.peer = peer
        self._socket, self._descriptor = sock, sock.fileno()
        self._lock = threading.Lock()  # of the TLS session, for the moment of a call
        self._turn = threading.Lock()  # whose frame is on its way
        self._read = bytearray()
        self._over = False

    def secure(self, tls: ssl.SSLContext, host: str | None, deadline_s: float) -> None:
        """TLS over the socket: as the client of `host`, or as the server. Raises PeerDead, TransferTimeout."""
        try:
            self._socket = tls.wrap_socket(
                self._socket, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
            )
            self._attempt(self._socket.do_handshake, select.POLLIN, deadline_s)  # type: ignore[attr-defined]
        except ssl.SSLError as error:
            raise PeerDead(f"no TLS with {self.peer}: {error}") from error

    def send(self, payload: bytes, deadline_s: float | None = None) -> None:
        """All of it, behind what others send. Raises PeerDead, or TransferTimeout after the deadline."""
        left = memoryview(len(payload).to_bytes(HEAD_BYTES, "big") + payload)
        with self._turn:
            while left:
                data = left
                left = left[self._attempt(lambda data=data: self._socket.send(data), select.POLLOUT, deadline_s) :]

    def receive(self, deadline_s: float | None = None, limit_bytes: int = MAX_RECORD_BYTES) -> bytes:
        """The next frame. Raises PeerDead, TransferTimeout, BadTicket over the limit."""
        while True:
            if len(self._read) >= HEAD_BYTES:
                length = int.from_bytes(self._read[:HEAD_BYTES], "big")
                if length > limit_bytes:
                    raise BadTicket(f"{self.peer} announces a frame of {length} bytes, the limit is {limit_bytes}")
                if len(self._read) >= HEAD_BYTES + length:
                    payload = bytes(self._read[HEAD_BYTES : HEAD_BYTES + length])
                    del self._read[: HEAD_BYTES + length]
                    return payload
            came = self._attempt(lambda: self._socket.recv(READ_BYTES), select.POLLIN, deadline_s)
            if not came:
                raise PeerDead(f"{self.peer} hung up")
            self._read += came

    def has_ended(self) -> bool:
        """Whether the peer has hung up, of a socket that nobody reads just now and that has said nothing more."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def cut(self) -> None:
        """From any thread: whoever waits here wakes with PeerDead."""
        self._over = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own, which would wait

    def close(self) -> None:
        self.cut()
        self._socket.close()

    def _attempt(self, call: Callable[[], T], wanted: int, deadline_s: float | None) -> T:
        """`call` once the socket lets it."""
        while True:
            event = wanted
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except (BlockingIOError, InterruptedError):
                pass
            except ssl.SSLEOFError as error:
                raise PeerDead(f"{self.peer} hung up") from error
            except ssl.SSLError:
                raise
            except OSError as error:
                raise PeerDead(f"{self.peer} is gone ({error.strerror or error})") from error
            self._wait(event, deadline_s)

    def _wait(self, event: int, deadline_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._descriptor, event)
        while not poll.poll(SLICE_MS if deadline_s is None else _slice_ms(deadline_s)):
            if self._over:
                raise PeerDead(f"{self.peer}: the connection was cut here")
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TransferTimeout(f"{self.peer} has not answered in time")


def _slice_ms(deadline_s: float) -> float:
    return max(0.0, min(SLICE_MS, 1000 * (deadline_s - time.monotonic())))
