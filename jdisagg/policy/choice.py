"""What a routing weighs and what it decides: nouns, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role

SHOWN = 8  # candidates of a phase that a choice shows
FREELY, APART, FAILED = 0, 1, 2
RANKS = ("", "another's partner", "failed this request before")
Parts = tuple[tuple[str, float], ...]


def total(parts: Parts) -> float:
    return parts[0][1] if len(parts) == 1 else sum([part for _, part in parts])


class Reach(NamedTuple):
    """KV that a worker could fetch for a prompt, from the source that saves most."""

    source: str  # a tier of its own, or another worker
    tokens: int  # leading ones that are at hand then
    share: float  # of the time that computing those takes which are fetched


class WorkerSnapshot(NamedTuple):
    """One live worker as the router sees it for one request. There are many of what a decision is made of: a tuple is
    made in a third of the time."""

    worker: WorkerId
    role: Role
    work: float  # outstanding: what was sent there and has not ended
    served: int  # requests sent there so far, to share the idle hours
    has_room: bool  # as far as is known: for a reservation (decode), or for its prompt at all (prefill)
    avoided: bool = False  # it failed this request before
    cached_tokens: int = 0  # leading prompt tokens whose KV it is thought to hold
    short_prompt_tokens: int = 0  # of a decode worker: the end of a prompt that it computes itself, at most
    room_now: bool = True  # not only when KV will come: what it computes itself needs pages at once
    reach: Reach | None = None  # where fetching is known to be quicker than computing


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one request is predicted to meet, in seconds, where the routing asks for that; by default from work alone.

    `transfer` is of so many tokens from the one worker to the other, `least_transfer` no more than that of any pair.
    """

    queue: Callable[[WorkerSnapshot], float] = lambda look: look.work
    prefill: Callable[[WorkerSnapshot, int], float] = lambda look, tokens: float(tokens)
    transfer: Callable[[WorkerId, WorkerId, int], float] = lambda source, destination, tokens: 0.0
    least_transfer: Callable[[WorkerId, int], float] = lambda destination, tokens: 0.0
    decode: Callable[[WorkerSnapshot], float] = lambda look: look.work  # all tokens but the first
    ttft_s: float = math.inf  # what was asked for
    later_s: float = math.inf  # so, from the first token to the last


UNASKED = Forecast()


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
    forecast: Forecast = UNASKED


class Candidate(NamedTuple):
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
        return total(self.parts)

    @property
    def score(self) -> tuple[int, float, int, str]:
        return (self.rank, self.cost, self.served, self.worker)


class Pair(NamedTuple):
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


def end_of(snapshot: WorkerSnapshot, routed: RoutingRequest) -> int:
    """Prompt tokens to be computed there: the last one always is, for what is drawn after it."""
    return max(1, routed.prompt_tokens - snapshot.cached_tokens)


def at_hand(snapshot: WorkerSnapshot, compute: Callable[[int], float]) -> Parts:
    """What the prompt costs there: `compute` is given the leading tokens that need not be computed. What fetching costs
    is said by its source, in whatever `compute` counts."""
    here, reach = compute(snapshot.cached_tokens), snapshot.reach
    if reach is not None:
        rest = compute(reach.tokens)
        fetched = reach.share * (here - rest)
        if rest + fetched < here:
            return (("prefill", rest), (f"fetch from {reach.source}", fetched))
    return (("prefill", here),)
