"""Simulated outputs that end by a stop token at a length that is not known in advance, not by max_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jdisagg.core.events import StepDone
from jdisagg.core.request import RequestId, Sampled, WorkerId
from jdisagg.core.steps import DecodeRows, PrefillChunk, StepPlan
from jdisagg.sim.device import TOKEN, done, widths_of

STOP_TOKEN = 1  # every other sampled token is 0
STOP = Sampled(STOP_TOKEN)


@dataclass(slots=True)
class SlotState:
    """The request in a slot and the number of its tokens so far; it gets none after its stop."""

    request_id: RequestId
    num_tokens: int


@dataclass(slots=True)
class StopSchedule:
    """The simulated stop tokens of all requests. Steps must be passed in their order. `lengths`: output tokens of each
    request, the last of which is the stop."""

    lengths: Mapping[RequestId, int] = field(default_factory=dict[RequestId, int])
    _slots: dict[tuple[WorkerId, int], SlotState] = field(default_factory=dict[tuple[WorkerId, int], SlotState])

    def done(self, worker: WorkerId, plan: StepPlan) -> StepDone:
        """Returns the outputs of a step as `device.done`, with stop tokens."""
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
            self._slots.pop((worker, slot), None)
        for each in rows.admit:
            self._slots[worker, each.slot] = SlotState(each.request_id, each.num_output)
        widths = zip(rows.active, widths_of(rows), strict=True)
        return tuple((slot, self._draw(self._slots[worker, slot], width)) for slot, width in widths)

    def _draw(self, slot_state: SlotState, width: int) -> tuple[Sampled, ...] | None:
        remaining = self.lengths[slot_state.request_id] - slot_state.num_tokens
        if remaining <= 0:
            return None
        slot_state.num_tokens += width
        return (TOKEN,) * width if width < remaining else (*(TOKEN,) * (remaining - 1), STOP)
