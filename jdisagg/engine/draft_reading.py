"""What a draft model has read of each slot, and what it is still to read: some of it between two steps.

What it has read lies in its pages, which come with the model's from wherever the tokens were computed, and say
themselves how far they go (`DraftLayers.found`). What is not there is read from the tokens, at most PRIMED of them a
step, so that the rows beside it go on; n-grams guess meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from jdisagg.core.steps import Admission, DecodeRows, PrefillChunk, PrefillChunks
from jdisagg.engine.decode import Microbatch
from jdisagg.engine.draft_layers import LATELY, DraftLayers
from jdisagg.engine.prefill import pack

KNOWN_AFTER = 2  # steps: what a step's programs found is then read by nobody who would wait for it


@dataclass(frozen=True)
class Asked:
    """How many tokens of a slot the pages have, on its way to the host."""

    admission: Admission
    step: int
    found: Array  # i32[]


class DraftReading:
    """Of the slots of one microbatch, by their rows."""

    def __init__(self, layers: DraftLayers, batch: Microbatch) -> None:
        self.layers, self.batch, self.steps = layers, batch, 0
        self.fed: Array = batch.put(np.zeros(batch.size, np.int32))  # tokens whose KV is there
        self.arriving: dict[int, Admission] = {}  # their pages may be on their way
        self.asked: dict[int, Asked] = {}
        self.behind: dict[int, tuple[Admission, int]] = {}  # and the next token to read

    def begin(self, plan: DecodeRows) -> None:
        """Before the rows of a step guess."""
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
            self._read_on()

    def _forget(self, row: int) -> None:
        for each in (self.arriving, self.asked, self.behind):
            each.pop(row, None)

    def _look(self) -> None:
        """How far the pages of those go who have all of them now."""
        for row, admission in self.arriving.items():
            if not self.layers.kept:
                self.behind[row] = admission, 0
                self._restart(row, 0)
                continue
            size = self.layers.worker.page_size
            written, page = admission.position % size, admission.position // size
            self.layers.wipe([(each, 0 if at else written) for at, each in enumerate(admission.pages[page:])])
            found = self.layers.found(admission)
            self._restart(row, found)
            found.copy_to_host_async()
            self.asked[row] = Asked(admission, self.steps, found)
        self.arriving.clear()
        for row, asked in list(self.asked.items()):
            if self.steps >= asked.step + KNOWN_AFTER:
                del self.asked[row]
                found = int(np.asarray(asked.found))
                if found + LATELY < asked.admission.position:
                    self.behind[row] = asked.admission, found

    def _restart(self, row: int, found: int | Array) -> None:
        count = np.asarray(found, np.int32) if isinstance(found, int) else found
        self.fed = self.layers.set_fed(self.fed, *self.batch.put((np.asarray(row, np.int32), count)))

    def _read_on(self) -> None:
        """Some tokens of those who are behind."""
        layers, room, chunks, reached = self.layers, self.layers.primed_tokens, list[PrefillChunk](), dict[int, int]()
        for row, (admission, start) in list(self.behind.items()):
            if not room or len(chunks) == layers.worker.max_chunk_seqs:
                break
            tokens = admission.history.whole[start : min(admission.position, start + room)]
            room, reached[row] = room - len(tokens), start + len(tokens)
            pages = admission.pages[: layers.worker.pages_for(reached[row])]
            chunks.append(PrefillChunk(admission.request_id, tokens, start, pages, False, admission.sampling))
            self.behind[row] = admission, reached[row]
            if reached[row] == admission.position:
                del self.behind[row]
        if not chunks:
            return
        plan = PrefillChunks(tuple(chunks), layers.primed_tokens, layers.worker.table_buckets[-1])
        layers.read(pack(plan, layers.worker))
        places = np.full((2, layers.worker.max_chunk_seqs), self.batch.size, np.int32)
        places[:, : len(reached)] = list(reached), list(reached.values())
        self.fed = layers.set_reached(self.fed, *self.batch.put((places[0], places[1])))
