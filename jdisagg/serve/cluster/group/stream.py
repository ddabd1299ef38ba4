"""One end of the ordered stream between a group's leader and a member: signed bodies, and heartbeats both ways.

A record is signed for its session and direction and accepted once and in order (`core/authenticated_channel.py`). An
end that receives nothing for `silence_s` seconds, or whose peer hung up, treats the other as lost.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES, AuthenticatedChannel
from jdisagg.core.errors import BadTicket, JdisaggError, PeerDead, TransferTimeout
from jdisagg.kv.transport.connection import tune
from jdisagg.serve.cluster.link import PeriodicTask

# Frames on a socket: four bytes of length, then the payload, with or without TLS. One thread reads, several write.
#
# The socket is non-blocking, because a TLS session must not be read and written at once, and because a stopped peer
# accepts no bytes. Threads wait outside the lock and wake within a slice when the socket is cut.

HEAD_BYTES = 4
READ_BYTES = 1 << 18
SLICE_MS = 200
T = TypeVar("T")


class FrameSocket:
    """Sends and receives frames on a socket. `peer` names the other end in errors."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        tune(sock)
        sock.setblocking(False)
        self.peer = peer
        self._socket, self._descriptor = sock, sock.fileno()
        self._lock = threading.Lock()  # held during a call of the TLS session
        self._sending = threading.Lock()  # held while a frame is sent
        self._read = bytearray()
        self._over = False

    def secure(self, tls: ssl.SSLContext, host: str | None, deadline_s: float) -> None:
        """Starts TLS as the client of `host`, or as the server if None. Raises PeerDead, TransferTimeout."""
        try:
            self._socket = tls.wrap_socket(
                self._socket, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
            )
            self._attempt(self._socket.do_handshake, select.POLLIN, deadline_s)  # type: ignore[attr-defined]
        except ssl.SSLError as error:
            raise PeerDead(f"no TLS with {self.peer}: {error}") from error

    def send(self, payload: bytes, deadline_s: float | None = None) -> None:
        """Sends a whole frame, after those of other threads. Raises PeerDead, or TransferTimeout after the deadline."""
        left = memoryview(len(payload).to_bytes(HEAD_BYTES, "big") + payload)
        with self._sending:
            while left:
                data = left
                left = left[self._attempt(lambda data=data: self._socket.send(data), select.POLLOUT, deadline_s) :]

    def receive(self, deadline_s: float | None = None, limit_bytes: int = MAX_RECORD_BYTES) -> bytes:
        """Returns the next frame. Raises PeerDead, TransferTimeout, and BadTicket over the limit."""
        while True:
            if len(self._read) >= HEAD_BYTES:
                length = int.from_bytes(self._read[:HEAD_BYTES], "big")
                if length > limit_bytes:
                    raise BadTicket(f"{self.peer} announces a frame of {length} bytes, the limit is {limit_bytes}")
                if len(self._read) >= HEAD_BYTES + length:
                    payload = bytes(self._read[HEAD_BYTES : HEAD_BYTES + length])
                    del self._read[: HEAD_BYTES + length]
                    return payload
            received = self._attempt(lambda: self._socket.recv(READ_BYTES), select.POLLIN, deadline_s)
            if not received:
                raise PeerDead(f"{self.peer} hung up")
            self._read += received

    def has_ended(self) -> bool:
        """Returns True if the peer has hung up. No other thread may read the socket at the same time."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def cut(self) -> None:
        """Shuts the socket down; waiting threads raise PeerDead. Safe from any thread."""
        self._over = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not the TLS shutdown, which would wait

    def close(self) -> None:
        self.cut()
        self._socket.close()

    def _attempt(self, call: Callable[[], T], wanted: int, deadline_s: float | None) -> T:
        """Returns the result of `call`, repeated until the socket is ready. Raises PeerDead, TransferTimeout."""
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


BEAT = "beat"


class GroupStream:
    """Signed bodies on a socket. `send` is safe from any thread, and one thread may call `bodies`."""

    def __init__(self, frames: FrameSocket, secret: bytes, session: str, sides: tuple[str, str], who: str) -> None:
        """`sides` has the names of this end and of the other end in the session."""
        self.frames, self.who = frames, who
        self._outgoing, self._incoming = (AuthenticatedChannel(secret, session, side) for side in sides)
        self._sending = threading.Lock()  # records are sent in the order of their numbers
        self.heard_s = time.monotonic()
        self.done = 0  # the number of the peer's last executed command, by its last heartbeat

    def send(self, body: dict[str, Any], deadline_s: float | None = None) -> None:
        """Sends a body; returns when the kernel has it. Raises PeerDead, TransferTimeout, BadTicket."""
        with self._sending:
            self.frames.send(self._outgoing.sign(body), deadline_s)

    def receive(self, deadline_s: float | None = None) -> dict[str, Any]:
        """Returns the next body, a heartbeat too. Raises PeerDead, TransferTimeout, BadTicket."""
        body = self._incoming.verify(self.frames.receive(deadline_s))
        self.heard_s = time.monotonic()
        if BEAT in body and isinstance(body[BEAT], int):
            self.done = body[BEAT]
        return body

    def bodies(self) -> Iterator[dict[str, Any]]:
        """Yields all bodies but heartbeats until the stream breaks; then raises as `receive`."""
        while True:
            body = self.receive()
            if BEAT not in body:
                yield body

    def silent_s(self) -> float:
        return time.monotonic() - self.heard_s


class Commands:
    """A queue of the leader's commands, filled by a thread, so that heartbeats count while an earlier command runs.

    `over` is called at once with the reason if the leader is lost or ends the group.
    """

    def __init__(self, stream: GroupStream, over: Callable[[str], None]) -> None:
        self._stream, self._over = stream, over
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="group-commands", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for the next command. Raises TransferTimeout."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TransferTimeout(f"{self._stream.who} has said nothing for {timeout_s:g} s") from error

    def _read(self) -> None:
        try:
            for body in self._stream.bodies():
                self._queue.put(body)
                if "end" in body or "refused" in body:
                    if body.get("end"):
                        self._over(str(body["end"])[:1000])
                    return
        except JdisaggError as error:
            self._over(f"{self._stream.who} is lost: {error}")


class Pulse:
    """Sends heartbeats on streams and checks those received, in two threads, because a send may block."""

    def __init__(
        self,
        streams: list[GroupStream],
        silence_s: float,
        over: Callable[[str], None],
        done: Callable[[], int] = lambda: 0,
        stuck: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`over` is called with the reason why the group ends.

        `done` returns the number of the last command executed here. `stuck` returns the reason why work does not
        progress; None if it does.
        """
        self._streams, self._silence_s, self._over, self._done, self._stuck = streams, silence_s, over, done, stuck
        self._tasks = [PeriodicTask(silence_s / 5, self._beat), PeriodicTask(silence_s / 10, self._watch)]

    def start(self) -> None:
        for each in self._streams:
            each.heard_s = time.monotonic()
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        for task in self._tasks:
            task.stop()

    def _beat(self) -> None:
        for each in self._streams:
            try:
                each.send({BEAT: self._done()}, time.monotonic() + self._silence_s)
            except JdisaggError as error:
                self._over(f"{each.who} is lost: {error}")

    def _watch(self) -> None:
        for each in self._streams:
            if each.silent_s() > self._silence_s:
                self._over(f"{each.who} is lost: nothing heard for {each.silent_s():.1f} s")
        why = self._stuck()
        if why is not None:
            self._over(why)
