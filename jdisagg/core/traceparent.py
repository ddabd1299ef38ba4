"""W3C trace context: who asked, as a header says it, and what our own spans are called."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NOBODY, _NO_TRACE = "0" * 16, "0" * 32
SAMPLED = 1  # the one flag there is


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A trace, and the span in it that asked; `parent_id` is empty where nobody did."""

    trace_id: str
    parent_id: str
    flags: int = SAMPLED

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def header(self, span_id: str) -> str:
        """As the one who has span `span_id` tells it."""
        return f"00-{self.trace_id}-{span_id}-{self.flags:02x}"


def parse_traceparent(header: str) -> TraceParent | None:
    """What a `traceparent` says, of version 00 or a later one; None where it says nothing that is valid."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if match[2] == _NO_TRACE or match[3] == _NOBODY:
        return None
    return TraceParent(match[2], match[3], int(match[4], 16) & SAMPLED)


def span_id_of(name: str) -> str:
    """Of the span of this name; the same wherever it is worked out."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def trace_id_of(name: str) -> str:
    """Of a trace that begins here."""
    return hashlib.sha256(b"trace " + name.encode()).hexdigest()[:32]
