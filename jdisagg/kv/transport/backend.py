"""What one kind of transport between processes brings of its own: how the bytes move."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from jax import Array

from jdisagg.kv.transport.connection import Connection
from jdisagg.kv.transport.deadline import Deadline
from jdisagg.kv.transport.offers import Ended, Offer
from jdisagg.kv.transport.ticket import Ticket


class Backend(Protocol):
    """How the bytes of a granted offer move. Any thread may call; what blocks is under a deadline."""

    name: str

    def listen(self) -> tuple[socket.socket, str]:
        """Where the listener stands, and its address."""
        ...

    def prepare_offer(self, offer: Offer) -> None:
        """Source, at the offer: prepares without waiting. May raise TransferFull."""
        ...

    def grant(self, offer: Offer, connection: Connection) -> dict[str, Any]:
        """Source: waits until the offer can be sent; what the destination must know to receive it."""
        ...

    def send(self, offer: Offer, connection: Connection) -> None:
        """Source, after the grant."""
        ...

    def prepare(self, ticket: Ticket) -> Any:
        """Destination, before it asks: whatever `receive` needs room for. May raise TransferFull."""
        ...

    def receive(
        self,
        ticket: Ticket,
        room: Any,
        grant: dict[str, Any],
        connection: Connection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        """Destination: the arrays, in place."""
        ...

    def abandon(self, room: Any) -> None:
        """Destination: `receive` will not be called, or failed."""
        ...

    def may_ack(self, ticket: Ticket) -> bool:
        """Destination: whether the source may have its memory back now."""
        ...

    def release(self, offer: Offer, how: Ended) -> None:
        """Source, once at the offer's end."""
        ...

    def sweep(self) -> None:
        """About twice a second."""
        ...

    @property
    def pull_bytes(self) -> int: ...

    def close(self) -> None: ...
