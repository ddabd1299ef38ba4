"""Which prefill worker and which decode worker take a request: pure functions from snapshots to a choice.

`cache_aware` predicts the cost of each pair: queue + prefill + transfer over the pair's own link + decode, and ten
times what misses the request's objectives. `least_loaded`, `round_robin` and `random` weigh each worker alone. A worker
that failed the request before comes after all others. A colocated worker pairs only with itself; beside pools it is
used if they have no room, and if it is predicted to be better (`benefit_of`). A decode worker that holds all but a
short end of the prompt may do both phases, and does if that costs less than the best pair (`cache_aware` only).

Prefill and decode workers are weighed together, because the link between them counts. Both are searched in the order of
their costs over the fastest link, and the search stops where no later worker can be better: no pair costs less than the
one found.
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
from jdisagg.core.worker_config import Role, bucket

SHOWN = 8  # candidates of each kind that a choice lists
PREFERRED, FAILED = 0, 1
RANKS = ("", "failed this request before")
Parts = tuple[tuple[str, float], ...]


def total(parts: Parts) -> float:
    """Returns the sum of the named parts of a cost."""
    return parts[0][1] if len(parts) == 1 else sum([part for _, part in parts])


class FetchEstimate(NamedTuple):
    """KV that a worker could fetch for a prompt, from the source that saves most time."""

    source: str  # a tier of the worker's own, or another worker
    tokens: int  # leading prompt tokens whose KV the worker has after the fetch
    share: float  # fetch time / time to compute the fetched tokens


class WorkerSnapshot(NamedTuple):
    """One live worker as the router sees it for one request.

    A decision builds many of them; a named tuple is built in a third of a dataclass's time.
    """

    worker: WorkerId
    role: Role
    work: float  # outstanding work: sent to the worker and not finished
    served: int  # requests sent to the worker so far; breaks ties
    has_room: bool  # for a reservation (decode), or for the prompt at all (prefill), as far as the router knows
    avoided: bool = False  # the worker failed this request before
    cached_tokens: int = 0  # leading prompt tokens whose KV the worker is expected to hold
    short_prompt_tokens: int = 0  # longest end of a prompt that a decode worker computes itself
    reach: FetchEstimate | None = None  # set if fetching is known to be faster than computing


@dataclass(frozen=True, slots=True)
class CostForecast:
    """The predicted costs of one request, in seconds for the router's `cache_aware`; by default in units of work.

    `transfer` is the cost of so many tokens from one worker to another, `least_transfer` its lower bound.
    """

    queue: Callable[[WorkerSnapshot], float] = lambda look: look.work
    prefill: Callable[[WorkerSnapshot, int], float] = lambda look, tokens: float(tokens)
    transfer: Callable[[WorkerId, WorkerId, int], float] = lambda source, destination, tokens: 0.0
    least_transfer: Callable[[WorkerId, int], float] = lambda destination, tokens: 0.0
    decode: Callable[[WorkerSnapshot], float] = lambda look: look.work  # all tokens after the first
    has_one_speed: bool = False  # all links are equally fast: `transfer` is `least_transfer`
    ttft_s: float = math.inf  # the request's objective
    later_s: float = math.inf  # the request's objective from the first token to the last


WORK_FORECAST = CostForecast()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The request to be routed, with its predicted costs."""

    request_id: str = ""
    prompt_tokens: int = 0
    number: int = 0  # pairs chosen before; the turn of `round_robin`
    seed: int = 0  # of `random`
    forecast: CostForecast = WORK_FORECAST


class Candidate(NamedTuple):
    """One worker for one phase. Candidates sort by rank, cost, cached tokens, requests served, name, in this order."""

    rank: int  # an index into RANKS
    cost: float
    uncached: int  # negated cached tokens for cache_aware, since prefill costs whole chunks; 0 for the baselines
    served: int
    worker: WorkerId
    parts: Parts  # the terms of the cost
    look: WorkerSnapshot

    @property
    def rank_name(self) -> str:
        """Returns why the worker comes after others whatever it costs; empty if it does not."""
        return RANKS[self.rank]

    @property
    def score(self) -> tuple[int, float, int, int, str]:
        """Returns the key by which candidates sort."""
        return (self.rank, self.cost, self.uncached, self.served, self.worker)


class Pair(NamedTuple):
    """The prefill and the decode worker of one attempt; equal if one worker does both."""

    prefill: WorkerId
    decode: WorkerId


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen pair (None if no pair has room) and the best candidates of each kind, best first."""

    routing: Routing
    taken: Pair | None
    prefills: tuple[Candidate, ...] = ()
    decodes: tuple[Candidate, ...] = ()
    colocated: tuple[Candidate, ...] = ()
    alone: tuple[Candidate, ...] = ()  # decode workers that could compute the uncached end of the prompt themselves
    why: str = ""  # reason for a pair or for one worker, if both were possible

    @property
    def reason(self) -> str:
        """Describes the choice, with the costs of the two best candidates of each kind."""
        if self.taken is None:
            return f"{self.routing}: no worker has room for its {self._missing()}"
        if self.taken.prefill == self.taken.decode:
            able = self.alone if self.by_itself else self.colocated
            return "; ".join([f"{self.routing}: {_words(able)}", *self._why()])
        return "; ".join([f"{self.routing}: {_words(self.prefills)}", _words(self.decodes), *self._why()])

    @property
    def by_itself(self) -> bool:
        """Returns True if a decode worker computes the end of the prompt."""
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


def end_of(snapshot: WorkerSnapshot, routed: RoutingRequest) -> int:
    """Returns the prompt tokens that the worker computes: at least the last one, whose output is sampled."""
    tokens = routed.prompt_tokens - snapshot.cached_tokens
    return tokens if tokens > 1 else 1


def at_hand(look: WorkerSnapshot, routed: RoutingRequest) -> Parts:
    """Returns the cost of the prompt's uncached end on a worker, computed or partly fetched, whichever is less."""
    prefill, tokens = routed.forecast.prefill, routed.prompt_tokens
    computed, reach = prefill(look, end_of(look, routed)), look.reach
    if reach is not None:
        rest = prefill(look, max(1, tokens - reach.tokens))
        fetched = reach.share * (computed - rest)
        if rest + fetched < computed:
            return (("prefill", rest), (f"fetch from {reach.source}", fetched))
    return (("prefill", computed),)


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
    forecast, tokens = routed.forecast, routed.prompt_tokens - look.cached_tokens
    if source is None:
        transfer = forecast.least_transfer(look.worker, tokens if tokens > 0 else 0)
    else:
        transfer = forecast.transfer(source.worker, look.worker, max(0, tokens))
    if forecast.later_s == math.inf:
        return (("transfer", transfer), ("decode", forecast.decode(look)))
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
    return _joined(routing, *[_best(kind, cost, is_baseline=True) for kind, cost in zip(kinds, costs, strict=True)])


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
    cost = parts[0][1] + parts[1][1] if len(parts) == 2 else total(parts)
    rank = FAILED if look.avoided else PREFERRED
    return Candidate(rank, cost, -look.cached_tokens, look.served, look.worker, parts, look)


def _best(
    snapshots: Sequence[WorkerSnapshot], cost: CostFunction, *, is_baseline: bool = False
) -> tuple[Candidate, ...]:
    """Returns the best candidates with room, best first, as many as a choice lists."""
    able = [_candidate(look, cost(look)) for look in snapshots if look.has_room]
    if is_baseline:
        able = [each._replace(uncached=0) for each in able]
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
    able = [each for each in decodes if each.cached_tokens and each.has_room]
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


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """One path to serve a request, as far as is known."""

    run_tokens: int  # of its prompt, as the worker that prefills runs them: programs are of declared sizes
    queue_tokens: float  # prompt tokens before it there
    prompt_token_s: float  # of that worker, a token run
    output_token_s: float  # of the worker that decodes, between two tokens of one sequence
    transfer_token_s: float = 0.0  # a prompt token, exposed
    disturbed: int = 0  # sequences that decode on the worker that prefills

    def parts(self, prompt_tokens: int, output_tokens: float) -> dict[str, float]:
        """Seconds of this request, and those that others lose by it."""
        prefill_s = self.run_tokens * self.prompt_token_s
        return {
            "queue": self.queue_tokens * self.prompt_token_s,
            "prefill": prefill_s,
            "transfer": prompt_tokens * self.transfer_token_s,
            "decode": output_tokens * self.output_token_s,
            "delay of others": self.disturbed * prefill_s,
        }


@dataclass(frozen=True, slots=True)
class Benefit:
    """The predicted benefit of a pair over one colocated worker."""

    apart: dict[str, float]  # seconds by part
    together: dict[str, float]

    @property
    def benefit_s(self) -> float:
        """Under zero: rather together."""
        return sum(self.together.values()) - sum(self.apart.values())

    @property
    def reason(self) -> str:
        """In words, with the parts that differ."""
        verb = "gains" if self.benefit_s >= 0 else "loses"
        parts = [
            f"{name} {_ms(self.apart[name])} against {_ms(self.together[name])}"
            for name in self.apart
            if self.apart[name] != self.together[name]
        ]
        return f"disaggregating {verb} {_ms(abs(self.benefit_s))}: " + (", ".join(parts) or "nothing differs")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def run_tokens(tokens: int, buckets: tuple[int, ...]) -> int:
    """Tokens that programs of these sizes (the last is a chunk's) run for a prompt by itself."""
    chunks, rest = divmod(tokens, buckets[-1])
    return chunks * buckets[-1] + (bucket(rest, buckets) if rest else 0)


def benefit_of(apart: PathEstimate, together: PathEstimate, prompt_tokens: int, output_tokens: float) -> Benefit:
    """Returns the benefit of a pair over one worker for the expected output tokens."""
    return Benefit(apart.parts(prompt_tokens, output_tokens), together.parts(prompt_tokens, output_tokens))
