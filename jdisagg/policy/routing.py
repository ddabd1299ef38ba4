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
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role

SHOWN = 8  # candidates of a phase that a choice shows
FREELY, APART, FAILED = 0, 1, 2
RANKS = ("", "another's partner", "failed this request before")


class WorkerSnapshot(NamedTuple):
    """One live worker as the router sees it for one request. There are many: a tuple is made in a third of the time."""

    worker: WorkerId
    role: Role
    work: float  # outstanding: what was sent there and has not ended
    served: int  # requests sent there so far, to share the idle hours
    has_room: bool  # as far as is known: for a reservation (decode), or for its prompt at all (prefill)
    avoided: bool = False  # it failed this request before
    cached_tokens: int = 0  # leading prompt tokens whose KV it is thought to hold
    short_prompt_tokens: int = 0  # of a decode worker: the end of a prompt that it computes itself, at most


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What is to be routed, and how dear its prompt is: by default in prompt tokens, and no KV fetched."""

    request_id: str = ""
    prompt_tokens: int = 0
    number: int = 0  # of pairs taken before it: whose turn it is
    seed: int = 0  # of lots
    prefill: Callable[[int, int], float] = lambda tokens, cached: float(tokens - cached)
    fetch: Callable[[int], float] = lambda tokens: math.inf  # the KV of so many tokens, from another prefill worker
    ship: Callable[[int], float] = lambda tokens: 0.0  # the KV of so many tokens, to a decode worker
    among_rows: Callable[[int], float] = lambda tokens: math.inf  # so many prompt tokens, computed by a decode worker


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker for one phase. Rank first, then cost, then requests served."""

    worker: WorkerId
    rank: int  # a place in RANKS
    parts: tuple[tuple[str, float], ...]  # what the cost is made of
    served: int

    @property
    def rank_name(self) -> str:
        """Why it comes after others whatever it costs; empty where it does not."""
        return RANKS[self.rank]

    @property
    def cost(self) -> float:
        return _total(self.parts)

    @property
    def score(self) -> tuple[int, float, int, str]:
        return (self.rank, self.cost, self.served, self.worker)


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: WorkerId
    decode: WorkerId


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair taken, None where no pair has room, and the best candidates of each kind, best first."""

    routing: Routing
    taken: Pair | None
    prefills: tuple[Candidate, ...] = ()
    decodes: tuple[Candidate, ...] = ()
    colocated: tuple[Candidate, ...] = ()
    alone: tuple[Candidate, ...] = ()  # decode workers that could compute what they lack of the prompt themselves
    why: str = ""  # the pair, or one worker for both phases, where there was the choice

    @property
    def reason(self) -> str:
        """In words."""
        if self.taken is None:
            return f"{self.routing}: no worker has room for its {self._missing()}"
        if self.taken.prefill == self.taken.decode:
            able = self.alone if self.by_itself else self.colocated
            return "; ".join([f"{self.routing}: {_words(able)}", *self._why()])
        return "; ".join([f"{self.routing}: {_words(self.prefills)}", _words(self.decodes), *self._why()])

    @property
    def by_itself(self) -> bool:
        """Whether a decode worker computes the end of the prompt."""
        return bool(self.alone) and self.taken == Pair(self.alone[0].worker, self.alone[0].worker)

    def _why(self) -> list[str]:
        return [self.why] if self.why else []

    def _missing(self) -> str:
        phases = (("prompt", self.prefills), ("output", self.decodes))
        return " and its ".join(name for name, able in phases if not able)


def _words(candidates: Sequence[Candidate]) -> str:
    first, *others = candidates
    text = f"{first.worker} costs {_sum(first)}"
    if first.rank:
        text += f" ({first.rank_name}, and there is no other)"
    return text + (f", next {others[0].worker} {_sum(others[0])}" if others else "")


def _sum(candidate: Candidate) -> str:
    parts = " + ".join(f"{name} {part:.4g}" for name, part in candidate.parts)
    return parts if len(candidate.parts) == 1 else f"{candidate.cost:.4g} ({parts})"


# ------------------------------------------------------------------ what a worker costs

Parts = tuple[tuple[str, float], ...]
Cost = Callable[[WorkerSnapshot], Parts]


def _total(parts: Parts) -> float:
    return parts[0][1] if len(parts) == 1 else sum([part for _, part in parts])


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
        here = (("work", snapshot.work), ("prefill", routed.prefill(routed.prompt_tokens, snapshot.cached_tokens)))
        missing = most - snapshot.cached_tokens
        if missing <= 0:
            return here
        fetched = (("prefill", routed.prefill(routed.prompt_tokens, most)), ("fetch", routed.fetch(missing)))
        return min(here, (here[0], *fetched), key=lambda parts: sum(part for _, part in parts))

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
        return (("work", snapshot.work), ("prefill", routed.among_rows(_end_of(snapshot, routed))))

    return cost


def _end_of(snapshot: WorkerSnapshot, routed: RoutingRequest) -> int:
    """Prompt tokens to be computed there: the last one always is, for what is drawn after it."""
    return max(1, routed.prompt_tokens - snapshot.cached_tokens)


# ------------------------------------------------------------------ pairs


def choose_pair(
    snapshots: Sequence[WorkerSnapshot], routed: RoutingRequest | None = None, routing: Routing | None = None
) -> Choice:
    """The pair for `routed` by `routing`; the least loaded where none is named."""
    routed, routing = routed or RoutingRequest(), routing or Routing.LEAST_LOADED
    prefills, decodes, colocated = ([snapshot for snapshot in snapshots if snapshot.role is role] for role in Role)
    match routing:
        case Routing.PAIR_AFFINITY:
            return _partners(prefills, decodes, colocated)
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
    able = list[tuple[int, float, int, WorkerId, Parts]]()
    for snapshot in snapshots:
        if snapshot.has_room:
            rank = FAILED if snapshot.avoided else APART if apart is not None and apart(snapshot) else FREELY
            parts = cost(snapshot)
            able.append((rank, _total(parts), snapshot.served, snapshot.worker, parts))
    best = heapq.nsmallest(SHOWN, able)  # no two have the same name: parts are never compared
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
    able = [each for each in decodes if each.cached_tokens and _end_of(each, routed) <= each.short_prompt_tokens]
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
