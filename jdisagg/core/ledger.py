"""The ledger of a request's time, in whole nanoseconds, so that the phases sum exactly to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import field

from jdisagg.core.codec import TaggedStruct, Whole


class Mark(StrEnum):
    """The instants of a request, in order. A request that is prefilled again returns to REQUEUED."""

    ARRIVED = "arrived"
    RESERVE_SENT = "reserve_sent"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    COMMITTED = "committed"
    FIRST_STEP = "first_step"
    REQUEUED = "requeued"
    ENDED = "ended"


# The phase that begins at each mark; a request that is cut short is charged for the phase it was in.
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


Span = tuple[str, int, int]  # (phase, start, end)


def parts_of(spans: Sequence[Span]) -> dict[str, int]:
    """Returns the total duration of each phase."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for part, began, ended in spans:
        parts[part] += ended - began
    return parts


class Ledger(TaggedStruct, frozen=False):  # pyright: ignore[reportGeneralTypeIssues]
    """The recorded instants of a request, on the driver's clock; a repeated prefill appends further ones."""

    marks: list[tuple[Mark, Whole]] = field(default_factory=list[tuple[Mark, int]])
    wire_ns: Whole = 0  # time in which chunks of its KV were in transfer, during any phase
    cached_tokens: Whole = 0  # prompt tokens whose KV was cached and not computed

    def mark(self, mark: Mark, at_s: float) -> None:
        """Records an instant. Clocks of several reporters may differ a little: recorded time never goes backwards."""
        at_ns = round(at_s * 1e9)
        if self.marks:
            at_ns = max(at_ns, self.marks[-1][1])
        self.marks.append((mark, at_ns))

    def parts_ns(self) -> dict[str, int]:
        """Returns the nanoseconds of each phase; they sum to `total_ns` by construction."""
        return parts_of(self.spans())

    def spans(self, now_ns: int | None = None) -> list[Span]:
        """Returns the spans in nanoseconds, in order and without a gap; the last ends at `now_ns` if that is given."""
        ends = [at_ns for _, at_ns in self.marks[1:]]
        if now_ns is not None and self.marks and self.marks[-1][0] is not Mark.ENDED:
            ends.append(max(now_ns, self.marks[-1][1]))
        return [(PART_BEGINNING_AT[mark], began, ended) for (mark, began), ended in zip(self.marks, ends, strict=False)]

    def transfer_ns(self) -> tuple[int, int]:
        """Returns (hidden, exposed) nanoseconds of the transfer.

        Exposed is the phase of that name: from the first token to the complete reservation. It is never underestimated:
        if the first stages of a step ran before the last chunk arrived, that time counts as exposed, and the gain shows
        as a shorter `first_step`. Hidden is the transfer time beyond that, while the prompt was still being computed.
        """
        exposed = self.parts_ns()["transfer"]
        return max(0, self.wire_ns - exposed), exposed

    @property
    def total_ns(self) -> int:
        return self.marks[-1][1] - self.marks[0][1] if self.marks else 0
