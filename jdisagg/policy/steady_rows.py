"""Rows that repeat: steps of one microbatch that hold the same sequences and tell the device nothing new.

What such a step holds was found when the first of them was formed, and for how many it stays so: until somebody needs
a page, a wider table or has its last token to draw. What may change besides is asked at each step. A step that repeats
is formed without a look at its sequences, which at hundreds of slots is most of what a host does between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence, Step, admitted
from jdisagg.policy.decode_side import DecodeSide


class Moment(NamedTuple):
    """What rows depend on besides their sequences: the same follow only where it is the same."""

    seatings: int
    retires: bool
    turns: int = 1  # that end within the gap
    ready: int = 0
    expects: bool = False
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """Of one microbatch."""

    rows: DecodeRows
    step: Step
    moment: Moment
    tokens: int  # of each row
    until: int  # tokens of the first sequence that may be dispatched by them

    def goes_on(self, moment: Moment) -> bool:
        """Whether the next step may be another of them."""
        first = next(iter(self.step.sequences.values()))
        return moment == self.moment and first.dispatched + self.tokens <= self.until

    def book(self) -> None:
        """Another is dispatched, in which every row draws its tokens unless one of them is its last."""
        for sequence in self.step.sequences.values():
            sequence.in_flight += self.tokens
            sequence.dispatched += self.tokens


def steady_rows(rows: DecodeRows, step: Step, moment: Moment, config: WorkerConfig) -> SteadyRows | None:
    """What may follow these rows, which are booked; None where the next ones have to be looked at."""
    tokens = max(step.widths.values())
    held_to_one = tokens == 1 < moment.turns  # by somebody's next token, or for want of pages
    drafts = tokens > 1 and not rows.turns
    if rows.gates or drafts or held_to_one:
        return None
    left = min(_left(sequence, config) for sequence in step.sequences.values())
    longest = max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())
    left = min(left, rows.table_pages * config.page_size - longest + 1) // tokens
    if left <= 0:
        return None
    widths = (tokens,) * len(rows.widths)
    again = DecodeRows(rows.microbatch, rows.active, rows.table_pages, widths=widths, turns=rows.turns)
    first = next(iter(step.sequences.values()))
    bare = Step(step.microbatch, step.sequences, (), dict.fromkeys(step.sequences, tokens), rows.turns)
    return SteadyRows(again, bare, moment, tokens, first.dispatched + left * tokens)


def _left(sequence: DecodeSequence, config: WorkerConfig) -> int:
    """Tokens that it may draw in its own pages, the last one not among them; none while drafts are in flight, which
    may come to less than was booked for them."""
    certain = sequence.dispatched == len(sequence.output) + sequence.in_flight
    if sequence.sampling.synchronous or not (certain and sequence.on_device and admitted(sequence)):
        return 0
    room = len(sequence.pages) * config.page_size - sequence.num_tokens - sequence.dispatched + 1
    return min(room, sequence.sampling.max_tokens - sequence.dispatched - 1)


def moment_of(decode_side: DecodeSide, microbatch: int, *, prompts: bool) -> Moment:
    """prompts: whether any wait to be computed between its steps."""
    slots, config = decode_side.slots, decode_side.config
    seats = slots.seatings, slots.retires(microbatch)
    if config.decode.steps_per_dispatch == 1:
        return Moment(*seats)
    turns = max(1, int(min(config.decode.steps_per_dispatch, decode_side.turn_times.within_gap)))
    return Moment(*seats, turns, decode_side.num_ready, decode_side.expects, prompts)
