"""Which prefill worker and which decode worker take a request: pure functions from snapshots to a choice.

`cache_aware` predicts the cost of each pair: queue + prefill + transfer over the pair's own link + decode, and ten
times what misses the request's objectives. `least_loaded`, `round_robin` and `random` weigh each worker alone. A worker
that failed the request before comes after all others. A colocated worker pairs only with itself; beside pools it is
used if they have no room, and if the router predicts that it is better. A decode worker that holds all but a short end
of the prompt may do both phases, and does if that costs less than the best pair (`cache_aware` only).

Prefill and decode workers are weighed together, because the link between them counts. Both are searched in the order of
their costs over the fastest link, and the search stops where no later worker can be better: no pair costs less than the
one found.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.choice import (
    FAILED,
    PREFERRED,
    SHOWN,
    Candidate,
    Choice,
    CostForecast,
    Pair,
    Parts,
    RoutingRequest,
    WorkerSnapshot,
    at_hand,
    end_of,
    total,
)

CostFunction = Callable[[WorkerSnapshot], Parts]
ROLES = tuple(Role)
FEW = 64  # candidates from which on the best are selected without sorting all
MISS_WEIGHT = 10.0  # cost of a second over the request's objective

# ------------------------------------------------------------------ the baselines: the cost of one worker


def work_cost(snapshot: WorkerSnapshot) -> Parts:
    """Returns the worker's outstanding work."""
    return (("work", snapshot.work),)


def turn_cost(snapshots: Sequence[WorkerSnapshot], number: int) -> CostFunction:
    """Returns a cost function: the number of workers whose turn comes earlier."""
    places = {snapshot.worker: index for index, snapshot in enumerate(snapshots)}
    return lambda snapshot: (("turns until its own", (places[snapshot.worker] - number) % len(places)),)


def random_cost(routed: RoutingRequest) -> CostFunction:
    """Returns a cost function: a hash of seed, request and worker, so that a replay draws the same."""

    def hashed(snapshot: WorkerSnapshot) -> Parts:
        name = f"{routed.seed}/{routed.request_id}/{snapshot.worker}".encode()
        return (("lot", int.from_bytes(blake2b(name, digest_size=6).digest(), "little") / 2.0**48),)

    return hashed


# ------------------------------------------------------------------ cache_aware: the cost of a pair


def until_first(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """Returns the predicted cost until the first token on a prefill worker."""
    forecast = routed.forecast
    queue = forecast.queue(look)
    if look.reach is None and forecast.ttft_s == math.inf:  # the common case
        return (("queue", queue), ("prefill", forecast.prefill(look, end_of(look, routed))))
    parts = at_hand(look, routed)
    if forecast.ttft_s == math.inf:
        return (("queue", queue), *parts)
    return _with_late((("queue", queue), *parts), queue + total(parts) - forecast.ttft_s)


def after_first(look: WorkerSnapshot, routed: RoutingRequest, source: WorkerSnapshot | None) -> Parts:
    """Returns the predicted cost from the first token to the last; over the fastest link if `source` is None."""
    forecast, tokens = routed.forecast, max(0, routed.prompt_tokens - look.cached_tokens)
    if source is None:
        transfer = forecast.least_transfer(look.worker, tokens)
    else:
        transfer = forecast.transfer(source.worker, look.worker, tokens)
    return _later_parts(transfer, forecast.decode(look), forecast.later_s)


def _later_parts(transfer: float, decode: float, later_s: float) -> Parts:
    parts = ("transfer", transfer), ("decode", decode)
    return parts if later_s == math.inf else _with_late(parts, transfer + decode - later_s)


def by_one(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """Returns the predicted cost of both phases on one worker, which computes the uncached end of the prompt."""
    forecast = routed.forecast
    queue, parts, decode = forecast.queue(look), at_hand(look, routed), forecast.decode(look)
    late = max(0.0, queue + total(parts) - forecast.ttft_s) + max(0.0, decode - forecast.later_s)
    return _with_late((("queue", queue), *parts, ("decode", decode)), late)


def _with_late(parts: Parts, late: float) -> Parts:
    return (*parts, ("late", MISS_WEIGHT * late)) if late > 0 else parts


def best_pair(
    firsts: Sequence[Candidate], seconds: Sequence[Candidate], routed: RoutingRequest
) -> tuple[Candidate, Candidate] | None:
    """Returns the cheapest pair of sorted candidates, the first of equal ones; None if a phase has no candidate."""
    if not firsts or not seconds:
        return None
    forecast, least_second = routed.forecast, seconds[0].cost
    if forecast.has_one_speed:
        return firsts[0], seconds[0]
    tokens = [max(0, routed.prompt_tokens - each.look.cached_tokens) for each in seconds]
    best, pair = math.inf, (firsts[0], seconds[0])
    for first in firsts:
        cost = first.cost
        if first.rank > firsts[0].rank or cost + least_second >= best:
            break
        for number, second in enumerate(seconds):
            if second.rank > seconds[0].rank or cost + second.cost >= best:
                break
            linked = cost + _linked_cost(
                second, forecast, forecast.transfer(first.worker, second.worker, tokens[number])
            )
            if linked < best:
                best, pair = linked, (first, second)
    first, second = pair
    return first, _over_link(second, first, routed)


def _linked_cost(second: Candidate, forecast: CostForecast, transfer: float) -> float:
    """Returns the cost of a decode candidate with this transfer in place of the least possible one."""
    later = transfer + second.parts[1][1]
    late = later - forecast.later_s
    return later + MISS_WEIGHT * late if late > 0 else later


def _over_link(second: Candidate, first: Candidate, routed: RoutingRequest) -> Candidate:
    """Returns a decode candidate with its cost over the link from `first`."""
    forecast, tokens = routed.forecast, max(0, routed.prompt_tokens - second.look.cached_tokens)
    transfer = forecast.transfer(first.worker, second.worker, tokens)
    if transfer == second.parts[0][1]:
        return second
    parts = _later_parts(transfer, second.parts[1][1], forecast.later_s)
    return second._replace(cost=total(parts), parts=parts)


# ------------------------------------------------------------------ choices


def by_role(snapshots: Sequence[WorkerSnapshot]) -> tuple[list[WorkerSnapshot], ...]:
    """Returns the snapshots of each role, in the order of `Role`."""
    found = {role: list[WorkerSnapshot]() for role in ROLES}
    for snapshot in snapshots:
        found[snapshot.role].append(snapshot)
    return tuple(found.values())


def choose_pair(
    snapshots: Sequence[WorkerSnapshot], routed: RoutingRequest | None = None, routing: Routing | None = None
) -> Choice:
    """Returns the pair for `routed` by `routing` (default: `least_loaded`)."""
    routed, routing = routed or RoutingRequest(), routing or Routing.LEAST_LOADED
    kinds = prefills, decodes, colocated = by_role(snapshots)
    match routing:
        case Routing.CACHE_AWARE:
            return _cache_aware(prefills, decodes, colocated, routed)
        case Routing.ROUND_ROBIN:
            costs = [turn_cost(kind, routed.number) for kind in kinds]
        case Routing.RANDOM:
            costs = [random_cost(routed)] * 3
        case Routing.LEAST_LOADED:
            costs = [work_cost] * 3
    return _joined(routing, *[_best(kind, cost) for kind, cost in zip(kinds, costs, strict=True)])


def _cache_aware(
    prefills: Sequence[WorkerSnapshot],
    decodes: Sequence[WorkerSnapshot],
    colocated: Sequence[WorkerSnapshot],
    routed: RoutingRequest,
) -> Choice:
    """Returns the cheapest pair; a colocated worker if there is no pair; a decode worker alone if that is cheaper."""
    firsts = sorted([_candidate(look, until_first(look, routed)) for look in prefills if look.has_room])
    seconds = sorted([_candidate(look, after_first(look, routed, None)) for look in decodes if look.has_room])
    both = _best(colocated, lambda look: by_one(look, routed)) if colocated else ()
    found = best_pair(firsts, seconds, routed)
    if found is None:
        choice = _joined(Routing.CACHE_AWARE, tuple(firsts[:SHOWN]), tuple(seconds[:SHOWN]), both)
        return _with_alone(choice, decodes, routed)
    first, second = found
    if not routed.forecast.has_one_speed:
        firsts = [first, *[each for each in firsts[:SHOWN] if each.worker != first.worker]]
        rest = [_over_link(each, first, routed) for each in seconds[:SHOWN] if each.worker != second.worker]
        seconds = [second, *sorted(rest)]
    pair = Pair(first.worker, second.worker)
    choice = Choice(Routing.CACHE_AWARE, pair, tuple(firsts[:SHOWN]), tuple(seconds[:SHOWN]), both)
    return _with_alone(choice, decodes, routed)


def _candidate(look: WorkerSnapshot, parts: Parts) -> Candidate:
    rank = FAILED if look.avoided else PREFERRED
    return Candidate(rank, total(parts), look.served, look.worker, parts, look)


def _best(snapshots: Sequence[WorkerSnapshot], cost: CostFunction) -> tuple[Candidate, ...]:
    """Returns the best candidates with room, best first, as many as a choice lists."""
    able = [_candidate(look, cost(look)) for look in snapshots if look.has_room]
    # No two workers have the same name, so the comparison never reaches `parts`.
    return tuple(heapq.nsmallest(SHOWN, able) if len(able) > FEW else sorted(able)[:SHOWN])


def _joined(
    routing: Routing,
    prefills: tuple[Candidate, ...],
    decodes: tuple[Candidate, ...],
    colocated: tuple[Candidate, ...],
) -> Choice:
    """Returns the best of both phases, or the best colocated worker if the pools have no pair."""
    pair = Pair(prefills[0].worker, decodes[0].worker) if prefills and decodes else None
    if pair is None and colocated:
        pair = Pair(colocated[0].worker, colocated[0].worker)
    return Choice(routing, pair, prefills, decodes, colocated)


def _with_alone(choice: Choice, decodes: Sequence[WorkerSnapshot], routed: RoutingRequest) -> Choice:
    """Returns the choice with the best decode worker for both phases if it is cheaper; says why in either case."""
    able = [each for each in decodes if each.cached_tokens and each.has_room and each.room_now]
    able = [each for each in able if end_of(each, routed) <= each.short_prompt_tokens]
    if not able:
        return choice
    alone = _best(able, lambda look: by_one(look, routed))
    paired = choice.prefills and choice.decodes
    rivals = (choice.prefills[0], choice.decodes[0]) if paired else choice.colocated[:1]
    rank, cost = max((each.rank for each in rivals), default=FAILED), sum(each.cost for each in rivals)
    best, other = (
        alone[0],
        f"{' and '.join(each.worker for each in rivals)} {cost:.4g}" if rivals else "no other worker",
    )
    takes_it = not rivals or (best.rank, best.cost) < (rank, cost)
    taken = Pair(best.worker, best.worker) if takes_it else choice.taken
    return replace(choice, taken=taken, alone=alone, why=f"by itself {best.worker} costs {best.cost:.4g}, {other}")
