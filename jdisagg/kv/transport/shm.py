"""On one host: the source copies once, into shared memory, and the destination's arrays lie there.

The destination adopts the memory without a copy, so the source may not write there again before the last of those
arrays has died: an ack waits for that by itself, and a segment whose ticket ends otherwise is never written again.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jdisagg.core.errors import BadTicket, PeerDead
from jdisagg.kv.transport.courier import Courier
from jdisagg.kv.transport.desk import BACKLOG
from jdisagg.kv.transport.lines import UNIX
from jdisagg.kv.transport.memory import SPARE_SHARE, offsets_of
from jdisagg.kv.transport.offers import Ended, Offer
from jdisagg.kv.transport.patience import Patience
from jdisagg.kv.transport.segments import Mappings, Segments
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.terms import Terms
from jdisagg.kv.transport.ticket import Ticket
from jdisagg.kv.transport.wire import Wire


def shm(terms: Terms) -> Courier:
    """Between two processes of one Linux host and user."""
    return Courier(terms, ShmCargo(terms))


class ShmCargo:
    name = "shm"

    def __init__(self, terms: Terms) -> None:
        self._segments = Segments(terms.offer_limit_bytes * SPARE_SHARE)
        self._mappings = Mappings(terms.pull_limit_bytes, terms.clock)

    def listen(self) -> tuple[socket.socket, str]:
        """An abstract socket: of this network namespace, and gone with the process."""
        name = f"jdisagg-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
        return listener, UNIX + name

    def stow(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, wire: Wire) -> dict[str, Any]:
        """Copies, and lets the arrays go: from here on the segment is what the ticket holds."""
        arrays, ticket = list(offer.arrays), offer.ticket
        offer.patience.wait_computed(arrays, wire.must_be_quiet)
        started_s = offer.patience.clock()
        offer.stowed = segment = self._segments.take(ticket.id, offsets_of(ticket.arrays)[1])
        try:
            for view, array in zip(segment.views(ticket.arrays), arrays, strict=True):
                offer.patience.left_s()
                np.copyto(view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8))
        except BaseException:
            self._segments.release(ticket.id, reuse=False)  # the ticket may have ended before the segment was taken
            raise
        offer.arrays.clear()
        return {"segments": self._segments.inodes(), "copied_s": offer.patience.clock() - started_s}

    def send(self, offer: Offer, wire: Wire) -> None:
        """The descriptor, with one byte to carry it."""
        try:
            wire.socket.settimeout(offer.patience.left_s())
            socket.send_fds(wire.socket, [b"\0"], [offer.stowed.descriptor])
        except OSError as error:
            raise PeerDead(f"{offer.patience.what}: {wire.peer} is gone ({error})") from error

    def prepare(self, ticket: Ticket) -> None:
        self._mappings.check_room(ticket.nbytes)

    def receive(
        self, ticket: Ticket, room: None, grant: dict[str, Any], wire: Wire, devices: Sequence[Any], p: Patience
    ) -> list[Array]:
        alive = grant.get("segments")
        if not isinstance(alive, list):
            raise BadTicket(f"{wire.peer} grants {str(grant)[:80]}, which names no segments")
        descriptor = wire.receive_descriptor(p)
        views = self._mappings.adopt(ticket.id, ticket.address, descriptor, ticket.arrays, alive)
        return [jax.device_put(view, device) for view, device in zip(views, devices, strict=True)]

    def abandon(self, room: None) -> None:
        """Views that were made die with the failed pull."""

    def may_ack(self, ticket: Ticket) -> bool:
        return not self._mappings.is_read(ticket.id)

    def let_go(self, offer: Offer, how: Ended) -> None:
        self._segments.release(offer.ticket.id, reuse=how is Ended.ACKED)

    def sweep(self) -> None:
        self._mappings.sweep()

    @property
    def pull_bytes(self) -> int:
        return self._mappings.held_bytes

    def close(self) -> None:
        self._segments.close()
        self._mappings.close()
