"""Answers that end by a word of their own, not by the limit that they were asked with: nobody knows when beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jdisagg.core.events import StepDone
from jdisagg.core.request import RequestId, Sampled, WorkerId
from jdisagg.core.steps import DecodeRows, PrefillChunk, StepPlan
from jdisagg.sim.device import TOKEN, done, widths_of

STOP_TOKEN = 1  # what is drawn else is 0
STOP = Sampled(STOP_TOKEN)


@dataclass(slots=True)
class Seat:
    """Who is in a slot, and how many tokens of it are out; none to come once it has stopped."""

    request_id: RequestId
    drawn: int


@dataclass(slots=True)
class Stops:
    """`lengths`: output tokens of each request, the last of which is the stop. Steps are to be told in their order."""

    lengths: Mapping[RequestId, int] = field(default_factory=dict[RequestId, int])
    _seats: dict[tuple[WorkerId, int], Seat] = field(default_factory=dict[tuple[WorkerId, int], Seat])

    def done(self, worker: WorkerId, plan: StepPlan) -> StepDone:
        """As `device.done`, with stops."""
        if not self.lengths:
            return done(plan)
        first = tuple(self._first(chunk) for chunk in plan.prefill.chunks if chunk.last) if plan.prefill else ()
        decode = self._rows(worker, plan.decode) if plan.decode else ()
        return replace(done(plan), decode=decode, first=first)

    def _first(self, chunk: PrefillChunk) -> tuple[RequestId, Sampled]:
        stops = chunk.num_output + 1 >= self.lengths[chunk.request_id]
        return chunk.request_id, STOP if stops else TOKEN

    def _rows(self, worker: WorkerId, rows: DecodeRows) -> tuple[tuple[int, tuple[Sampled, ...] | None], ...]:
        for slot in rows.retire:
            self._seats.pop((worker, slot), None)
        for each in rows.admit:
            self._seats[worker, each.slot] = Seat(each.request_id, each.num_output)
        widths = zip(rows.active, widths_of(rows), strict=True)
        return tuple((slot, self._draw(self._seats[worker, slot], width)) for slot, width in widths)

    def _draw(self, seat: Seat, width: int) -> tuple[Sampled, ...] | None:
        left = self.lengths[seat.request_id] - seat.drawn
        if left <= 0:
            return None
        seat.drawn += width
        return (TOKEN,) * width if width < left else (*(TOKEN,) * (left - 1), STOP)
