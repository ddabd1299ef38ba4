"""Which prefill worker and which decode worker take a request: pure functions over snapshots, which show their reasons.

Every routing says what each worker would cost; the cheapest of each phase make the pair. A worker that failed the
request before comes after all others. A colocated worker pairs only with itself; beside pools it comes in where they
have no room, and where `fallback.py` predicts that it is better. By `cache_aware`, a decode worker that holds all but a
short end of the prompt may pair with itself too, and does where that costs less than the best pair. Cost is work in any
one unit: prompt tokens where the router asks, seconds in a replay that knows them. The effort grows with the number of
workers, not of pairs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.choice import (
    APART,
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
from jdisagg.policy.predicted import choose_predicted

# ------------------------------------------------------------------ what a worker costs

Cost = Callable[[WorkerSnapshot], Parts]
ROLES = tuple(Role)
FEW = 64  # that are sorted sooner than the best of them are picked


def work(snapshot: WorkerSnapshot) -> Parts:
    """What waits there already."""
    return (("work", snapshot.work),)


def place_in_turn(snapshots: Sequence[WorkerSnapshot], number: int) -> Cost:
    """How many have their turn before it."""
    places = {snapshot.worker: index for index, snapshot in enumerate(snapshots)}
    return lambda snapshot: (("turns until its own", (places[snapshot.worker] - number) % len(places)),)


def lot(routed: RoutingRequest) -> Cost:
    """Drawn by seed, request and worker: the same ones draw the same lot."""

    def drawn(snapshot: WorkerSnapshot) -> Parts:
        name = f"{routed.seed}/{routed.request_id}/{snapshot.worker}".encode()
        return (("lot", int.from_bytes(blake2b(name, digest_size=6).digest(), "little") / 2.0**48),)

    return drawn


def prompt_there(snapshots: Sequence[WorkerSnapshot], routed: RoutingRequest) -> Cost:
    """Until its first token: the queue, the tokens to compute, and KV fetched from who holds most, where that is less.

    Mooncake (Qin et al., FAST 2025), algorithm 1, without its threshold: both ways are priced and the lesser counts.
    """
    most = max((snapshot.cached_tokens for snapshot in snapshots), default=0)

    def cost(snapshot: WorkerSnapshot) -> Parts:
        here = (("work", snapshot.work), *at_hand(snapshot, lambda held: routed.prefill(routed.prompt_tokens, held)))
        missing = most - snapshot.cached_tokens
        if missing <= 0:
            return here
        fetch = routed.fetch(missing)
        if fetch == math.inf:
            return here
        fetched = (here[0], ("prefill", routed.prefill(routed.prompt_tokens, most)), ("fetch", fetch))
        return fetched if total(fetched) < total(here) else here

    return cost


def kv_there(routed: RoutingRequest) -> Cost:
    """Until it decodes: the work there, and the KV that must be shipped to it."""

    def cost(snapshot: WorkerSnapshot) -> Parts:
        ship = routed.ship(routed.prompt_tokens - snapshot.cached_tokens)
        return (("work", snapshot.work), ("ship", ship)) if ship else work(snapshot)

    return cost


def end_there(routed: RoutingRequest) -> Cost:
    """The work there, and the end of the prompt, computed beside the rows that decode: nothing is shipped."""

    def cost(snapshot: WorkerSnapshot) -> Parts:
        return (("work", snapshot.work), ("prefill", routed.among_rows(end_of(snapshot, routed))))

    return cost


# ------------------------------------------------------------------ pairs


def by_role(snapshots: Sequence[WorkerSnapshot]) -> tuple[list[WorkerSnapshot], ...]:
    """In the order of `Role`."""
    found = tuple(list[WorkerSnapshot]() for _ in ROLES)
    for snapshot in snapshots:
        found[ROLES.index(snapshot.role)].append(snapshot)
    return found


def choose_pair(
    snapshots: Sequence[WorkerSnapshot], routed: RoutingRequest | None = None, routing: Routing | None = None
) -> Choice:
    """The pair for `routed` by `routing`; the least loaded where none is named."""
    routed, routing = routed or RoutingRequest(), routing or Routing.LEAST_LOADED
    prefills, decodes, colocated = by_role(snapshots)
    match routing:
        case Routing.PAIR_AFFINITY:
            return _partners(prefills, decodes, colocated)
        case Routing.PREDICTED:
            return choose_predicted(prefills, decodes, colocated, routed)
        case Routing.ROUND_ROBIN:
            costs = (place_in_turn(kind, routed.number) for kind in (prefills, decodes, colocated))
        case Routing.RANDOM:
            costs = (lot(routed),) * 3
        case Routing.CACHE_AWARE:
            costs = (prompt_there(prefills, routed), kv_there(routed), prompt_there(colocated, routed))
        case Routing.LEAST_LOADED:
            costs = (work,) * 3
    kinds = zip((prefills, decodes, colocated), costs, strict=True)
    choice = _joined(routing, *(_ranked(kind, cost) for kind, cost in kinds))
    return _with_alone(choice, decodes, routed) if routing is Routing.CACHE_AWARE else choice


def _ranked(
    snapshots: Sequence[WorkerSnapshot], cost: Cost, apart: Callable[[WorkerSnapshot], bool] | None = None
) -> tuple[Candidate, ...]:
    """Those with room that are to be shown, by `Candidate.score`; only they are made candidates."""
    if not snapshots:
        return ()
    able = list[tuple[int, float, int, WorkerId, Parts]]()
    for snapshot in snapshots:
        if snapshot.has_room:
            rank = FAILED if snapshot.avoided else APART if apart is not None and apart(snapshot) else FREELY
            parts = cost(snapshot)
            able.append((rank, total(parts), snapshot.served, snapshot.worker, parts))
    # No two have the same name: parts are never compared.
    best = heapq.nsmallest(SHOWN, able) if len(able) > FEW else sorted(able)[:SHOWN]
    return tuple(Candidate(worker, rank, parts, served) for rank, _, served, worker, parts in best)


def _joined(
    routing: Routing,
    prefills: tuple[Candidate, ...],
    decodes: tuple[Candidate, ...],
    colocated: tuple[Candidate, ...],
) -> Choice:
    """The best of both phases; the best colocated worker where the pools have no pair."""
    pair = Pair(prefills[0].worker, decodes[0].worker) if prefills and decodes else None
    if pair is None and colocated:
        pair = Pair(colocated[0].worker, colocated[0].worker)
    return Choice(routing, pair, prefills, decodes, colocated)


def _with_alone(choice: Choice, decodes: Sequence[WorkerSnapshot], routed: RoutingRequest) -> Choice:
    """The best decode worker that could do it all, where it costs less than what is taken so far; in both cases why."""
    able = [each for each in decodes if each.room_now and each.cached_tokens]
    able = [each for each in able if end_of(each, routed) <= each.short_prompt_tokens]
    alone = _ranked(able, end_there(routed)) if able else ()
    if not alone or math.isinf(alone[0].cost):
        return choice
    rivals = (choice.prefills[0], choice.decodes[0]) if choice.prefills else choice.colocated[:1]
    rank, cost = max((each.rank for each in rivals), default=FAILED), sum(each.cost for each in rivals)
    best, other = alone[0], f"{' and '.join(each.worker for each in rivals)} {cost:.4g}" if rivals else "nobody else"
    takes_it = not rivals or (best.rank, best.cost) < (rank, cost)
    taken = Pair(best.worker, best.worker) if takes_it else choice.taken
    return replace(choice, taken=taken, alone=alone, why=f"by itself {best.worker} costs {best.cost:.4g}, {other}")


def _partners(
    prefills: Sequence[WorkerSnapshot], decodes: Sequence[WorkerSnapshot], colocated: Sequence[WorkerSnapshot]
) -> Choice:
    """Workers of equal place, modulo the smaller pool's size, are partners for good: KV keeps to few links.

    The pair of partners with the least work together; where nobody's partner has room, the least loaded of all.
    """
    groups = max(1, min(len(prefills), len(decodes)))
    group_of = {
        snapshot.worker: index % groups for snapshots in (prefills, decodes) for index, snapshot in enumerate(snapshots)
    }
    least: dict[int, float] = {}
    for snapshot in decodes:
        if snapshot.has_room and not snapshot.avoided:
            group = group_of[snapshot.worker]
            least[group] = min(snapshot.work, least.get(group, math.inf))

    def together(snapshot: WorkerSnapshot) -> Parts:
        return (*work(snapshot), ("partner's", least.get(group_of[snapshot.worker], 0.0)))

    first = _ranked(prefills, together, apart=lambda snapshot: group_of[snapshot.worker] not in least)
    taken = group_of[first[0].worker] if first else -1
    second = _ranked(decodes, work, apart=lambda snapshot: group_of[snapshot.worker] != taken)
    return _joined(Routing.PAIR_AFFINITY, first, second, _ranked(colocated, work))
