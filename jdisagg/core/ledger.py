"""Where a request's time went, in whole nanoseconds, so that the parts sum to the whole exactly."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import field

from jdisagg.core.codec import TaggedStruct, Whole


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


Span = tuple[str, int, int]  # (part, when it began, when it ended)


def parts_of(spans: Sequence[Span]) -> dict[str, int]:
    """How long each part was in all."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for part, began, ended in spans:
        parts[part] += ended - began
    return parts


class Ledger(TaggedStruct, frozen=False):  # pyright: ignore[reportGeneralTypeIssues]
    """Instants on the driver's clock as they happened; a repeated prefill simply appends."""

    marks: list[tuple[Mark, Whole]] = field(default_factory=list[tuple[Mark, int]])
    wire_ns: Whole = 0  # that parts of its KV were on their way, whatever else happened meanwhile
    cached_tokens: Whole = 0  # of the prompt: their KV was found and not computed

    def mark(self, mark: Mark, at_s: float) -> None:
        """Notes an instant. Clocks of several reporters may disagree a little: time never runs backwards here."""
        at_ns = round(at_s * 1e9)
        if self.marks:
            at_ns = max(at_ns, self.marks[-1][1])
        self.marks.append((mark, at_ns))

    def parts_ns(self) -> dict[str, int]:
        """Nanoseconds of each part; they sum to `total_ns` by construction."""
        return parts_of(self.spans())

    def spans(self, now_ns: int | None = None) -> list[Span]:
        """In nanoseconds, in order and without a gap; the last ends `now_ns` where it is told."""
        ends = [at_ns for _, at_ns in self.marks[1:]]
        if now_ns is not None and self.marks and self.marks[-1][0] is not Mark.ENDED:
            ends.append(max(now_ns, self.marks[-1][1]))
        return [(PART_BEGINNING_AT[mark], began, ended) for (mark, began), ended in zip(self.marks, ends, strict=False)]

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
