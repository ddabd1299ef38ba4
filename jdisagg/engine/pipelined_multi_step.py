"""Several decode steps of several stages in one dispatch: a step of all slots, run as single steps of one microbatch
after the other, all dispatched before any is read.

A sampled token enters the first stage again on the devices. While one microbatch is at a stage the others are at the
other ones, so no stage waits for the host. Programs are those of single steps, so every kind of sampling takes part. A
row that has all its tokens is masked from the next step on, and a row that sampled its stop token masks itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from jax import Array

from jdisagg.core.events import StepDone
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows
from jdisagg.engine.decode import Drawing, DrawnRows
from jdisagg.engine.expert_load import ExpertLoad


def single_steps(rows: DecodeRows, batches: int, size: int) -> tuple[DecodeRows, ...]:
    """Returns the single steps of `batches` microbatches of `size` slots that make up a step of all slots, in the order
    of their dispatch.

    Changes go with a microbatch's first step, even if it has no active slot. Equal steps are one object, so that
    nothing is computed again for them.
    """
    firsts = [_of_batch(rows, batch, range(batch * size, (batch + 1) * size)) for batch in range(batches)]
    rounds = [[first for first in firsts if first.active or _changes(first)]]
    widths = rows.widths if rows.turns else ()
    latest = dict(enumerate(firsts))
    for turn in range(1, max(widths, default=1)):
        drawing = {slot for slot, width in zip(rows.active, widths, strict=True) if width > turn}
        latest = {batch: _next_turn(before, drawing) for batch, before in latest.items()}
        rounds.append([each for each in latest.values() if each.active])
    return tuple(chain.from_iterable(rounds))


def _of_batch(rows: DecodeRows, batch: int, slots: range) -> DecodeRows:
    width_of = dict(zip(rows.active, rows.widths, strict=True)) if rows.widths and not rows.turns else {}
    active = tuple(slot for slot in rows.active if slot in slots)
    return DecodeRows(
        batch,
        active,
        rows.table_pages,
        admit=tuple(each for each in rows.admit if each.slot in slots),
        grants=tuple(each for each in rows.grants if each.slot in slots),
        retire=tuple(slot for slot in rows.retire if slot in slots),
        widths=tuple(width_of[slot] for slot in active if width_of),
        read=tuple(each for each in rows.read if each.slot in slots),
    )


def _next_turn(before: DecodeRows, drawing: set[int]) -> DecodeRows:
    """Returns a microbatch's next step, in which only rows that have all their tokens drop out."""
    active = tuple(slot for slot in before.active if slot in drawing)
    if active == before.active and not _changes(before):
        return before
    return replace(
        before, active=before.active if active == before.active else active, admit=(), grants=(), retire=(), read=()
    )


def _changes(rows: DecodeRows) -> bool:
    return bool(rows.admit or rows.grants or rows.retire or rows.read)


class PipelinedMultiStep:
    """The single steps of the rows that were run last: rows that repeat are one object, and taken apart once."""

    def __init__(self, batches: int, size: int) -> None:
        self._sizes = batches, size
        self._last: tuple[DecodeRows, tuple[DecodeRows, ...]] | None = None

    def of(self, rows: DecodeRows) -> tuple[DecodeRows, ...]:
        if self._last is None or self._last[0] is not rows:
            self._last = rows, single_steps(rows, *self._sizes)
        return self._last[1]


@dataclass(frozen=True)
class PendingPipelinedMultiStep:
    """A step of all slots that was dispatched; see `executor.PendingStep`."""

    step_id: int
    plan: DecodeRows
    steps: Sequence[Drawing]
    counts: tuple[tuple[ExpertLoad, list[Array]], ...]

    def read(self) -> StepDone:
        told = self._rows(chain.from_iterable([step.read() for step in self.steps]))
        for load, taken in self.counts:
            load.read(taken)
        guessed = tuple(chain.from_iterable(step.guessed() for step in self.steps))
        return StepDone(self.step_id, told, (), (), guessed=guessed)

    def _rows(self, drawn: chain[tuple[int, tuple[Sampled, ...] | None]]) -> DrawnRows:
        by_slot: dict[int, list[Sampled]] = {slot: [] for slot in self.plan.active}
        for slot, tokens in drawn:
            by_slot[slot] += tokens or ()
        return tuple((slot, tuple(tokens) or None) for slot, tokens in by_slot.items())
