"""Messages between processes: MessagePack that proves who wrote it, in which session, and that it comes once, in order.

Every record carries an HMAC-SHA256 over the session, the direction, its number and its bytes. A session is named by two
fresh nonces, one of each end, so a record of another session, of the other direction, out of its turn or changed on the
way is refused. Nothing is ever unpickled, and a record over the limit is refused before it is read.
"""

from __future__ import annotations

import hmac
from typing import Any, cast

import msgspec

from jdisagg.core.errors import BadTicket

MAX_RECORD_BYTES = 64 << 20  # a prompt of a million tokens takes at most 5 MB
MAC_HEX = 64


def mac_of(secret: bytes, *parts: str | bytes) -> str:
    """Returns the HMAC-SHA256 in hex over the parts, each with its length, so that no two lists have one text."""
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    return hmac.digest(secret, b"".join(b"%d:%b" % (len(part), part) for part in encoded), "sha256").hex()


def _plain(value: Any) -> Any:
    """Returns the plain value of a subclass, as the numbers of numpy are. Raises TypeError where it is none."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class AuthenticatedChannel:
    """One direction of one session: `sign` makes records at one end, `verify` reads them at the other, in order."""

    def __init__(self, secret: bytes, session: str, direction: str) -> None:
        self._secret, self._session, self._direction = secret, session, direction
        self._number = 0

    def sign(self, body: dict[str, Any]) -> bytes:
        """Returns the record of `body`: JSON values, bytes and structs. Raises BadTicket where it cannot be sent."""
        try:
            payload = ENCODER.encode(body)
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadTicket(f"a record that cannot be sent: {error}") from error
        record = self._mac(payload).encode() + payload
        if len(record) > MAX_RECORD_BYTES:
            raise BadTicket(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
        self._number += 1
        return record

    def verify(self, record: bytes) -> dict[str, Any]:
        """Returns what `sign` was given, structs as objects. Raises BadTicket; the session is of no more use then."""
        if len(record) > MAX_RECORD_BYTES:
            raise BadTicket(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
        mac, payload = record[:MAC_HEX], record[MAC_HEX:]
        if not hmac.compare_digest(mac, self._mac(payload).encode()):
            raise BadTicket(
                f"record {self._number} of session {self._session[:8]} is not signed by its {self._direction}"
            )
        self._number += 1
        where = f"record {self._number - 1} of session {self._session[:8]}"
        try:
            body = msgspec.msgpack.decode(payload)
        except UNREADABLE as error:  # signed, and no MessagePack: cut short, or 100,000 arrays deep
            raise BadTicket(f"{where} is no MessagePack: {error}") from error
        if not isinstance(body, dict):
            raise BadTicket(f"{where} is no object: {payload[:40]!r}")
        return cast(dict[str, Any], body)

    def _mac(self, payload: bytes) -> str:
        return mac_of(self._secret, self._session, self._direction, str(self._number), payload)
