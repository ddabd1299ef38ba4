"""What a draft model has read of each slot, and what it is still to read: no more than a guess needs, and not before
one is wanted.

What it has read lies in its pages, which come with the model's from wherever the tokens were computed, and say
themselves how far they go (`DraftLayers.found`). What is not there is read from the tokens, those that were drawn among
them: at most PRIMED of them a step, so that the rows beside it go on; n-grams guess meanwhile. A slot that is asked for
no guess is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from jdisagg.core.steps import Admission, DecodeRows
from jdisagg.engine.decode import Microbatch
from jdisagg.engine.draft_layers import LATELY, DraftLayers
from jdisagg.engine.layer_group import Chunks
from jdisagg.engine.unread_chunks import UnreadChunks, picks

KNOWN_AFTER = 2  # steps: what a step's programs found is then read by nobody who would wait for it


@dataclass(frozen=True)
class Asked:
    """How many tokens of a slot the pages have, on its way to the host."""

    step: int
    position: int  # tokens that they would have, were all there
    found: Array  # i32[]


class DraftReading:
    """Of the slots of one microbatch, by their rows."""

    def __init__(self, layers: DraftLayers, batch: Microbatch) -> None:
        self.layers, self.batch, self.steps = layers, batch, 0
        self.fed: Array = batch.put(np.zeros(batch.size, np.int32))  # tokens whose KV is there
        self.arriving: dict[int, Admission] = {}  # their pages may be on their way
        self.asked: dict[int, Asked] = {}
        self.unread: dict[int, int] = {}  # tokens before the next one whose KV is not there, at most
        worker = layers.worker
        self.places = batch.put((np.arange(layers.primed_tokens, dtype=np.int32), np.int32(worker.page_size)))

    # ------------------------------------------------------------ what is there

    def begin(self, plan: DecodeRows) -> None:
        """Before a step: who comes, and how far the pages of those go who have all of them now."""
        self.steps += 1
        for slot in plan.retire:
            self._forget(slot - self.batch.first_slot)
        for admission in plan.admit:
            row = admission.slot - self.batch.first_slot
            self._forget(row)
            if admission.history.whole:
                self.arriving[row] = admission
        if self.layers.kept:
            self.layers.wipe([(grant.page, 0) for grant in plan.grants])
        if not plan.gates:
            self._look()

    def _forget(self, row: int) -> None:
        for each in (self.arriving, self.asked, self.unread):
            each.pop(row, None)

    def _look(self) -> None:
        for row, admission in self.arriving.items():
            if not self.layers.kept:
                self._restart(row, np.asarray(0, np.int32))
                self.unread[row] = admission.position
                continue
            size = self.layers.worker.page_size
            written, page = admission.position % size, admission.position // size
            self.layers.wipe([(each, 0 if at else written) for at, each in enumerate(admission.pages[page:])])
            found = self.layers.found(admission)
            self._restart(row, found)
            found.copy_to_host_async()
            self.asked[row], self.unread[row] = Asked(self.steps, admission.position, found), 0
        self.arriving.clear()
        for row, asked in list(self.asked.items()):
            if self.steps >= asked.step + KNOWN_AFTER:
                del self.asked[row]
                self.unread[row] += asked.position - int(np.asarray(asked.found))

    def _restart(self, row: int, found: np.ndarray | Array) -> None:
        self.fed = self.layers.set_fed(self.fed, *self.batch.put((np.asarray(row, np.int32), found)))

    # ------------------------------------------------------------ what is read

    def due(self, plan: DecodeRows) -> dict[int, int]:
        """Tokens of each row that are read before the rows of this step guess: of those that are asked for a guess."""
        if plan.gates:
            return {}  # its pages may be on their way
        wide = [slot for slot, width in zip(plan.active, plan.widths, strict=False) if width > 1 and not plan.turns]
        room, found = self.layers.primed_tokens, dict[int, int]()
        for row in (slot - self.batch.first_slot for slot in wide):
            unread = self.unread.get(row, 0)
            if unread >= LATELY and room and len(found) < self.layers.worker.max_chunk_seqs:
                found[row] = min(unread, room)
                room -= found[row]
        return found

    def read(self, due: dict[int, int], history: Array) -> None:
        """history i32[B, S]: the tokens of all slots, by position."""
        layers, batch = self.layers, self.batch
        picked = picks(due, layers.worker.max_chunk_seqs, batch.size)
        held = history, batch.state, self.fed, *batch.put((batch.table.copy(), picked)), *self.places
        made: UnreadChunks = layers.unread(*held)
        layers.prefill(Chunks(*map(layers.submesh.spread, (made.rows, made.spans, made.table))), None)
        self.fed = made.fed
        for row, number in due.items():
            self.unread[row] -= number

    def stepped(self, plan: DecodeRows, *, guessed: bool) -> None:
        """What the rows of this step are going to draw is not read yet; `guessed`: but what was drawn before."""
        for slot, width in zip(plan.active, plan.widths or (1,) * len(plan.active), strict=True):
            row = slot - self.batch.first_slot
            if row not in self.unread:
                continue
            if not guessed or width == 1:
                self.unread[row] += width
            else:
                left = self.unread[row] - LATELY
                self.unread[row] = 1 if left < 0 else left + width
