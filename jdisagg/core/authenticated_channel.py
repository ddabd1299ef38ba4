"""Messages between processes: JSON that proves who wrote it, in which session, and that it comes once and in order.

Every record carries an HMAC-SHA256 over the session, the direction, its number and its text. A session is named by two
fresh nonces, one of each end, so a record of another session, of the other direction, out of its turn or changed on the
way is refused. Nothing is ever unpickled, and a record over the limit is refused before it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, cast

from jdisagg.core.errors import BadTicket

MAX_RECORD_BYTES = 64 << 20  # a prompt of a million tokens is 8 MB of JSON
MAC_HEX = 64


def mac_of(secret: bytes, *parts: str) -> str:
    """HMAC-SHA256 in hex over the parts, each with its length, so that no two lists of parts have one text."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


class AuthenticatedChannel:
    """One direction of one session: `sign` makes records at one end, `verify` reads them at the other, in order."""

    def __init__(self, secret: bytes, session: str, direction: str) -> None:
        self._secret, self._session, self._direction = secret, session, direction
        self._number = 0

    def sign(self, body: dict[str, Any]) -> bytes:
        """The record of `body`, JSON values only. Raises BadTicket where it is over the limit."""
        text = json.dumps(body, separators=(",", ":"))
        record = (self._mac(text) + text).encode()
        if len(record) > MAX_RECORD_BYTES:
            raise BadTicket(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
        self._number += 1
        return record

    def verify(self, record: bytes) -> dict[str, Any]:
        """What `sign` was given. Raises BadTicket, and then the session is of no more use."""
        if len(record) > MAX_RECORD_BYTES:
            raise BadTicket(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
        mac, text = record[:MAC_HEX], record[MAC_HEX:].decode(errors="replace")
        if not hmac.compare_digest(mac, self._mac(text).encode()):
            raise BadTicket(
                f"record {self._number} of session {self._session[:8]} is not signed by its {self._direction}"
            )
        self._number += 1
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:  # signed, and no JSON: a number of 5,000 digits, 100,000 brackets
            raise BadTicket(f"record {self._number - 1} of session {self._session[:8]} is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadTicket(f"record {self._number - 1} of session {self._session[:8]} is no object: {text[:40]!r}")
        return cast(dict[str, Any], body)

    def _mac(self, text: str) -> str:
        return mac_of(self._secret, self._session, self._direction, str(self._number), text)
