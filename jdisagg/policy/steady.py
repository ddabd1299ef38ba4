"""Decode turns that only repeat: how many are certain to, and what so many of their ends make of the beds, at once.

A turn's end is quiet where it gives each of its sequences a token and the same turn follows it: nobody comes, goes,
ends, grows a page or may draw a stop token. What `repeat` leaves behind is what as many `DecodeDone`s would, one by
one, and so is what it says, but in one word. A driver that knows when turns end may ask for it; no other ever does.
"""

from __future__ import annotations

from itertools import islice

from jdisagg.core.events import RunDecode
from jdisagg.core.messages import Draw
from jdisagg.core.plans import DecodePlan
from jdisagg.core.request import Sampled
from jdisagg.core.worker_config import bucket
from jdisagg.policy.bed import Bed, Turn, admitted
from jdisagg.policy.beds import Beds


def quiet_turns(beds: Beds) -> int:
    """Turns that end quietly from now on, whatever their tokens, for as long as nothing else happens to the worker.

    0 unless the turns in flight are what they will go on to be: as many of each busy microbatch as may be, in strict
    rounds, of all its sequences.
    """
    slots, flight = beds.slots, tuple(beds.turns.values())
    busy = slots.busy_microbatches
    if not busy or len(flight) != busy * slots.turns_ahead or _seats_next(beds):
        return 0
    cycle = flight[:busy]
    if len({turn.microbatch for turn in cycle}) < busy or not all(_goes_on(beds, turn) for turn in cycle):
        return 0
    if not all(_same(turn, cycle[place % busy]) for place, turn in enumerate(flight)):
        return 0
    return min(place + busy * _alike(beds, turn) for place, turn in enumerate(cycle))


def _seats_next(beds: Beds) -> bool:
    """Whether somebody may be seated whatever comes next: a slot came free when nobody was looking for one."""
    ahead = beds.ahead.used and beds.slots.busy_microbatches < beds.config.num_microbatches
    return ahead or (beds.num_ready > 0 and beds.slots.num_taken < beds.config.num_slots)


def _goes_on(beds: Beds, turn: Turn) -> bool:
    """Whether the microbatch's next turn has the sequences of this one, and nothing to tell the device."""
    return turn.beds == dict(beds.slots.seated(turn.microbatch)) and not beds.slots.retires(turn.microbatch)


def _same(turn: Turn, other: Turn) -> bool:
    return turn.microbatch == other.microbatch and turn.beds == other.beds


def _alike(beds: Beds, turn: Turn) -> int:
    """Further turns of these sequences that need no page, are nobody's last and have the same size on the device."""
    config, longest = beds.config, _longest(turn)
    table_tokens = bucket(config.pages_for(longest), config.table_buckets) * config.page_size
    turns = table_tokens - longest + 1
    for bed in turn.beds.values():
        if not bed.stepped or not admitted(bed) or bed.request.sampling.stop_token_ids:
            return 0
        room = len(bed.pages) * config.page_size - bed.num_tokens - bed.dispatched + 1
        turns = min(turns, room, bed.request.sampling.max_tokens - bed.dispatched - 1)
    return max(0, turns)


def _longest(turn: Turn) -> int:
    return max(bed.num_tokens + bed.dispatched for bed in turn.beds.values())


def next_plans(beds: Beds) -> tuple[DecodePlan, ...]:
    """The next round of quiet turns, in their order, without plan ids: so that they can be priced."""
    return tuple(_plan(beds, turn, 0) for turn in islice(beds.turns.values(), beds.slots.busy_microbatches))


def _plan(beds: Beds, turn: Turn, plan_id: int) -> DecodePlan:
    table_pages = bucket(beds.config.pages_for(_longest(turn)), beds.config.table_buckets)
    return DecodePlan(plan_id, turn.microbatch, tuple(turn.beds), table_pages)


def repeat(beds: Beds, turns: int, sampled: Sampled) -> None:
    """Ends `turns` quiet turns in which everybody drew `sampled`; puts one `Drawn`, and the turns dispatched last."""
    flight, busy = list(beds.turns.items()), beds.slots.busy_microbatches
    plans = [_plan(beds, turn, 0) for _, turn in flight[:busy]]
    draws: list[Draw] = []
    for place, (_, turn) in enumerate(flight[:busy]):
        count = len(range(place, turns, busy))
        draws += [_take(bed, count, sampled) for bed in turn.beds.values() if count]
    beds.out.draw(draws)
    beds.slots.go_round([plan.microbatch for plan in plans], turns)
    for plan_id, _ in flight[:turns]:
        del beds.turns[plan_id]
    for index in range(max(0, turns - len(flight)), turns):
        _, turn = flight[index % busy]
        plan_id, like = beds.new_plan_id(), plans[index % busy]
        beds.turns[plan_id] = Turn(turn.microbatch, dict(turn.beds), ())
        beds.out.put(RunDecode(DecodePlan(plan_id, like.microbatch, like.active, like.table_pages)))


def _take(bed: Bed, count: int, sampled: Sampled) -> Draw:
    index = bed.num_output + len(bed.output)
    bed.output.extend([sampled.token] * count)
    bed.dispatched += count
    return Draw(bed.request.request_id, bed.owner.epoch, index, (sampled,) * count)
