"""On one host: the source copies once, into shared memory, and the destination's arrays lie there.

The destination adopts the memory without a copy, so the source may not write there again before the last of those
arrays has died: an ack waits for that by itself, and a segment whose ticket ends otherwise is never written again.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jax import Array

from jdisagg.core.errors import BadTicket, PeerDead
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection
from jdisagg.kv.transport.connection_pool import UNIX
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.endpoint import Endpoint
from jdisagg.kv.transport.listener import BACKLOG
from jdisagg.kv.transport.memory import SPARE_SHARE, offsets_of
from jdisagg.kv.transport.offers import Ended, Offer
from jdisagg.kv.transport.segments import Mappings, Segments
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.ticket import Ticket

LONG_BYTES = 4 << 20  # worth another thread, and a word ahead
CHUNK_BYTES = 4 << 20  # between two looks at the deadline
COPIERS = 1  # beside the connection's own thread
NOT_YET, WRITTEN = b"\0", b"\1"  # what comes with the descriptor, or after it


def shm(config: TransportConfig) -> Endpoint:
    """Between two processes of one Linux host and user."""
    return Endpoint(config, ShmBackend(config))


class ShmBackend:
    name = "shm"

    def __init__(self, config: TransportConfig) -> None:
        self._segments = Segments(config.offer_limit_bytes * SPARE_SHARE)
        self._mappings = Mappings(config.pull_limit_bytes, config.clock)
        self._copiers = ThreadPoolExecutor(COPIERS, "kv-copier")

    def listen(self) -> tuple[socket.socket, str]:
        """An abstract socket: of this network namespace, and gone with the process."""
        name = f"jdisagg-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
        return listener, UNIX + name

    def prepare_offer(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, connection: Connection) -> dict[str, Any]:
        """Takes a segment; what is in it follows."""
        offer.deadline.wait_computed(list(offer.arrays), connection.must_be_quiet)
        number = offer.ticket.id
        offer.staged = self._segments.take(number, offsets_of(offer.ticket.arrays)[1])
        try:
            offer.deadline.left_s()
        except BaseException:
            self._segments.release(number, reuse=False)  # the ticket ended before the segment was taken
            raise
        return {"segments": self._segments.inodes()}

    def send(self, offer: Offer, connection: Connection) -> None:
        """Copies, and then lets the arrays go: from there on the segment is what the ticket holds.

        A long copy is announced by the descriptor, so that the destination maps the segment meanwhile.
        """
        arrays, segment, long = list(offer.arrays), offer.staged, offer.ticket.nbytes >= LONG_BYTES
        offer.deadline.left_s()  # an offer is called off before its arrays are dropped: now these are all
        if long:
            self._send_descriptor(offer, connection, NOT_YET)
        self._copy(list(zip(segment.views(offer.ticket.arrays), arrays, strict=True)), offer.deadline)
        segment.written = True
        if long:
            connection.send(memoryview(WRITTEN), offer.deadline)
        else:
            self._send_descriptor(offer, connection, WRITTEN)
        offer.arrays.clear()  # after the word: to unmap what was copied takes as long as to copy it

    def _send_descriptor(self, offer: Offer, connection: Connection, state: bytes) -> None:
        descriptor = self._segments.descriptor(offer.ticket.id)
        try:
            connection.socket.settimeout(offer.deadline.left_s())
            socket.send_fds(connection.socket, [state], [descriptor])
        except OSError as error:
            raise PeerDead(f"{offer.deadline.what}: {connection.peer} is gone ({error})") from error
        finally:
            os.close(descriptor)

    def _copy(self, pairs: Sequence[tuple[np.ndarray, Array]], deadline: Deadline) -> None:
        """By several threads where there is much of it: one alone does not fill the memory's bandwidth."""
        chunks = iter([chunk for view, array in pairs for chunk in _chunks(view, array)])
        lock = threading.Lock()

        def copy_what_is_left() -> None:
            while True:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                deadline.left_s()
                np.copyto(*chunk)

        more = sum(view.nbytes for view, _ in pairs) // LONG_BYTES
        others = [self._copiers.submit(copy_what_is_left) for _ in range(min(more, COPIERS))]
        try:
            copy_what_is_left()
        finally:
            for each in others:
                each.cancel()
            wait(others)  # nobody writes to the segment from here on
        for each in others:
            if not each.cancelled():
                each.result()

    def prepare(self, ticket: Ticket) -> None:
        self._mappings.check_room(ticket.nbytes)

    def receive(
        self,
        ticket: Ticket,
        room: None,
        grant: dict[str, Any],
        connection: Connection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        alive = grant.get("segments")
        if not isinstance(alive, list):
            raise BadTicket(f"{connection.peer} grants {str(grant)[:80]}, which names no segments")
        descriptor, state = connection.receive_descriptor(deadline)
        views = self._mappings.adopt(ticket.id, ticket.address, descriptor, ticket.arrays, alive)
        if state == NOT_YET:
            state = connection.receive_byte(deadline)
        if state != WRITTEN:
            raise BadTicket(
                f"{connection.peer} says {state!r} of a segment, which is neither {NOT_YET!r} nor {WRITTEN!r}"
            )
        return [jax.device_put(view, device) for view, device in zip(views, devices, strict=True)]

    def abandon(self, room: None) -> None:
        """Views that were made die with the failed pull."""

    def may_ack(self, ticket: Ticket) -> bool:
        return not self._mappings.is_read(ticket.id)

    def release(self, offer: Offer, how: Ended) -> None:
        segment = offer.staged
        self._segments.release(offer.ticket.id, reuse=how is Ended.ACKED and segment is not None and segment.written)

    def sweep(self) -> None:
        self._mappings.sweep()

    @property
    def pull_bytes(self) -> int:
        return self._mappings.held_bytes

    def close(self) -> None:
        self._copiers.shutdown()
        self._segments.close()
        self._mappings.close()


def _chunks(view: np.ndarray, array: Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(destination, source) of a computed array, bytes, a few MiB each."""
    there, here = view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8)
    for start in range(0, here.size, CHUNK_BYTES):
        yield there[start : start + CHUNK_BYTES], here[start : start + CHUNK_BYTES]
