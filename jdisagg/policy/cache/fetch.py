"""Fetches: pages of a prompt's beginning that HBM lacks are read from another place if that is faster than computing.

A fetch takes the pages behind those that HBM has, run by run: each run from the nearest of the worker's own tiers that
has it, otherwise from another worker or the shared pool. The pages arrive in HBM pages that no sequence knows. Those
that arrived without a gap enter the prefix cache, where the waiting request finds them. A fetch has a deadline: what
has not arrived by then is computed.

Lending is the other end: a worker reads pages that another one asks for. The asker has a reservation, a deadline and a
second source, so nothing here waits: if pages are not there, or too many are being read, the worker refuses at once
(NoPages). Pages of HBM are packed in program order, before any later write, and need no lock; pages of lower tiers are
locked while they are read.

Prices are the measured seconds of pages from each source, and of computing them. A source without a recent measurement
is tried, which measures it. A source that failed is not used for a time that doubles with each failure in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from jdisagg.core.messages import FetchPages, Holder, NoPages, Priced
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.tiers import NOBODY, DropPages, InsertPages, MovePages, PageMove, PagesMoved, Tier
from jdisagg.policy.cache.page_pool import PageState, SharedPages, TierPool
from jdisagg.policy.cache.prefix_cache import LockedPages, PageHash, packed, unpacked
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.router.estimates import Backoff, LinearFit
from jdisagg.policy.worker.handoff import Timer, timer_of

MOST_LENT = 512  # read for others at once; who asks for more meanwhile is told that there are none


class PeerPageServer:
    """Reads pages of one worker for other workers. `tiers`: its own below HBM, the upper one first."""

    def __init__(self, shared: SharedPages, tiers: dict[Tier, TierPool], out: EffectBuffer) -> None:
        self.shared, self.tiers, self.out = shared, tiers, out
        self.under_way: dict[Attempt, PageMove] = {}
        self._owners = count(1)

    def asked(self, message: FetchPages, asker: WorkerId) -> None:
        if any((each.peer, each.asked) == (asker, message.attempt) for each in self.under_way.values()):
            return  # said twice
        names = unpacked(message.names)
        wanted = len(names) - message.first
        room = MOST_LENT - sum(len(unpacked(each.names)) for each in self.under_way.values())
        found = self._found(names, message.first) if wanted <= room else None
        if found is None:
            self.out.send(asker, NoPages(message.attempt))
            return
        tier, pages = found
        owner = Attempt(RequestId(f"lent by {self.shared.config.worker}"), next(self._owners))
        lent = packed(names[message.first : message.first + len(pages)])
        move = PageMove(owner, tier, Tier.PEER, lent, pages, peer=asker, asked=message.attempt)
        self.under_way[owner] = move
        self.out.put(MovePages(move))

    def _found(self, names: Sequence[PageHash], first: int) -> tuple[Tier, tuple[int, ...]] | None:
        """Returns the tier that has the first of these pages, and their ids there."""
        if self.shared.cache.match(names) > first:
            held = self.shared.hold(names)
            self.shared.release(held)
            return Tier.HBM, held.pages[first:]
        for tier, pool in self.tiers.items():
            size = pool.match(names[first:])
            if size:
                return tier, pool.lock(names[first : first + size])
        return None

    def moved(self, event: PagesMoved) -> None:
        """Ends a read for another worker, which is told if no page could be read."""
        move = self.under_way.pop(event.move.owner)
        pool = self.tiers.get(move.source)
        if pool is not None:
            for name, good in zip(unpacked(move.names), event.good, strict=True):
                pool.unlock(name, good=good or bool(event.failed), used=good)
        if not any(event.good) and move.asked is not None:
            self.out.send(move.peer, NoPages(move.asked, event.failed))


DECAY = 0.9  # weight of earlier answers of the pool, with each new one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
COMPUTED = "computed"


@dataclass(slots=True)
class Prices:
    """The measured cost of pages by source. A source is a tier or a worker; all pages hold equally many tokens."""

    lines: dict[str, LinearFit] = field(default_factory=dict[str, LinearFit])
    backoffs: dict[str, Backoff] = field(default_factory=dict[str, Backoff])
    hit_share: float = 1.0  # of pages asked of the pool, how many it had of late
    fresh: bool = False  # something was learnt since `known` was asked

    def learn(self, source: str, pages: float, seconds: float, now_s: float) -> None:
        if pages > 0 and seconds > 0:
            self.lines.setdefault(source, LinearFit()).learn(pages, seconds, now_s)
            self.fresh = True

    def forget(self, source: str) -> None:
        self.lines.pop(source, None)

    def answered(self, source: str) -> None:
        self.backoffs.pop(source, None)

    def failed(self, source: str, now_s: float) -> None:
        self.backoffs.setdefault(source, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)).fail(now_s)

    def usable(self, source: str, now_s: float) -> bool:
        """Returns True if the source may be asked: it did not fail, or its pause is over."""
        backoff = self.backoffs.get(source)
        return backoff is None or backoff.is_over(now_s)

    def asked_pool(self, asked: int, found: int) -> None:
        if asked:
            self.hit_share = DECAY * self.hit_share + (1 - DECAY) * found / asked

    def seconds(self, source: str, pages: int, now_s: float) -> float | None:
        line = self.lines.get(source)
        return None if line is None else line.at(pages, now_s)

    def pays(self, source: str, pages: int, now_s: float) -> bool:
        """Returns True if fetching so many pages is expected to be faster than computing them."""
        if not self.usable(source, now_s):
            return False
        fetched, computed = self.seconds(source, pages, now_s), self.seconds(COMPUTED, pages, now_s)
        if fetched is None or computed is None:
            return True
        return fetched < computed * (self.hit_share if source == Tier.POOL else 1.0)

    def known(self, now_s: float) -> Priced:
        """Returns the message with recent costs for the router; a source that is paused is not in it."""
        self.fresh = False
        lines = {source: line for source, line in self.lines.items() if self.usable(source, now_s)}
        fits = {source: line.fit() for source, line in lines.items() if line.at(1, now_s) is not None}
        return Priced(tuple((str(source), *fits[source]) for source in sorted(fits)))


CHUNK_PAGES = 64  # that another worker is asked for by one word


class SourceRun(NamedTuple):
    """A number of consecutive pages and the source that they come from."""

    tier: Tier
    worker: WorkerId  # where the tier is a peer's
    size: int

    @property
    def source(self) -> str:
        return self.worker or self.tier.value


class PageSources:
    """Chooses sources of missing pages by their cost. `tiers`: the worker's own below HBM, the upper one first."""

    def __init__(self, tiers: Mapping[Tier, TierPool], prices: Prices, *, shared_pool: bool) -> None:
        self.tiers, self.prices, self.shared_pool = tiers, prices, shared_pool

    def runs(self, missing: Sequence[PageHash], holders: Sequence[Holder], now_s: float) -> list[SourceRun]:
        """Returns consecutive runs from the first missing page on. Page indices of holders count from there."""
        runs, at = list[SourceRun](), 0
        while at < len(missing):
            run = self._own(missing, at, now_s) or self._others(len(missing), holders, at, now_s)
            if run is None:
                break
            runs.append(run)
            at += run.size
        return runs

    def _own(self, missing: Sequence[PageHash], at: int, now_s: float) -> SourceRun | None:
        for tier, pool in self.tiers.items():
            size = pool.match(missing[at:])
            if size and self.prices.pays(tier, size, now_s):
                return SourceRun(tier, NOBODY, size)
        return None

    def _others(self, end: int, holders: Sequence[Holder], at: int, now_s: float) -> SourceRun | None:
        """Returns the run of the cheapest source per page; sources without a measurement are tried first."""
        there = [each for each in holders if each.first <= at < min(each.stop, end)]
        found = [SourceRun(Tier.PEER, each.worker, min(each.stop, end) - at) for each in there]
        if self.shared_pool:
            found.append(SourceRun(Tier.POOL, NOBODY, end - at))
        found = [run for run in found if self.prices.pays(run.source, run.size, now_s)]
        if not found:
            return None
        best = min(found, key=lambda run: (self.prices.seconds(run.source, run.size, now_s) or 0.0) / run.size)
        return best if best.tier is Tier.POOL else best._replace(size=min(best.size, CHUNK_PAGES))


MOST_PAGES = 256  # of one fetch
SHORTEST_S, USUAL_S, LONGEST_S = 0.25, 2.0, 5.0  # a fetch is waited for twice as long as computing takes, within these
PATIENCE = 2.0


@dataclass(slots=True, eq=False)
class Fetch:
    """Pages under way to HBM, and the attempts that wait for them."""

    owner: Attempt  # of its first move
    names: tuple[PageHash, ...]  # from the prompt's first page on
    held: LockedPages  # of them, those that HBM had
    moves: list[PageMove]
    deadline_s: float
    waiters: list[Attempt]
    arrived: dict[Attempt, tuple[bool, ...]] = field(default_factory=dict[Attempt, tuple[bool, ...]])  # by move


class Fetches:
    """All fetches of one worker. `tiers`: its own below HBM, the upper one first."""

    def __init__(
        self, shared: SharedPages, tiers: dict[Tier, TierPool], out: EffectBuffer, prices: Prices, *, shared_pool: bool
    ) -> None:
        self.shared, self.tiers, self.out, self.prices = shared, tiers, out, prices
        self.sources = PageSources(tiers, prices, shared_pool=shared_pool)
        self.under_way: dict[Attempt, Fetch] = {}  # by each of its moves
        self.late: dict[Attempt, PageMove] = {}  # moves that nobody waits for any more
        self._coming: dict[PageHash, Fetch] = {}
        self._waiting: dict[Attempt, Fetch] = {}
        self._owners = count(1)

    # ------------------------------------------------------------ who waits

    def begin(
        self, waiter: Attempt, names: Sequence[PageHash], room: int, now_s: float, holders: Sequence[Holder] = ()
    ) -> bool:
        """Returns True if `waiter` is to wait for pages with these hashes of its prompt.

        room: pages of HBM that may be taken. holders: other workers that may have some of them.
        """
        held, idle = self.shared.cache.found(names)
        missing = names[held:]
        fetch = self._coming.get(missing[0]) if missing else None
        if fetch is None and missing:
            wanted = missing[: min(MOST_PAGES, max(0, room - idle))]
            there = [Holder(each.worker, each.first - held, each.stop - held) for each in holders]
            fetch = self._start(names, held, self.sources.runs(wanted, there, now_s), now_s)
        if fetch is None:
            return False
        fetch.waiters.append(waiter)
        self._waiting[waiter] = fetch
        return True

    def holds_up(self, waiter: Attempt) -> bool:
        return waiter in self._waiting

    def forget(self, waiter: Attempt) -> None:
        """Removes a waiter; its pages still arrive."""
        fetch = self._waiting.pop(waiter, None)
        if fetch is not None:
            fetch.waiters.remove(waiter)

    def pages_of(self) -> dict[Attempt, set[int]]:
        """Returns the HBM pages that are being filled, by owner."""
        return {
            owner: set(next(move for move in fetch.moves if move.owner == owner).destination_pages)
            for owner, fetch in self.under_way.items()
        }

    def _start(self, names: Sequence[PageHash], held: int, runs: Sequence[SourceRun], now_s: float) -> Fetch | None:
        if not runs:
            return None
        handle, moves = self.shared.hold(names[:held]), list[PageMove]()
        ends = list(accumulate((run.size for run in runs), initial=held))
        parts = [names[first:stop] for first, stop in pairwise(ends)]
        # Locked before any room is made in HBM: what leaves it may need a place below, and must not take one of these.
        locked = [self._lock(run, part) for run, part in zip(runs, parts, strict=True)]
        for run, part, places in zip(runs, parts, locked, strict=True):
            owner = Attempt(RequestId("fetch"), next(self._owners))
            pages = self.shared.take(len(part), owner, PageState.IN_FLIGHT)
            assert pages is not None, "a fetch takes no more than there is room for"
            moves.append(PageMove(owner, run.tier, Tier.HBM, packed(part), places, pages, run.worker))
        deadline_s = now_s + self._patience_s(ends[-1] - held, now_s)
        fetch = Fetch(moves[0].owner, tuple(names[: ends[-1]]), handle, moves, deadline_s, [])
        self._send_for(fetch)
        self._coming |= dict.fromkeys(fetch.names[held:], fetch)
        self.out.set_timer(deadline_s, timer_of(Timer.FETCH, fetch.owner))
        return fetch

    def _lock(self, run: SourceRun, names: Sequence[PageHash]) -> tuple[int, ...]:
        """Locks the pages of a run in a tier of this worker and returns their ids; () for other sources."""
        return self.tiers[run.tier].lock(names) if run.tier in self.tiers else ()

    def _send_for(self, fetch: Fetch) -> None:
        at = len(fetch.held.pages)
        for move in fetch.moves:
            self.under_way[move.owner] = fetch
            self.out.put(MovePages(move))
            first, at = at, at + len(move.destination_pages)
            if move.source is Tier.PEER:
                self.out.send(move.peer, FetchPages(move.owner, packed(fetch.names[:at]), first))

    def _patience_s(self, pages: int, now_s: float) -> float:
        computed = self.prices.seconds(COMPUTED, pages, now_s)
        return USUAL_S if computed is None else min(LONGEST_S, max(SHORTEST_S, PATIENCE * computed))

    # ------------------------------------------------------------ what came

    def moved(self, event: PagesMoved, now_s: float) -> list[Attempt]:
        """Handles pages that were read; returns the attempts that need not wait any longer."""
        move = event.move
        self._release(event)
        self._learn(event, now_s)
        fetch = self.under_way.get(move.owner)
        if fetch is None or move.owner in fetch.arrived:
            self.late.pop(move.owner, None)
            self.out.put(DropPages(move))
            return []
        self.out.put(InsertPages(move, event.good) if any(event.good) else DropPages(move))
        return self._ended(fetch, move, event.good)

    def refused(self, message: NoPages, sender: WorkerId, now_s: float) -> list[Attempt]:
        """Handles a refusal of another worker; returns the attempts that need not wait any longer."""
        fetch = self.under_way.get(message.attempt)
        move = None if fetch is None else next(each for each in fetch.moves if each.owner == message.attempt)
        if fetch is None or move is None or move.peer != sender or move.owner in fetch.arrived:
            return []
        if message.failed:
            self.prices.failed(sender, now_s)
        self.out.put(DropPages(move))
        return self._ended(fetch, move, (False,) * len(move.destination_pages))

    def _ended(self, fetch: Fetch, move: PageMove, good: tuple[bool, ...]) -> list[Attempt]:
        fetch.arrived[move.owner] = good
        return self._finish(fetch) if len(fetch.arrived) == len(fetch.moves) else []

    def _release(self, event: PagesMoved) -> None:
        pool = self.tiers.get(event.move.source)
        if pool is not None:
            for name, good in zip(unpacked(event.move.names), event.good, strict=True):
                pool.unlock(name, good=good or bool(event.failed), used=good)

    def _learn(self, event: PagesMoved, now_s: float) -> None:
        source, number = event.move.from_where, sum(event.good)
        if event.failed:
            self.prices.failed(source, now_s)
            return
        self.prices.answered(source)
        self.prices.learn(source, max(1, number + self._before(event.move)), event.seconds, now_s)
        if source == Tier.POOL:
            self.prices.asked_pool(len(event.good), number)

    def _before(self, move: PageMove) -> int:
        """Returns the pages of the same fetch that the same worker sent before: all chunks were requested at once."""
        fetch = self.under_way.get(move.owner)
        if fetch is None or move.source is not Tier.PEER:
            return 0
        return sum(sum(fetch.arrived.get(each.owner, ())) for each in fetch.moves if each.peer == move.peer)

    def expire(self, owner: Attempt, now_s: float) -> list[Attempt]:
        """Handles a deadline; returns the attempts that need not wait any longer."""
        fetch = self.under_way.get(owner)
        if fetch is None:
            return []
        if now_s < fetch.deadline_s:
            self.out.set_timer(fetch.deadline_s, timer_of(Timer.FETCH, owner))
            return []
        for move in fetch.moves:
            if move.owner not in fetch.arrived and move.source not in self.tiers:
                self.prices.failed(move.from_where, now_s)
        return self._finish(fetch)

    def give_up_all(self) -> None:
        for fetch in {id(each): each for each in self.under_way.values()}.values():
            self._finish(fetch)

    def _finish(self, fetch: Fetch) -> list[Attempt]:
        """Keeps the pages that arrived without a gap, and releases the others."""
        path, whole = list(fetch.held.pages), True
        for move in fetch.moves:
            good = fetch.arrived.get(move.owner, ())
            came = next((index for index, each in enumerate(good) if not each), len(good)) if whole else 0
            whole = whole and came == len(move.destination_pages)
            path += move.destination_pages[:came]
            names = fetch.names[: len(path)] if came else ()
            self.shared.keep(names, path[: len(names)], move.destination_pages, move.owner)
            del self.under_way[move.owner]
            if move.owner not in fetch.arrived:
                self._give_up(move)
        self.shared.release(fetch.held)
        for name in fetch.names:
            if self._coming.get(name) is fetch:
                del self._coming[name]
        for waiter in fetch.waiters:
            del self._waiting[waiter]
        return fetch.waiters

    def _give_up(self, move: PageMove) -> None:
        """Gives up a late transfer. A store of this worker answers at some time; another worker may never."""
        if move.source is Tier.PEER:
            self.out.put(DropPages(move))
        else:
            self.late[move.owner] = move
