"""One connected socket, used by one thread at a time; every wait ends by a `Deadline`.

A connection carries records (four bytes of length, then JSON of at most 1 MiB; the length is checked before memory
is allocated) and raw bytes whose number both ends know.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jdisagg.core.errors import BadTicket, PeerDead, TransferCancelled, TransferRefused, TransferTimeout

# The deadline of one operation, and the way to call the operation off.
#
# Every wait of this package checks the deadline at least every `TICK_S`. So an operation ends within its deadline, and
# soon after it is called off, regardless of the other end.

Clock = Callable[[], float]
TICK_S = 0.05
POLL_S = (0.00005, 0.001)  # first and longest pause between two polls of an array that is being computed


class Deadline:
    """A deadline at `deadline_s` of `clock`, which ends earlier if any thread calls `call_off`."""

    def __init__(self, what: str, deadline_s: float, clock: Clock = time.monotonic) -> None:
        self.what, self.deadline_s, self.clock = what, deadline_s, clock
        self._off = threading.Event()
        self._reasons: list[str] = []  # reasons for calling off; the first one is reported

    def call_off(self, why: str) -> None:
        self._reasons.append(why)
        self._off.set()

    def within(self, seconds: float) -> Deadline:
        """Returns the deadline of a part of the operation: `seconds` from now, or the whole deadline if earlier."""
        part = Deadline(self.what, min(self.deadline_s, self.clock() + seconds), self.clock)
        part._off, part._reasons = self._off, self._reasons
        return part

    @property
    def is_off(self) -> bool:
        return self._off.is_set()

    def left_s(self) -> float:
        """Returns the seconds left. Raises TransferCancelled or TransferTimeout if none are."""
        if self._off.is_set():
            raise TransferCancelled(f"{self.what}: {self._reasons[0]}")
        now_s = self.clock()
        if now_s >= self.deadline_s:
            raise TransferTimeout(f"{self.what}: not over at {now_s:.3f} s, the deadline was {self.deadline_s:.3f} s")
        return self.deadline_s - now_s

    def slice_s(self) -> float:
        """Returns the seconds to wait before the next check."""
        return min(self.left_s(), TICK_S)

    def sleep(self, seconds: float) -> None:
        self._off.wait(min(seconds, self.left_s()))

    def wait_until(self, at_s: float) -> None:
        """Sleeps until `at_s` of the clock."""
        while (left_s := at_s - self.clock()) > 0:
            self.sleep(left_s)
        self.left_s()

    def wait_computed(self, arrays: Sequence[Array], look: Callable[[], None] = lambda: None) -> None:
        """Waits until every array is computed, by polling, since `block_until_ready` takes no deadline. `look` is
        called between two polls. Raises TransferRefused if an array was deleted or donated, or its program failed."""
        pause_s, longest_s = POLL_S
        for array in arrays:
            while not _is_computed(array, self.what):
                look()
                self.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        self.left_s()


def _is_computed(array: Any, what: str) -> bool:
    if array.is_deleted():  # checked first: `is_ready` of a deleted array crashes the process
        raise TransferRefused(f"{what}: an offered array is lost (it was deleted or donated)")
    try:
        if array.is_ready():
            array.block_until_ready()  # returns at once, and raises the error of the array's program
            return True
        return False
    except RuntimeError as error:  # raised by XLA
        raise TransferRefused(f"{what}: an offered array is lost ({error})") from error


MAX_RECORD_BYTES = 1 << 20
SEND_BYTES = 1 << 20  # per call: short enough to check the deadline between two calls


class KVConnection:
    """A connected socket with deadlines; `peer` names the other end in errors."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer = sock, peer

    def send(self, data: memoryview, deadline: Deadline) -> None:
        """Sends all of `data`. Raises PeerDead, or what `deadline` raises."""
        done = 0
        while done < len(data):
            try:
                self.socket.settimeout(deadline.slice_s())
                done += self.socket.send(data[done : done + SEND_BYTES])
            except OSError as error:
                self._raise_unless_slice(error, deadline, f"{done} of {len(data)} bytes sent")

    def receive_into(self, data: memoryview, deadline: Deadline | None) -> None:
        """Fills `data`. Without a deadline, waits until the connection is cut."""
        done = 0
        while done < len(data):
            try:
                self.socket.settimeout(deadline.slice_s() if deadline else None)
                count = self.socket.recv_into(data[done:])
            except OSError as error:
                self._raise_unless_slice(error, deadline, f"{done} of {len(data)} bytes received")
                continue
            if not count:
                self._raise_unless_slice(
                    ConnectionResetError("closed"), deadline, f"{done} of {len(data)} bytes received"
                )
            done += count

    def _raise_unless_slice(self, error: OSError, deadline: Deadline | None, so_far: str) -> None:
        """Returns if only one slice of the wait ran out; otherwise raises PeerDead or what the deadline raises."""
        if deadline is not None:
            deadline.left_s()
        if not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
            what = f"{deadline.what}: " if deadline else ""
            raise PeerDead(f"{what}{self.peer} is gone ({error}), {so_far}") from error

    def send_record(self, record: dict[str, Any], deadline: Deadline) -> None:
        text = json.dumps(record, separators=(",", ":")).encode()
        if len(text) > MAX_RECORD_BYTES:
            raise BadTicket(f"a record of {len(text)} bytes is over the limit of {MAX_RECORD_BYTES}")
        self.send(memoryview(len(text).to_bytes(4, "big") + text), deadline)

    def receive_record(self, deadline: Deadline | None, limit_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
        """Receives one record. Raises BadTicket if the bytes are no record, or the record is too long."""
        head = bytearray(4)
        self.receive_into(memoryview(head), deadline)
        length = int.from_bytes(head, "big")
        if length > limit_bytes:
            raise BadTicket(f"{self.peer} announces a record of {length} bytes, the limit is {limit_bytes}")
        text = bytearray(length)
        self.receive_into(memoryview(text), deadline)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadTicket(f"{self.peer} sent {bytes(text[:40])!r}, which is no JSON") from error
        if not isinstance(record, dict):
            raise BadTicket(f"{self.peer} sent {bytes(text[:40])!r}, which is no record")
        return record

    def receive_byte(self, deadline: Deadline) -> bytes:
        data = bytearray(1)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def receive_descriptor(self, deadline: Deadline) -> tuple[int, bytes]:
        """Receives an open file descriptor and one byte over a Unix socket. The caller closes the file."""
        while True:
            try:
                self.socket.settimeout(deadline.slice_s())
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                self._raise_unless_slice(error, deadline, "no descriptor received")
                continue
            if not data:
                self._raise_unless_slice(ConnectionResetError("closed"), deadline, "no descriptor received")
            if len(descriptors) != 1:
                raise BadTicket(f"{self.peer} sent {len(descriptors)} descriptors where 1 was due")
            return descriptors[0], data

    def must_be_quiet(self) -> None:
        """Raises PeerDead if the peer has hung up or sent something out of turn."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if poll.poll(0):
            raise PeerDead(f"{self.peer} hung up before it was answered")

    def cut(self) -> None:
        """Shuts the connection down, from any thread; a thread that waits on it gets PeerDead."""
        with contextlib.suppress(OSError):  # never connected, or already closed
            socket.socket.shutdown(
                self.socket, socket.SHUT_RDWR
            )  # not TLS's own shutdown, which drops the state of a concurrent read

    def close(self) -> None:
        self.socket.close()


def tune(sock: socket.socket) -> None:
    """Sets socket options: small records are sent at once, and a lost peer host is noticed within half a minute."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
