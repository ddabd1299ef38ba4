"""Where a request's time went, in whole nanoseconds, so that the parts sum to the whole exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Mark(StrEnum):
    """Instants of a request's life, in order. A request that is prefilled again sets the later ones anew."""

    ARRIVED = "arrived"
    RESERVE_SENT = "reserve_sent"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    COMMITTED = "committed"
    FIRST_STEP = "first_step"
    ENDED = "ended"


# The part of the ledger that ends at each mark.
PART_ENDING_AT: dict[Mark, str] = {
    Mark.RESERVE_SENT: "queue",
    Mark.RESERVED: "reserve_wait",
    Mark.PREFILL_STARTED: "queue",
    Mark.FIRST_TOKEN: "prefill",
    Mark.COMMITTED: "transfer",
    Mark.FIRST_STEP: "first_step",
    Mark.ENDED: "decode",
}
PARTS: tuple[str, ...] = ("queue", "reserve_wait", "prefill", "transfer", "first_step", "decode")


@dataclass(slots=True)
class Ledger:
    """Instants on the driver's clock as they happened; a repeated prefill simply appends."""

    marks: list[tuple[Mark, int]] = field(default_factory=list)

    def mark(self, mark: Mark, at_s: float) -> None:
        """Notes an instant. Clocks of several reporters may disagree a little: time never runs backwards here."""
        at_ns = round(at_s * 1e9)
        if self.marks:
            at_ns = max(at_ns, self.marks[-1][1])
        self.marks.append((mark, at_ns))

    def parts_ns(self) -> dict[str, int]:
        """Nanoseconds of each part; they sum to `total_ns` by construction."""
        parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        for (_, before), (mark, at) in zip(self.marks, self.marks[1:], strict=False):
            parts[PART_ENDING_AT.get(mark, "queue")] += at - before
        return parts

    @property
    def total_ns(self) -> int:
        return self.marks[-1][1] - self.marks[0][1] if self.marks else 0
