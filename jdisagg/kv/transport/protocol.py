"""The one protocol of all transports: how transfers of KV cross from a source to a destination, and how they end.

A transport is both ends: a process offers from it and pulls by it. Every ticket ends exactly once (acked, cancelled,
expired, or broken off), and then nothing is held for it anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array

from jdisagg.kv.transport.ticket import Ticket, TransferId


@dataclass(frozen=True, slots=True)
class Held:
    """What a transport holds at this moment."""

    offers: int  # tickets that have not ended
    offer_bytes: int  # of them
    pull_bytes: int  # receive buffers that jax, or a pull under way, still reads or writes
    connections: int


class Transport(Protocol):
    """Any thread may call any method. Deadline are absolute seconds of the transport's clock
    (`TransportConfig.clock`).
    """

    name: str
    address: str  # where its offers are pulled from; tickets carry it

    def offer(self, transfer: TransferId, arrays: Sequence[Array], deadline_s: float) -> Ticket:
        """Source. Holds `arrays`, each on one device, computed or still being computed; returns at once.

        They are the transport's until the ticket ends: do not donate or delete them. At `deadline_s` the offer ends
        by itself. Raises TransferFull (over `TransportConfig.offer_limit_bytes`; nothing is held), BadTicket (cannot
        travel).
        """
        ...

    def pull(self, ticket: Ticket, devices: Sequence[Any], deadline_s: float) -> list[Array]:
        """Destination. Array i of the offer, on `devices[i]`; blocks until the bytes are here, at most to the deadline.

        Waits for arrays that are still being computed. A ticket is good for one pull that was granted, whatever came
        of it: after a failure ask the source for a new offer. TransferFull at this end, and PeerDead before the source
        was reached, leave the ticket good. Raises PeerDead, TransferTimeout, TransferCancelled, TransferRefused,
        PeerMismatch, BadTicket.
        """
        ...

    def ack(self, ticket: Ticket) -> bool:
        """Either end. The arrays are where they belong: the source lets go. False where the source was not reached.

        From the destination it takes one round trip, `TransportConfig.control_timeout_s` at the most; at the source,
        none.
        """
        ...

    def cancel(self, ticket: Ticket) -> bool:
        """Either end, in any state, as often as one likes: the ticket ends, and a pull under way raises within 0.1 s.

        Returns and takes time as `ack` does.
        """
        ...

    def expire(self, now_s: float) -> list[Ticket]:
        """Source. Ends what is past its deadline and says which; also done each second by the transports' own threads.

        The destination's buffers that jax has dropped, and idle connections, are let go as well.
        """
        ...

    def held(self) -> Held: ...

    def close(self) -> None:
        """Ends every ticket, connection and thread. What was pulled stays valid for as long as its arrays live."""
        ...
