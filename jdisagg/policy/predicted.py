"""The pair with the fewest predicted seconds: queue + prefill + transfer over its own link + decode + what is late.

Prefill and decode workers are weighed together, for the link between them counts. Both are gone through in the order of
what they cost without it; a worker is passed over with all behind it where even the fastest link could not make it
better. No pair costs less than the one that is found.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from jdisagg.core.router_config import Routing
from jdisagg.policy.choice import (
    FAILED,
    FREELY,
    SHOWN,
    Candidate,
    Choice,
    Pair,
    Parts,
    RoutingRequest,
    WorkerSnapshot,
    at_hand,
    end_of,
    total,
)

LATE = 10.0  # a second over what the request asked for weighs so much


class Half(NamedTuple):
    """One worker for its phase; of a decode worker with the fastest link that there is."""

    rank: int
    cost: float
    served: int
    look: WorkerSnapshot
    parts: Parts

    def candidate(self) -> Candidate:
        return Candidate(self.look.worker, self.rank, self.parts, self.served)


def choose_predicted(
    prefills: Sequence[WorkerSnapshot],
    decodes: Sequence[WorkerSnapshot],
    colocated: Sequence[WorkerSnapshot],
    routed: RoutingRequest,
) -> Choice:
    """Of the pools; one worker of both roles where they have no pair, a decode worker alone where that is less."""
    firsts = sorted(_half(look, until_first(look, routed)) for look in prefills if look.has_room)
    seconds = sorted(_half(look, after_first(look, routed, None)) for look in decodes if look.has_room)
    whole = sorted(_half(look, by_one(look, routed)) for look in colocated if look.has_room)
    both = tuple(half.candidate() for half in heapq.nsmallest(SHOWN, whole))
    found = best_pair(firsts, seconds, routed)
    if found is None:
        alone = Pair(both[0].worker, both[0].worker) if both else None
        return Choice(Routing.PREDICTED, alone, _shown(firsts), _shown(seconds), both)
    first, second = found
    rest = [_over_its_link(each, first, routed) for each in seconds[: SHOWN + 1] if each.look is not second.look]
    choice = Choice(
        Routing.PREDICTED,
        Pair(first.look.worker, second.look.worker),
        _shown([first, *[each for each in firsts[: SHOWN + 1] if each is not first]]),
        _shown([second, *sorted(rest)]),
        both,
    )
    return _or_alone(choice, first.cost + second.cost, decodes, routed)


def best_pair(firsts: Sequence[Half], seconds: Sequence[Half], routed: RoutingRequest) -> tuple[Half, Half] | None:
    """Both sorted. Of equal pairs the first in that order; None where one phase has nobody."""
    best, pair = math.inf, None
    for first in firsts if seconds else ():
        if first.rank > firsts[0].rank or (pair is not None and first.cost + seconds[0].cost >= best):
            break
        for second in seconds:
            if second.rank > seconds[0].rank or (pair is not None and first.cost + second.cost >= best):
                break
            linked = _over_its_link(second, first, routed)
            if pair is None or first.cost + linked.cost < best:
                best, pair = first.cost + linked.cost, (first, linked)
    return pair


def of_prompt(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """What it lacks, computed or fetched."""
    return at_hand(look, lambda held: routed.forecast.prefill(look, max(1, routed.prompt_tokens - held)))


def until_first(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """What stands before the first token, there."""
    forecast = routed.forecast
    queue_s = forecast.queue(look)
    parts = of_prompt(look, routed)
    return _with_late((("queue", queue_s), *parts), queue_s + total(parts) - forecast.ttft_s)


def after_first(look: WorkerSnapshot, routed: RoutingRequest, source: WorkerSnapshot | None) -> Parts:
    """From the first token to the last, from this source; from nobody: over the fastest of links."""
    forecast, tokens = routed.forecast, max(0, routed.prompt_tokens - look.cached_tokens)
    if source is None:
        transfer_s = forecast.least_transfer(look.worker, tokens)
    else:
        transfer_s = forecast.transfer(source.worker, look.worker, tokens)
    decode_s = forecast.decode(look)
    return _with_late((("transfer", transfer_s), ("decode", decode_s)), transfer_s + decode_s - forecast.later_s)


def by_one(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """Both phases on one worker, which computes what it lacks of the prompt."""
    forecast = routed.forecast
    queue_s, parts, decode_s = forecast.queue(look), of_prompt(look, routed), forecast.decode(look)
    late_s = max(0.0, queue_s + total(parts) - forecast.ttft_s) + max(0.0, decode_s - forecast.later_s)
    return _with_late((("queue", queue_s), *parts, ("decode", decode_s)), late_s)


def _with_late(parts: Parts, late_s: float) -> Parts:
    return (*parts, ("late", LATE * late_s)) if late_s > 0 else parts


def _half(look: WorkerSnapshot, parts: Parts) -> Half:
    return Half(FAILED if look.avoided else FREELY, total(parts), look.served, look, parts)


def _over_its_link(second: Half, first: Half, routed: RoutingRequest) -> Half:
    parts = after_first(second.look, routed, first.look)
    return second._replace(cost=total(parts), parts=parts)


def _shown(halves: Sequence[Half]) -> tuple[Candidate, ...]:
    return tuple(half.candidate() for half in halves[:SHOWN])


def _or_alone(choice: Choice, cost: float, decodes: Sequence[WorkerSnapshot], routed: RoutingRequest) -> Choice:
    """The best decode worker that holds all but a short end of the prompt, where it costs less; in both cases why."""
    able = [each for each in decodes if each.has_room and each.room_now and each.cached_tokens]
    able = [each for each in able if not each.avoided and end_of(each, routed) <= each.short_prompt_tokens]
    halves = sorted(_half(each, by_one(each, routed)) for each in able)
    if not halves:
        return choice
    best, rivals = halves[0], f"{choice.prefills[0].worker} and {choice.decodes[0].worker}"
    why = f"by itself {best.look.worker} costs {best.cost:.4g}, {rivals} {cost:.4g}"
    taken = Pair(best.look.worker, best.look.worker) if best.cost < cost else choice.taken
    return Choice(choice.routing, taken, choice.prefills, choice.decodes, choice.colocated, _shown(halves), why)
