"""Decode steps that only repeat: how many are certain to, and what so many of their ends make of the decode side, at
once.

A step's end is quiet where it gives each of its sequences a token and the same step follows it: nobody comes, goes,
ends, grows a page or may draw a stop token. What `repeat` leaves behind is what as many `StepDone`s would, one by
one, and so is what it says, but in one word. A driver that knows when steps end may ask for it; no other ever does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from jdisagg.core.events import RunStep
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.core.worker_config import bucket
from jdisagg.policy.decode_sequence import DecodeSequence, Step, admitted
from jdisagg.policy.decode_side import DecodeSide


def repeatable_steps(decode_side: DecodeSide) -> int:
    """Steps that end quietly from now on, whatever their tokens, for as long as nothing else happens to the worker.

    0 unless the steps in flight are what they will go on to be: as many of each busy microbatch as may be, in strict
    rounds, of all its sequences.
    """
    slots, flight = decode_side.slots, tuple(decode_side.steps.values())
    busy = slots.busy_microbatches
    full = len(flight) == busy * slots.steps_in_flight
    config = decode_side.config
    if not busy or not full or config.draft_tokens or config.decode.steps_per_dispatch > 1 or _seats_next(decode_side):
        return 0
    cycle = flight[:busy]
    if len({step.microbatch for step in cycle}) < busy or not all(_goes_on(decode_side, step) for step in cycle):
        return 0
    if not all(_same(step, cycle[place % busy]) for place, step in enumerate(flight)):
        return 0
    return min(place + busy * _alike(decode_side, step) for place, step in enumerate(cycle))


def _seats_next(decode_side: DecodeSide) -> bool:
    """Whether somebody may be seated whatever comes next: a slot came free when nobody was looking for one."""
    ahead = decode_side.ahead.used and decode_side.slots.busy_microbatches < decode_side.config.num_microbatches
    return ahead or (decode_side.num_ready > 0 and decode_side.slots.num_taken < decode_side.config.num_slots)


def _goes_on(decode_side: DecodeSide, step: Step) -> bool:
    """Whether the microbatch's next step has the sequences of this one, and nothing to tell the device."""
    return step.sequences == dict(decode_side.slots.seated(step.microbatch)) and not decode_side.slots.retires(
        step.microbatch
    )


def _same(step: Step, other: Step) -> bool:
    return step.microbatch == other.microbatch and step.sequences == other.sequences


def _alike(decode_side: DecodeSide, step: Step) -> int:
    """Further steps of these sequences that need no page, are nobody's last and have the same size on the device."""
    config, longest = decode_side.config, _longest(step)
    table_tokens = bucket(config.pages_for(longest), config.table_buckets) * config.page_size
    steps = table_tokens - longest + 1
    for sequence in step.sequences.values():
        sampling = sequence.sampling
        if not sequence.stepped or not admitted(sequence) or sampling.stop_token_ids or sampling.synchronous:
            return 0
        room = len(sequence.pages) * config.page_size - sequence.num_tokens - sequence.dispatched + 1
        steps = min(steps, room, sampling.max_tokens - sequence.dispatched - 1)
    return max(0, steps)


def _longest(step: Step) -> int:
    return max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())


def next_rows(decode_side: DecodeSide) -> tuple[DecodeRows, ...]:
    """The next round of quiet steps, in their order: so that they can be priced."""
    return tuple(
        _rows(decode_side, step) for step in islice(decode_side.steps.values(), decode_side.slots.busy_microbatches)
    )


def _rows(decode_side: DecodeSide, step: Step) -> DecodeRows:
    table_pages = bucket(decode_side.config.pages_for(_longest(step)), decode_side.config.table_buckets)
    return DecodeRows(step.microbatch, tuple(step.sequences), table_pages)


def repeat(decode_side: DecodeSide, steps: int, sampled: Sampled, new_step_id: Callable[[], int]) -> None:
    """Ends `steps` quiet steps in which everybody drew `sampled`; puts one `Drawn`, and the steps dispatched last."""
    flight, busy = list(decode_side.steps.items()), decode_side.slots.busy_microbatches
    rows = [_rows(decode_side, step) for _, step in flight[:busy]]
    draws: list[TokenDelta] = []
    for place, (_, step) in enumerate(flight[:busy]):
        count = len(range(place, steps, busy))
        draws += [_take(sequence, count, sampled) for sequence in step.sequences.values() if count]
    decode_side.out.draw(draws)
    decode_side.slots.go_round([each.microbatch for each in rows], steps)
    for step_id, _ in flight[:steps]:
        del decode_side.steps[step_id]
    for index in range(max(0, steps - len(flight)), steps):
        _, step = flight[index % busy]
        step_id = new_step_id()
        decode_side.steps[step_id] = Step(step.microbatch, dict(step.sequences), (), step.widths)
        decode_side.out.put(RunStep(StepPlan(step_id, rows[index % busy])))


def _take(sequence: DecodeSequence, count: int, sampled: Sampled) -> TokenDelta:
    index = sequence.num_output + len(sequence.output)
    sequence.output.extend([sampled.token] * count)
    sequence.dispatched += count
    return TokenDelta(sequence.owner, index, (sampled,) * count)
