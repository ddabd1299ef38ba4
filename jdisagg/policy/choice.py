"""The types of a routing decision: what a routing is given (snapshots, estimates) and what it returns (a choice)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role

SHOWN = 8  # candidates of each kind that a choice lists
PREFERRED, FAILED = 0, 1
RANKS = ("", "failed this request before")
Parts = tuple[tuple[str, float], ...]


def total(parts: Parts) -> float:
    """Returns the sum of the named parts of a cost."""
    if len(parts) == 2:
        return parts[0][1] + parts[1][1]
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
    room_now: bool = True  # the pages are free now, not only by the time KV arrives
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
    """One worker for one phase. Candidates sort by rank, then cost, then requests served, then name."""

    rank: int  # an index into RANKS
    cost: float
    served: int
    worker: WorkerId
    parts: Parts  # the terms of the cost
    look: WorkerSnapshot

    @property
    def rank_name(self) -> str:
        """Returns why the worker comes after others whatever it costs; empty if it does not."""
        return RANKS[self.rank]

    @property
    def score(self) -> tuple[int, float, int, str]:
        """Returns the key by which candidates sort."""
        return (self.rank, self.cost, self.served, self.worker)


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
