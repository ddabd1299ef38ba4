"""Where a request's time went, in whole nanoseconds, so that the parts sum to the whole exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Mark(StrEnum):
    """Instants of a request's life, in order. A request that is prefilled again goes back to REQUEUED."""

    ARRIVED = "arrived"
    RESERVE_SENT = "reserve_sent"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    COMMITTED = "committed"
    FIRST_STEP = "first_step"
    REQUEUED = "requeued"
    ENDED = "ended"


# The part of the ledger that begins at each mark, so that a request cut short is charged for what it was doing.
PART_BEGINNING_AT: dict[Mark, str] = {
    Mark.ARRIVED: "queue",
    Mark.RESERVE_SENT: "reserve_wait",
    Mark.RESERVED: "queue",
    Mark.PREFILL_STARTED: "prefill",
    Mark.FIRST_TOKEN: "transfer",
    Mark.COMMITTED: "first_step",
    Mark.FIRST_STEP: "decode",
    Mark.REQUEUED: "queue",
}
PARTS: tuple[str, ...] = ("queue", "reserve_wait", "prefill", "transfer", "first_step", "decode")


@dataclass(slots=True)
class Ledger:
    """Instants on the driver's clock as they happened; a repeated prefill simply appends."""

    marks: list[tuple[Mark, int]] = field(default_factory=list[tuple[Mark, int]])
    cached_tokens: int = 0  # of its prompt, whose KV the worker that prefilled it first had already
    wire_ns: int = 0  # that parts of its KV were on their way, whatever else happened meanwhile
    cached_tokens: int = 0  # of the prompt: their KV was found and not computed

    def mark(self, mark: Mark, at_s: float) -> None:
        """Notes an instant. Clocks of several reporters may disagree a little: time never runs backwards here."""
        at_ns = round(at_s * 1e9)
        if self.marks:
            at_ns = max(at_ns, self.marks[-1][1])
        self.marks.append((mark, at_ns))

    def parts_ns(self) -> dict[str, int]:
        """Nanoseconds of each part; they sum to `total_ns` by construction."""
        parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        for (mark, began), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            parts[PART_BEGINNING_AT[mark]] += ended - began
        return parts

    def transfer_ns(self) -> tuple[int, int]:
        """(hidden, exposed) nanoseconds of the transfer.

        Exposed is the ledger's part of that name: from the first token to the complete reservation. It is never too
        little: where the first stages of a step ran before the last part was in, that time is exposed all the same,
        and what was gained by it shows as a shorter `first_step`.
        Hidden is the time on the wire beyond that, while the prompt was still being computed.
        """
        exposed = self.parts_ns()["transfer"]
        return max(0, self.wire_ns - exposed), exposed

    @property
    def total_ns(self) -> int:
        return self.marks[-1][1] - self.marks[0][1] if self.marks else 0
