"""Tickets: what the source hands to the destination, by way of the control plane, for one transfer of KV.

A ticket is JSON (never pickle), names no memory, is good for one pull, and carries an HMAC-SHA256 of all its fields,
so that a destination connects nowhere and allocates nothing on the word of a stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from jax import Array

from jdisagg.core.errors import BadTicket

ID_BITS = 53  # the most that every JSON reader keeps exactly
MAX_ARRAYS = 4096
MAX_RANK = 8
MAX_TEXT = 256
# what jax takes over from numpy bit by bit; the 64-bit types are not among them, jax would narrow them
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ("float32", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8")
} | {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of one device, C-contiguous."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferId:
    """What is in a transfer: `part` of the handoff (chunk, layer group or attempt: the sender's numbering)."""

    handoff: str
    epoch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """One offer, as its destination learns of it; shard i of the source is array i of the destination."""

    transport: str
    address: str  # where the source answers
    id: int  # random, ID_BITS bits
    transfer: TransferId
    arrays: tuple[ArraySpec, ...]
    tag: str = ""  # hex HMAC-SHA256 of everything above

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def to_json(self) -> dict[str, Any]:
        """A record that `json.dumps` takes and `read_ticket` reads."""
        return asdict(self)


def issue(transport: str, address: str, transfer: TransferId, arrays: Sequence[Array], secret: bytes) -> Ticket:
    """A signed ticket with a fresh id. Raises BadTicket naming what no ticket can carry."""
    specs = tuple(spec_of(array) for array in arrays)
    ticket = Ticket(transport, address, secrets.randbits(ID_BITS), transfer, specs)
    return replace(check(ticket), tag=tag_of(ticket, secret))


def spec_of(array: Array) -> ArraySpec:
    """Of an array that lies on one device, computed or not."""
    if len(array.devices()) != 1:
        raise BadTicket(f"an array on {len(array.devices())} devices was offered; offer its shards, each on 1 device")
    return ArraySpec(tuple(array.shape), array.dtype.name, array.nbytes)


def tag_of(ticket: Ticket, secret: bytes) -> str:
    transfer = (
        ticket.transfer
    )  # spelled out, field by field: `asdict` takes ten times as long, at both ends of every pull
    fields = [ticket.transport, ticket.address, ticket.id, transfer.handoff, transfer.epoch, transfer.part]
    text = json.dumps([*fields, *([each.shape, each.dtype, each.nbytes] for each in ticket.arrays)])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def verify(ticket: Ticket, secret: bytes) -> None:
    """Raises BadTicket unless `secret` signed exactly this."""
    if not hmac.compare_digest(tag_of(ticket, secret).encode(), ticket.tag.encode()):
        raise BadTicket(f"ticket {ticket.id} to {ticket.address!r} is not signed by our secret")


def read_ticket(record: Any) -> Ticket:
    """The ticket of a JSON record; it is not verified yet. Raises BadTicket naming the field."""
    try:
        arrays = tuple(
            ArraySpec(tuple(_number(n, 1 << 40) for n in each["shape"]), _text(each["dtype"]), _number(each["nbytes"]))
            for each in record["arrays"]
        )
        transfer = record["transfer"]
        return check(
            Ticket(
                _text(record["transport"]),
                _text(record["address"]),
                _number(record["id"], 1 << ID_BITS),
                TransferId(_text(transfer["handoff"]), _number(transfer["epoch"]), _number(transfer["part"])),
                arrays,
                _text(record["tag"]),
            )
        )
    except (KeyError, TypeError) as error:
        raise BadTicket(f"a ticket must be a record with every field of Ticket: {error!r}") from error


def check(ticket: Ticket) -> Ticket:
    """The ticket. Raises BadTicket where a size is not what its shape and dtype say, or over the limits."""
    if not 0 < len(ticket.arrays) <= MAX_ARRAYS:
        raise BadTicket(f"a ticket carries 1 to {MAX_ARRAYS} arrays, not {len(ticket.arrays)}")
    for array in ticket.arrays:
        if array.dtype not in DTYPES or len(array.shape) > MAX_RANK:
            raise BadTicket(f"{array.dtype}{list(array.shape)} cannot travel: dtypes are {', '.join(DTYPES)}")
        wanted = math.prod(array.shape) * DTYPES[array.dtype].itemsize
        if array.nbytes != wanted or not wanted:
            raise BadTicket(f"{array.dtype}{list(array.shape)} is {wanted} bytes and not {array.nbytes}, and never 0")
    return ticket


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadTicket(f"a text of at most {MAX_TEXT} characters was expected, got {str(value)[:40]!r}")
    return value


def _number(value: Any, below: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise BadTicket(f"a whole number from 0 to {below - 1} was expected, got {str(value)[:40]!r}")
    return value


# The one protocol of all transports: how transfers of KV cross from a source to a destination, and how they end.
#
# A transport is both ends: a process offers from it and pulls by it. Every ticket ends exactly once (acked,
# cancelled, expired, or broken off), and then nothing is held for it anywhere.


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
