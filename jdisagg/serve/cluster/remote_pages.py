"""Records of pages that workers of different processes lend each other: offered as KV is, announced, and pulled.

The notice (who lends, which question it answers, the ticket) goes by the control link; whoever does not wait for it any
longer pulls nothing, and the offer ends by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdisagg.core.codec import decode_as, encode, shown
from jdisagg.core.errors import BadTicket, DecodeError, SenselessWord
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.kv.transport.ticket import Ticket, TransferId, read_ticket
from jdisagg.parallel.submesh import Device
from jdisagg.serve.cluster.remote_kv import PeerRecord, RemoteKV
from jdisagg.serve.driver.kv_moves import Lent

LONGEST_FINGERPRINT = 64


@dataclass(frozen=True, slots=True)
class LentNotice:
    """That records are offered to who asked for them."""

    asked: Attempt
    fingerprint: str
    ticket: Ticket


def offer_records(kv: RemoteKV, lent: Lent, peer: PeerRecord) -> dict[str, Any]:
    """The notice of what is offered now. Raises TransportError."""
    transfer = TransferId(f"{lent.asker} {lent.asked.request_id}", lent.asked.epoch, 0)
    ticket = kv.offer(transfer, [jax.device_put(lent.records, _host())], peer)
    return {"asked": encode(lent.asked), "fingerprint": lent.fingerprint, "ticket": ticket.to_json()}


def read_lent(record: Any) -> LentNotice:
    """Raises SenselessWord, BadTicket."""
    try:
        asked, fingerprint = decode_as(Attempt, record["asked"]), record["fingerprint"]
        ticket = read_ticket(record["ticket"])
    except (KeyError, TypeError, DecodeError) as error:
        raise SenselessWord(f"a notice of pages that cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(fingerprint, str) or len(fingerprint) > LONGEST_FINGERPRINT:
        raise SenselessWord(f"a notice of pages of {shown(fingerprint)}")
    if [(each.dtype, len(each.shape)) for each in ticket.arrays] != [("uint8", 2)]:
        raise BadTicket(f"a notice of pages offers {shown(str(ticket.arrays))}, records are one array of bytes")
    return LentNotice(asked, fingerprint, ticket)


def pull_records(kv: RemoteKV, notice: LentNotice, lender: WorkerId, asker: WorkerId) -> Lent:
    """Blocks. Raises TransportError."""
    (array,) = kv.pull_offer(notice.ticket, [_host()])
    return Lent(lender, asker, notice.asked, np.asarray(array), notice.fingerprint)


def _host() -> Device:
    """Where records lie: the host's memory, as far as JAX knows it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
