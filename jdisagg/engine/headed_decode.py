"""Decode rows whose drafts a head guesses, from the states that the model's own head takes.

Of each slot the device that draws holds the state before the token that is fed next. The group's programs are given it
with the rows, as the head's entry of the first of them is made of it, and give back the states of all rows; what was
drawn says which of those is held next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import Array

from jdisagg.core.steps import Admission, DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.decode import Drawing, Microbatch
from jdisagg.engine.drafting import DraftingDecoder, Guesses
from jdisagg.engine.draw_declarations import Drawn
from jdisagg.engine.headed_group import HeadedGroup, carried_on, declared_guesses, forgotten
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.parallel.submesh import Program


class HeadPrograms:
    """The programs of a head beside those of its group."""

    def __init__(self, group: HeadedGroup) -> None:
        self.group = group
        self.carry, self.forget = Program(carried_on), Program(forgotten)

    @property
    def programs(self) -> list[Program]:
        return [self.carry, self.forget]

    def declared(self, slots: Drawn, widths: Sequence[Drawn]) -> Iterator[DeclaredProgram]:
        """`slots` that draw, and `widths` of rows of them all."""
        number, states = slots.rows, self.group.dtype

        def held(count: int) -> Any:
            return slots.of((count, self.group.config.hidden_size), states)

        taken = slots.ints(4, number), slots.ints(4, number)
        yield slots.program("draw forget", self.forget, (held(number), slots.ints()))
        for rows in (slots, *widths):
            yield rows.program("draw carry", self.carry, (held(number), held(rows.rows), *taken))
        for rows in widths:
            yield from declared_guesses(self.group, slots.stage, number, rows.rows // number - 1)


class HeadedDecoder(DraftingDecoder):
    """A `DraftingDecoder` over a group that has a head."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(layer_groups, config, vocab_size, grammars)
        assert isinstance(layer_groups[-1], HeadedGroup), "the last stage has the head"
        self.group = layer_groups[-1]
        self.head = self.drafts.head = HeadPrograms(self.group)
        shape = config.slots_per_microbatch, self.group.config.hidden_size
        self.kept: list[Array] = [batch.put(np.zeros(shape, self.group.dtype)) for batch in self.microbatches]

    def _admit(self, batch: Microbatch, guesses: Guesses, admission: Admission) -> None:
        super()._admit(batch, guesses, admission)
        place, row = self._place(batch), batch.put(np.asarray(admission.slot - batch.first_slot, np.int32))
        self.kept[place] = self.head.forget(self.kept[place], row)

    def _guess(self, batch: Microbatch, guesses: Guesses, given: Array, width: int) -> Array:
        table = batch.table_on(self.group.submesh, width)
        held = batch.state, self.kept[self._place(batch)], guesses.widths, given, batch.metadata
        return self.group.guess(table, *held)

    def inputs(self, group: LayerGroup, batch: Microbatch, width: int) -> tuple[Array, ...]:
        """As without a head; for the group that has it the states before the rows, [B, hidden], besides."""
        held = super().inputs(group, batch, width)
        return (*held, group.submesh.spread(self.kept[self._place(batch)])) if group is self.group else held

    def finish(self, batch: Microbatch, plan: DecodeRows, logits: Array) -> Drawing:
        before, states, place = batch.state, self.group.states_of_rows, self._place(batch)
        assert states is not None, "the group's program ran"
        drawing = super().finish(batch, plan, logits)
        self.kept[place] = self.head.carry(self.kept[place], states.addressable_data(0), before, batch.state)
        return drawing

    def _place(self, batch: Microbatch) -> int:
        return batch.first_slot // batch.size
