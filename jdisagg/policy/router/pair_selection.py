"""Chooses a pair for a request: takes snapshots of the workers, asks the routing, and records the decision.

In a large cluster not all workers are weighed: the next few in turn, their neighbours, and some that hold the beginning
of the prompt. The least loaded of a few is nearly the least loaded of all (Mitzenmacher), and the workers that hold a
prefix are looked up by its pages: a decision among a thousand workers costs as much as among a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from jdisagg.core.labels import SHARED_BY
from jdisagg.core.messages import Holder
from jdisagg.core.request import Phase, Request, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.directory import PrefixIndex, TierDirectory
from jdisagg.policy.cache.prefix_cache import PageHash
from jdisagg.policy.request_size import readable_pages
from jdisagg.policy.router.decisions import Decision, Verdict
from jdisagg.policy.router.estimates import Forecasts, Pace
from jdisagg.policy.router.request_state import RequestState
from jdisagg.policy.router.routing import (
    FAILED,
    RANKS,
    WORK_FORECAST,
    Choice,
    FetchEstimate,
    Pair,
    PathEstimate,
    RoutingRequest,
    WorkerSnapshot,
    benefit_of,
    choose_pair,
    run_tokens,
)
from jdisagg.policy.router.worker_view import Need, WorkerState

MANY = 64  # workers of one role from which on not all are weighed for each request
WEIGHED = 4  # workers of such a role that are weighed: the next in turn
KEEPERS = 8  # workers that hold the prompt's beginning, weighed besides
SAMPLED = (Routing.LEAST_LOADED, Routing.RANDOM, Routing.CACHE_AWARE)  # the routings for which a few stand for all

Place = tuple[str, str]  # a label's name and its value


class WorkerSample:
    """The workers of one router, and whose turn it is to be weighed."""

    def __init__(self, routing: Routing, peers: Mapping[WorkerId, WorkerState], index: PrefixIndex) -> None:
        self.routing, self.peers, self.index = routing, peers, index
        self.by_role: dict[Role, list[WorkerState]] = {}
        self._page_sizes = list[int]()
        self._decoders_at: dict[Place, list[WorkerState]] = {}
        self._next = 0

    def joined(self, by_role: dict[Role, list[WorkerState]]) -> None:
        """Takes the changed set of workers."""
        self.by_role, self._decoders_at = by_role, {}
        self._page_sizes = sorted({peer.config.page_size for peer in self.peers.values() if peer.config.prefix_caching})
        decoders = by_role[Role.DECODE]
        if self.routing is Routing.CACHE_AWARE and len(decoders) >= MANY:
            for peer in decoders:
                for place in _places(peer.config):
                    self._decoders_at.setdefault(place, []).append(peer)

    def of(self, row: RequestState) -> list[WorkerState] | None:
        """Returns the workers that are weighed for the request; None if all are."""
        few = self.next_few()
        if few is None or self.routing is not Routing.CACHE_AWARE:
            return few
        if self._decoders_at:
            few += self._neighbours(few)
        return few + self._keepers(row, {peer.config.worker for peer in few})

    def next_few(self) -> list[WorkerState] | None:
        """Returns the next workers in turn, whatever they hold; None if all are weighed."""
        if self.routing not in SAMPLED or max(map(len, self.by_role.values())) < MANY:
            return None
        self._next += WEIGHED
        return [peer for some in self.by_role.values() for peer in _in_turn(some, self._next)]

    def _neighbours(self, few: Sequence[WorkerState]) -> list[WorkerState]:
        """Returns a decode worker in the nearest place of each prefill worker of the sample."""
        known = {peer.config.worker for peer in few}
        found = dict[WorkerId, WorkerState]()
        for prefill in few:
            if prefill.config.role is Role.PREFILL:
                named = [self._decoders_at.get(place) for place in _places(prefill.config)]
                near = next(filter(None, named), list[WorkerState]())
                peer = near[self._next // WEIGHED % len(near)] if near else None
                if peer is not None and peer.config.worker not in known:
                    found[peer.config.worker] = peer
        return list(found.values())

    def _keepers(self, row: RequestState, others: set[WorkerId]) -> list[WorkerState]:
        """Returns workers besides `others` that hold most of the prompt, by pages of each size in use."""
        found = [self.index.nearest(row.page_names(size), KEEPERS, self._next) for size in self._page_sizes]
        return [self.peers[worker] for some in found for worker in some if worker not in others]


def _places(config: WorkerConfig) -> list[Place]:
    """Returns the worker's labels, the nearest place first."""
    named = [(name, getattr(config.labels, name)) for names in SHARED_BY.values() for name in names]
    return [place for place in named if place[1]]


def _in_turn(some: Sequence[WorkerState], number: int) -> Sequence[WorkerState]:
    """Returns `WEIGHED` workers from index `number` on, cyclically; all if there are few."""
    if len(some) < MANY:
        return some
    first = number % len(some)
    return [*some[first : first + WEIGHED], *some[: max(0, first + WEIGHED - len(some))]]


class PairSelection:
    """Chooses, notes every decision, and remembers what went where as far as the routing asks for it."""

    def __init__(
        self, config: RouterConfig, peers: Mapping[WorkerId, WorkerState], note: Callable[[Decision], None]
    ) -> None:
        self.config, self.peers, self.note = config, peers, note
        self.kept, self.pace = TierDirectory(), Pace()
        self.directory = self.kept.hbm
        self.forecasts = Forecasts(peers, self.pace, config.short_token_weight)
        self._turn = 0  # of round robin
        self._aware = config.routing is Routing.CACHE_AWARE
        self._mixed = False
        self._objectives = False  # whether some request had any
        self.by_role: dict[Role, list[WorkerState]] = {}
        self.sample = WorkerSample(config.routing, peers, self.directory.index)
        self.joined()

    def choose(self, row: RequestState, now_s: float, *, ask_anyway: bool) -> Pair | None:
        """Returns the pair for the row's next attempt, None where none has room; `ask_anyway` asks full workers too."""
        few = self.sample.of(row)
        choice = None if few is None else self._choice(few, row, now_s, ask_anyway)
        if choice is None or choice.taken is None:
            choice = self._choice(self.peers.values(), row, now_s, ask_anyway)
        self._decided(row, choice, now_s)
        return choice.taken

    def _choice(self, peers: Iterable[WorkerState], row: RequestState, now_s: float, ask_anyway: bool) -> Choice:
        request = row.to_prefill()
        snapshots = self._snapshots(peers, request, row, ask_anyway)
        if self._mixed and not self.config.colocated_fallback and self._pools_could(request):
            snapshots = [snapshot for snapshot in snapshots if snapshot.role is not Role.COLOCATED]
        forecast = self.forecasts.of(request, now_s) if self._aware else WORK_FORECAST
        routed = RoutingRequest(row.request_id, len(request.prompt), self._turn, self.config.routing_seed, forecast)
        choice = choose_pair(snapshots, routed, self.config.routing)
        if self._mixed and self.config.colocated_fallback and not choice.by_itself:
            choice = self._with_fallback(choice, request, now_s)
        return choice

    def shipped(self, row: RequestState, cached_tokens: int, wire_s: float) -> None:
        """The KV of its present attempt has reached its decode worker, but what was there already."""
        if row.prefill is not None and row.decode is not None:
            tokens = len(row.request.prompt) + row.num_before - cached_tokens
            self.forecasts.shipped(row.prefill, row.decode, tokens, wire_s)

    def _snapshots(
        self, peers: Iterable[WorkerState], request: Request, row: RequestState, ask_anyway: bool
    ) -> list[WorkerSnapshot]:
        need, avoid = Need(request), row.avoid
        follows, priced = self.directory.follows, bool(self.kept.prices)
        names, keepers, found = dict[int, tuple[PageHash, ...]](), set[WorkerId](), list[WorkerSnapshot]()
        for peer in peers:
            config, held = peer.config, 0
            worker = config.worker
            if follows(worker):
                if config.page_size not in names:
                    pages = names[config.page_size] = row.page_names(config.page_size)
                    keepers.update(self.directory.index.keepers(pages[0]) if pages else ())
                if worker in keepers:
                    held = self.directory.cached_tokens(config, names[config.page_size])
            look = peer.snapshot(need, worker in avoid, ask_anyway, held)
            reach = self._reach(config, request, row, held) if priced and config.role.prefills else None
            found.append(look if reach is None else look._replace(reach=reach))
        return found

    def _reach(
        self, config: WorkerConfig, request: Request, row: RequestState, cached_tokens: int
    ) -> FetchEstimate | None:
        """Returns what the worker could fetch of the prompt instead of computing it."""
        names = row.page_names(config.page_size)[: readable_pages(request, config)]
        return self.kept.reach(config, names, cached_tokens // config.page_size)

    def cached_tokens(self, config: WorkerConfig, row: RequestState) -> int:
        """Leading tokens of the row's prompt whose KV the worker is thought to hold."""
        if not self.directory.follows(config.worker):
            return 0
        return self.directory.cached_tokens(config, row.page_names(config.page_size))

    def holders(self, config: WorkerConfig, row: RequestState) -> tuple[Holder, ...]:
        """Returns the workers that may lend this prefill worker pages of the prompt."""
        names = row.page_names(config.page_size) if config.peer_fetch and config.prefix_caching else ()
        return self.kept.holders(config, names[: readable_pages(row.to_prefill(), config)]) if names else ()

    def _decided(self, row: RequestState, choice: Choice, now_s: float) -> None:
        if choice.taken is None:
            if not row.wait_told:
                row.wait_told = True
                self.note(Decision(now_s, row.request_id, Verdict.WAITS, choice))
            return
        row.wait_told = False
        self.note(Decision(now_s, row.request_id, Verdict.TAKEN, choice))
        if self.config.routing is Routing.ROUND_ROBIN:
            self._turn += 1
        config = self.peers[choice.taken.prefill].config
        if config.role.prefills and self.directory.follows(config.worker):  # a decode worker keeps it at its end only
            self.directory.sent(config, row.page_names(config.page_size))

    # ------------------------------------------------------------ pools, or a worker of both roles

    def joined(self) -> None:
        """The workers are others now."""
        self.by_role = {role: [peer for peer in self.peers.values() if peer.config.role is role] for role in Role}
        self._mixed = all(self.by_role.values())
        self.sample.joined(self.by_role)
        configs = {role: [peer.config for peer in peers] for role, peers in self.by_role.items()}
        self.forecasts.links.restrict(configs[Role.PREFILL], configs[Role.DECODE])

    def forget(self, worker: WorkerId) -> None:
        """Removes a lost worker."""
        self.kept.forget(worker)
        self.pace.forget(worker)
        self.forecasts.forget(worker)
        self.joined()

    def ended(self, row: RequestState, now_s: float) -> None:
        """Learns from a finished request if the routing uses estimates."""
        self._objectives |= row.request.has_objectives
        asked = self._mixed or self._objectives or self._aware
        if asked and row.phase is Phase.FINISHED and row.output and row.prefill and row.decode:
            prompt_tokens = len(row.request.prompt)
            tokens = prompt_tokens, self._run_tokens(row.prefill, prompt_tokens), len(row.output)
            gap_s = self.pace.learn(row.ledger, row.prefill, row.decode, tokens, now_s)
            if gap_s is not None:
                self.forecasts.decoded(row.decode, gap_s, now_s)

    def _pools_could(self, request: Request) -> bool:
        able = {peer.config.role for peer in self.peers.values() if peer.could_hold(request) and not peer.leaving}
        return {Role.PREFILL, Role.DECODE} <= able

    def _with_fallback(self, choice: Choice, request: Request, now_s: float) -> Choice:
        """The colocated worker instead of the pair, where disaggregating is predicted to lose; and why, or why not."""
        if not (choice.prefills and choice.decodes and choice.colocated):
            full = "no colocated worker has room" if choice.prefills and choice.decodes else "the pools have no room"
            return replace(choice, why=full if choice.taken is not None else "")
        pair, both = (choice.prefills[0], choice.decodes[0]), choice.colocated[0]
        alone = Pair(both.worker, both.worker)
        failed = FAILED in (pair[0].rank, pair[1].rank)
        if failed or both.rank == FAILED:
            return replace(choice, taken=alone, why=f"the pair {RANKS[FAILED]}") if both.rank < FAILED else choice
        tokens = len(request.prompt)
        apart = self._path(pair[0].worker, pair[1].worker, tokens, now_s)
        together = self._path(both.worker, both.worker, tokens, now_s)
        if apart is None or together is None:
            return replace(choice, why="too little is known yet to predict anything")
        output_tokens = self.pace.expected_tokens(request.sampling.max_tokens, now_s)
        benefit = benefit_of(apart, together, tokens, output_tokens)
        return replace(choice, taken=choice.taken if benefit.benefit_s >= 0 else alone, why=benefit.reason)

    def _run_tokens(self, prefill: WorkerId, prompt_tokens: int) -> int:
        peer = self.peers.get(prefill)
        return prompt_tokens if peer is None else run_tokens(prompt_tokens, peer.config.prefill_buckets)

    def _path(self, prefill: WorkerId, decode: WorkerId, prompt_tokens: int, now_s: float) -> PathEstimate | None:
        """Returns the estimate of one path; None if no pace is known."""
        pace, peer = self.pace, self.peers[prefill]
        prompt_s, output_s = pace.prompt.guess(prefill, now_s), pace.output.guess(decode, now_s)
        if prompt_s is None or output_s is None:
            return None
        transfer_s = pace.transfer.guess(f"{prefill} {decode}", now_s) if prefill != decode else None
        queued = peer.prompt_tokens
        tokens = self._run_tokens(prefill, prompt_tokens)
        return PathEstimate(tokens, queued, prompt_s, output_s, transfer_s or 0.0, peer.view.running)

    def refuse(self, request_id: RequestId, verdict: Verdict, detail: str, now_s: float) -> None:
        """Nobody was weighed: the house is full, or too small."""
        self.note(Decision(now_s, request_id, verdict, detail=detail))
