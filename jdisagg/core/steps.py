"""One step's work in plain numbers: what a worker decides, an engine runs and a cost model prices.

Nothing here knows an array. Every size that a program's shape depends on is a field, so that a plan names its program.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jdisagg.core.codec import TaggedStruct, Whole
from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.worker_config import RAW

NGRAM, DRAFT, GRAMMAR = "ngram", "draft", "grammar"  # what guesses: tokens that stood there before, a model, a grammar


class History(TaggedStruct, frozen=True):
    """The tokens that drawing looks back at: penalties and drafts at all of them, a grammar at the output alone."""

    prompt: tuple[Whole, ...] = ()
    output: tuple[Whole, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.output


class PrefillChunk(TaggedStruct, frozen=True):
    """Consecutive tokens of one sequence. `pages` covers positions 0 to start + len(tokens)."""

    request_id: RequestId
    tokens: tuple[Whole, ...]
    start: Whole  # position of the first token
    pages: tuple[Whole, ...]
    last: bool  # the sequence's last chunk: a token is drawn after it
    sampling: SamplingParams
    history: History = History()  # filled on the last chunk where sampling.recalls
    num_output: Whole = 0  # output tokens among this sequence's tokens (a resumed request has some; for min_tokens)


class PrefillChunks(TaggedStruct, frozen=True):
    """Chunks of several sequences, packed one behind the other."""

    chunks: tuple[PrefillChunk, ...]
    bucket_tokens: Whole  # declared program size, >= all chunks' tokens
    table_pages: Whole  # declared table width, >= the longest chunk's pages

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Admission(TaggedStruct, frozen=True):
    """A sequence takes a slot: its KV holds `position` tokens, `token` (drawn, not yet in the KV) is fed next."""

    slot: Whole
    request_id: RequestId
    token: Whole
    position: Whole
    pages: tuple[Whole, ...]  # all it holds: those of its KV and those reserved for tokens to come
    sampling: SamplingParams
    num_output: Whole  # tokens out so far, `token` included (for min_tokens)
    history: History = History()  # filled where sampling.recalls


class PageGrant(TaggedStruct, frozen=True):
    """Entry `index` of a slot's page table becomes `page`."""

    slot: Whole
    index: Whole
    page: Whole


class Read(TaggedStruct, frozen=True):
    """What a slot drew when it was last active, as the host read it: what it may draw next depends on it."""

    slot: Whole
    tokens: tuple[Whole, ...]


class Gate(TaggedStruct, frozen=True):
    """Parts of an attempt's KV that must be in their pages before this stage of a step may run.

    OpenGates opens it for good: its sequence goes on no further then, and what the stage makes of it counts nothing.
    """

    stage: Whole
    attempt: Attempt
    parts: tuple[Whole, ...]


class DecodeRows(TaggedStruct, frozen=True):
    """The rows of one microbatch: retire, admit, grant, then a token, or a draft's, for every active slot.

    Slots are numbered over the whole worker; microbatch m holds the slots from m * n to (m + 1) * n. A slot whose
    stop token was drawn masks itself on the device, so a step may list it as active before the host has read that.
    A seated slot that is not active is held back: it draws nothing, and goes on from where it was.
    """

    microbatch: Whole
    active: tuple[Whole, ...]
    table_pages: Whole  # declared table width, >= the pages that hold the tokens of the longest active slot
    admit: tuple[Admission, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    retire: tuple[Whole, ...] = ()
    gates: tuple[Gate, ...] = ()  # other microbatches overtake a step that waits at one, and its own takes no other
    widths: tuple[Whole, ...] = ()  # tokens at most that each active slot draws, where any may draw more than one
    turns: bool = False  # in so many turns, each of which draws one; else of a draft that it verifies
    read: tuple[Read, ...] = ()  # of the active slots that have a grammar and are not admitted here

    @property
    def num_turns(self) -> int:
        return max(self.widths, default=1) if self.turns else 1

    @property
    def most_tokens(self) -> int:
        """Tokens that all rows together may draw."""
        return sum(self.widths) if self.widths else len(self.active)


class StepPlan(TaggedStruct, frozen=True):
    """One step of a worker: decode rows, prefill chunks, or both in one program, which then reads each weight once."""

    step_id: Whole
    decode: DecodeRows | None = None
    prefill: PrefillChunks | None = None

    @property
    def lane(self) -> str:
        """Steps of one lane end in the order of their dispatch; one that waits at a gate keeps no other lane's."""
        return "prefill" if self.decode is None else f"decode-{self.decode.microbatch}"

    @property
    def num_rows(self) -> int:
        """Decode rows and chunk tokens together."""
        return (len(self.decode.active) if self.decode else 0) + (self.prefill.num_tokens if self.prefill else 0)

    @property
    def mixed(self) -> bool:
        return self.decode is not None and self.prefill is not None


class KVTransfer(TaggedStruct, frozen=True):
    """One part of a request's KV, from pages of one worker to pages of another. `attempt` fences late writers.

    The two lists begin at the same token and hold the same tokens, each in pages of its own worker's size, so that one
    may be longer than the other. A destination page of 0 is not written: the destination holds its KV already.
    A handoff ships in parts 0, 1, 2, ...; COMMIT says how many. Parts of one handoff share no (page, layer), may
    arrive in any order, and hold the same tokens however often they are shipped.
    """

    attempt: Attempt
    source: WorkerId
    destination: WorkerId
    source_pages: tuple[Whole, ...]
    destination_pages: tuple[Whole, ...]
    num_tokens: Whole  # whose KV these pages hold
    part: Whole = 0
    layers: tuple[Whole, Whole] | None = None  # first and one past the last, numbered over the model; None: all
    resends: Whole = 0  # times this part was shipped before
    wire: str = RAW  # what its numbers are to travel as; layers that lose too much by it go raw all the same


def last_layer(transfer: KVTransfer) -> float:
    """One past the last layer of a part; infinite for all layers, which only the end of a plan completes."""
    return math.inf if transfer.layers is None else transfer.layers[1]


# Layers of a stage that are alike, period by period: what a device program goes round in place of writing out.
#
# A program whose layers are a loop is compiled as fast as one period of them, whatever the depth. What the loop
# holds is one array for all its turns: every matrix of the period, stacked by turn.

Item = TypeVar("Item")
LONGEST_PERIOD = 8  # layers; the longest that a known family has is six
FEWEST_TURNS = 4  # below it a loop saves nothing worth its stacked arrays


@dataclass(frozen=True, slots=True)
class Repeat:
    """Places `first` to `stop` of a stage are `turns` times the same `period` kinds of layers.

    What is *compact* holds the first period in place of all of them.
    """

    first: int
    period: int
    turns: int

    @property
    def stop(self) -> int:
        return self.first + self.period * self.turns

    def compact(self, layers: Sequence[Item]) -> list[Item]:
        """Those before the loop, one period of it, and those behind it."""
        return [*layers[: self.first + self.period], *layers[self.stop :]]

    def places(self, compact: int) -> range:
        """All places of the stage that a place of the compact one stands for."""
        if compact < self.first:
            return range(compact, compact + 1)
        if compact < self.first + self.period:
            return range(compact, self.stop, self.period)
        place = compact + self.period * (self.turns - 1)
        return range(place, place + 1)


def repeating(kinds: Sequence[Hashable]) -> Repeat | None:
    """The loop that leaves the fewest layers to write out; None where none is worth it. Of two the shorter period."""
    found = [_longest(kinds, period) for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1)]
    best = max(found, key=lambda each: (each.turns - 1) * each.period, default=None)
    return best if best is not None and best.turns >= FEWEST_TURNS else None


def _longest(kinds: Sequence[Hashable], period: int) -> Repeat:
    """The longest run of this period, the first of equals."""
    best, run = Repeat(0, period, 1), 0
    for place in range(period, len(kinds)):
        run = run + 1 if kinds[place] == kinds[place - period] else 0
        turns = run // period + 1
        if turns > best.turns:
            best = Repeat(place + 1 - period * turns, period, turns)
    return best
