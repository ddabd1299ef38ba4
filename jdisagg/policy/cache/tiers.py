"""One worker's tiers below HBM: what they hold, what goes down, what comes up, and what each source costs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import NamedTuple

from jdisagg.core.messages import FetchPages, Holder, NoPages
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.tiers import MovePages, PageMove, PagesFound, PagesMoved, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.fetch import COMPUTED, Fetches, PeerPageServer, Prices
from jdisagg.policy.cache.page_pool import SharedPages, TierPage, TierPool
from jdisagg.policy.cache.prefix_cache import CacheChangeLog, CachedPage, PageHash, packed, unpacked
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.worker.slots import StepTimer

# Eviction from a worker's tiers below HBM: what is worth least goes from DRAM to disk, if that admits it, or is
# lost.
#
# Who asks for room ahead of need gets none that a page would have to leave that HBM has as well and no other
# tier: that page would be the next to go down, and in a tier too small for the watermarks the same pages would
# take each other's places for ever.

LOW_DRAM, HIGH_DRAM = 0.1, 0.2  # of its pages that are free: from when on pages go to disk, and until when
AHEAD_PAGES = 16  # under way at once to one tier, of those that go ahead of need
DISK_USES = 2  # what disk admits was used so often
REMEMBERED = 1 << 16  # names of pages that went down, or into the pool, of late


class EvictionCandidate(NamedTuple):
    """A page that is to go down."""

    name: PageHash
    page: int
    uses: int
    depth: int


def admits(tier: Tier, uses: int) -> bool:
    return tier is not Tier.DISK or uses >= DISK_USES


def remember(names: OrderedDict[PageHash, None], new: Sequence[PageHash]) -> None:
    """Adds the new ones, and forgets the oldest of too many."""
    names.update(dict.fromkeys(new))
    while len(names) > REMEMBERED:
        names.popitem(last=False)


class Moves:
    """Pages on their way down."""

    def __init__(self, out: EffectBuffer) -> None:
        self.out = out
        self.under_way: dict[Attempt, PageMove] = {}
        self.refused: OrderedDict[PageHash, None] = OrderedDict()  # were not taken, and are not offered again
        self._owners = count(1)

    def begin(
        self, source: Tier, destination: Tier, pages: Sequence[EvictionCandidate], places: tuple[int, ...]
    ) -> None:
        if not pages:
            return
        owner = Attempt(RequestId("move"), next(self._owners))
        names = packed([page.name for page in pages])
        move = PageMove(owner, source, destination, names, tuple(page.page for page in pages), places)
        self.under_way[owner] = move
        self.out.put(MovePages(move))

    def pages_to(self, tier: Tier) -> int:
        """That are under way there."""
        return sum(len(unpacked(move.names)) for move in self.under_way.values() if move.destination is tier)


class EvictionPolicy:
    """Of one worker. `tiers` are its own below HBM; `takes`: whether one takes pages now; `hbm`: what lies there."""

    def __init__(self, tiers: dict[Tier, TierPool], moves: Moves, takes: Callable[[Tier], bool]) -> None:
        self.tiers, self.moves, self.takes = tiers, moves, takes
        self.hbm: Container[PageHash] = ()
        self._spilling = False

    def tend(self) -> None:
        """Gives up what is worth least until enough is free; what disk admits goes there first, and room that it is
        about to leave is not made twice."""
        dram = self.tiers.get(Tier.DRAM)
        if dram is None:
            return
        share = dram.free_pages / dram.num_pages
        self._spilling = share < (HIGH_DRAM if self._spilling else LOW_DRAM)
        if self._spilling:
            wanted = min(AHEAD_PAGES, int(HIGH_DRAM * dram.num_pages) + 1)
            self.make_room(dram, wanted - self.moves.pages_to(Tier.DISK), ahead=True)

    def make_room(self, pool: TierPool, wanted: int, *, ahead: bool) -> None:
        """Until `wanted` pages of it are free, or on their way from DRAM to disk, or nothing more may go."""
        if pool.free_pages >= wanted:
            return
        going = list[EvictionCandidate]()
        most = AHEAD_PAGES - self.moves.pages_to(Tier.DISK) if pool is self.tiers.get(Tier.DRAM) else 0

        def spills(kept: TierPage) -> bool:
            return len(going) < most and self._spills(kept.name, kept.uses)

        def stays(kept: TierPage) -> bool:
            return ahead and self._would_return(pool, kept.name) and not spills(kept)

        for kept in pool.victims(stays):
            if spills(kept):
                (page,) = pool.lock((kept.name,))
                going.append(EvictionCandidate(kept.name, page, kept.uses, kept.depth))
            else:
                pool.evict(kept.name)
            if pool.free_pages + len(going) >= wanted:
                break
        if going:
            self._spill(going, ahead=ahead)

    def _would_return(self, pool: TierPool, name: PageHash) -> bool:
        """HBM has it as well, and it would have to go down again if it left this tier."""
        elsewhere = any(name in tier.kept for tier in self.tiers.values() if tier is not pool)
        return name in self.hbm and not elsewhere

    def _spill(self, going: Sequence[EvictionCandidate], *, ahead: bool) -> None:
        """These, which are locked, from DRAM to disk, as far as there is room."""
        dram, disk = self.tiers[Tier.DRAM], self.tiers[Tier.DISK]
        self.make_room(disk, len(going), ahead=ahead)
        places = [disk.admit(page.name, page.uses, page.depth) for page in going]
        kept_places = tuple(place for place in places if place is not None)
        for page in going[len(kept_places) :]:
            dram.unlock(page.name)
        self.moves.begin(Tier.DRAM, Tier.DISK, going[: len(kept_places)], kept_places)

    def _spills(self, name: PageHash, uses: int) -> bool:
        if not self.takes(Tier.DISK) or name in self.moves.refused:
            return False
        return name not in self.tiers[Tier.DISK].kept and admits(Tier.DISK, uses)

    def spilt(self, name: PageHash, *, good: bool) -> None:
        """It lies on disk (`good`): it may leave DRAM, unless somebody reads it meanwhile."""
        dram = self.tiers[Tier.DRAM]
        dram.unlock(name)
        if good and not dram.kept[name].readers:
            dram.evict(name)


# Pages of HBM on their way down: copied to the tiers below, and into the pool, before they make room.
#
# HBM is copied ahead of need: once little of it is free or copied already, the least recently used pages go down
# until much is, a few at a time, so that steps in between are hardly held up. What makes room before its turn
# came is copied at that moment, in program order, as far as the budget of pages under way goes; the rest is lost
# to the tiers and would have to be computed again.

LOW, HIGH = 0.25, 0.5  # of HBM's pages that are free, or lie below as well: from when on pages go down, and until when
MOST_DEMOTED = 64  # so, with those that have to go at once
PARKED_PAGES = 1024  # so, with those of sequences that had to yield, or whose worker leaves
PARKED_USES = 4  # that it is worth to a page that its sequence is to come back for it
LOOKED_AT = 256  # pages, the least recently used ones, among which those are sought that are to go down


class DemotionPolicy:
    """Of one worker. `tiers` are its own below HBM, the upper one first."""

    def __init__(
        self,
        shared: SharedPages,
        tiers: dict[Tier, TierPool],
        out: EffectBuffer,
        usable: Callable[[Tier, float], bool],
    ) -> None:
        """usable: whether a tier takes pages at a time."""
        self.tiers, self._usable = tiers, usable
        self.moves = Moves(out)
        self.eviction = EvictionPolicy(tiers, self.moves, self._takes)
        self._pooled: OrderedDict[PageHash, None] = OrderedDict()
        self._seen: OrderedDict[PageHash, None] = OrderedDict()  # went down once: who comes again was used twice
        self._now_s = 0.0
        self.follow(shared)

    @property
    def under_way(self) -> dict[Attempt, PageMove]:
        return self.moves.under_way

    def follow(self, shared: SharedPages) -> None:
        """Another HBM, which holds nothing yet. What left the last one is on its way still."""
        self.shared, self._going_down = shared, False
        self.eviction.hbm = shared.cache
        shared.leaving, shared.parking = self.make_way, self.park

    # ------------------------------------------------------------ from HBM

    def make_way(self, nodes: list[CachedPage]) -> None:
        """These pages make room now."""
        self._go_down(nodes, MOST_DEMOTED)

    def park(self, names: Sequence[PageHash], pages: Sequence[int]) -> None:
        """The full pages of a sequence that is to go on later, here or on another worker: copied now, and kept longer
        than what nobody is known to ask for again."""
        found = zip(names, pages, strict=False)
        parked = [EvictionCandidate(name, page, PARKED_USES, depth) for depth, (name, page) in enumerate(found)]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            for name in names:
                self.tiers[upper].used(name, PARKED_USES)
            self._keep(upper, parked, PARKED_PAGES)
        if self._takes(Tier.POOL):
            self._pool(parked, PARKED_PAGES)

    def run_demotions(self, now_s: float) -> None:
        """Copies ahead of need what the watermarks say."""
        self._now_s = now_s
        self._tend_hbm()
        self.eviction.tend()

    def _tend_hbm(self) -> None:
        pool, cache = self.shared.pool, self.shared.cache
        if not cache.evictable_pages or max(map(self.moves.pages_to, Tier)) >= AHEAD_PAGES:
            return
        oldest = cache.oldest(LOOKED_AT)
        dirty = self._dirty(oldest)
        share = (pool.free_pages + len(oldest) - len(dirty)) / pool.num_pages
        self._going_down = share < (HIGH if self._going_down else LOW)
        if self._going_down and dirty:
            self._go_down(dirty[:AHEAD_PAGES], AHEAD_PAGES, ahead=True)

    def _dirty(self, nodes: Sequence[CachedPage]) -> list[CachedPage]:
        """Those for which something is left to be done. Asked with every event: what holds for all is asked once."""
        tier, upper = next(iter(self.tiers.items()), (Tier.POOL, None))
        kept = upper.kept if upper is not None and self._takes(tier) else None
        disk = self.tiers[Tier.DISK].kept if Tier.DISK in self.tiers else {}
        pooled = self._pooled if self._takes(Tier.POOL) else None
        refused, any_use = self.moves.refused, tier is not Tier.DISK
        return [
            node
            for node in nodes
            if node.name not in refused
            and (
                (
                    kept is not None
                    and node.name not in kept
                    and node.name not in disk
                    and (any_use or admits(tier, self._uses(node)))
                )
                or (pooled is not None and node.name not in pooled)
            )
        ]

    def _uses(self, node: CachedPage) -> int:
        return node.uses + (node.name in self._seen)

    def _takes(self, tier: Tier) -> bool:
        there = self.shared.config.shared_pool if tier is Tier.POOL else tier in self.tiers
        return there and self._usable(tier, self._now_s)

    def _go_down(self, nodes: Sequence[CachedPage], most: int, *, ahead: bool = False) -> None:
        pages = [EvictionCandidate(node.name, node.page, self._uses(node), node.depth) for node in nodes]
        remember(self._seen, [node.name for node in nodes])
        for node in nodes:
            for tier in self.tiers.values():
                tier.used(node.name, max(0, node.uses - 1))
            node.uses = 0  # they are counted there
        pages = [page for page in pages if page.name not in self.moves.refused]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            self._keep(upper, pages, most, ahead=ahead)
        if self._takes(Tier.POOL):
            self._pool(pages, most)

    def _keep(self, tier: Tier, pages: Sequence[EvictionCandidate], most: int, *, ahead: bool = False) -> None:
        """Copies those that `tier` lacks and admits, as far as there is room."""
        pool = self.tiers[tier]
        new = [page for page in pages if page.name not in pool.kept and admits(tier, page.uses)]
        new = new[: max(0, most - self.moves.pages_to(tier))]
        self.eviction.make_room(pool, len(new), ahead=ahead)
        new = new[: pool.free_pages]
        places = [pool.admit(page.name, page.uses, page.depth) for page in new]
        self.moves.begin(Tier.HBM, tier, new, tuple(place for place in places if place is not None))

    def _pool(self, pages: Sequence[EvictionCandidate], most: int) -> None:
        new = [page for page in pages if page.name not in self._pooled][: max(0, most - self.moves.pages_to(Tier.POOL))]
        remember(self._pooled, [page.name for page in new])
        self.moves.begin(Tier.HBM, Tier.POOL, new, ())

    # ------------------------------------------------------------ what came of it

    def moved(self, event: PagesMoved) -> None:
        """A move ended."""
        move = event.move
        del self.moves.under_way[move.owner]
        names = unpacked(move.names)
        for name, good in zip(names, event.good, strict=True):
            if move.destination is not Tier.POOL:
                self.tiers[move.destination].written(name, good=good)
            elif not good:
                self._pooled.pop(name, None)
            if not good and not event.failed:
                remember(self.moves.refused, (name,))
            if move.source is Tier.DRAM:
                self.eviction.spilt(name, good=good)


TOLD_EACH_S = 1.0  # at most, of prices


class Tiers:
    """Of one worker; without any (`config.has_tiers`) nothing here ever happens."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer) -> None:
        self.config, self.shared, self.out, self.prices = config, shared, out, Prices()
        sizes = {Tier.DRAM: config.dram_pages, Tier.DISK: config.disk_pages}
        self.pools = {tier: TierPool(size) for tier, size in sizes.items() if size and config.has_tiers}
        self.steps = StepTimer() if config.has_tiers else None
        self.fetches = Fetches(shared, self.pools, out, self.prices, shared_pool=config.shared_pool)
        self.demotions = DemotionPolicy(shared, self.pools, out, self.prices.usable) if config.keeps_below else None
        self._told_s = -math.inf  # when the router was told of prices
        self.lending = PeerPageServer(shared, self.pools, out)
        self.changes = tuple(CacheChangeLog(pool, tier) for tier, pool in self.pools.items())

    @property
    def busy(self) -> bool:
        """Somebody waits for pages. Those on their way down, or that nobody waits for, hold nothing of HBM."""
        return bool(self.fetches.under_way)

    def follow(self, config: WorkerConfig, shared: SharedPages) -> Tiers:
        """The worker's role was changed: it holds nothing in HBM. What lies below stays, and what is on its way down
        gets there; what was on its way up and is late goes nowhere."""
        assert _kind_of(config) == _kind_of(self.config), f"tiers of {self.config} cannot be those of {config}"
        assert not self.busy, "who waits for pages is not idle"
        self.config, self.shared, self.fetches.shared, self.lending.shared = config, shared, shared, shared
        if config.has_tiers:
            self.steps = StepTimer()
            self.prices.forget(COMPUTED)
        if self.demotions is not None:
            self.demotions.follow(shared)
        return self

    def fetch(
        self, waiter: Attempt, names: Sequence[PageHash], room: int, now_s: float, holders: Sequence[Holder] = ()
    ) -> bool:
        """As `Fetches.begin`."""
        lenders = holders if self.config.peer_fetch else ()
        return self.config.has_tiers and self.fetches.begin(waiter, names, room, now_s, lenders)

    def hear(self, message: FetchPages | NoPages, sender: WorkerId, now_s: float, *, lends: bool) -> list[Attempt]:
        """Another worker asks, or has nothing; returns who need not wait any longer. Where it `lends` nothing now, what
        is asked for is not there."""
        if isinstance(message, NoPages):
            return self.fetches.refused(message, sender, now_s)
        if lends:
            self.lending.asked(message, sender)
        else:
            self.out.send(sender, NoPages(message.attempt))
        return []

    def moved(self, event: PagesMoved, now_s: float) -> list[Attempt]:
        """A move ended; returns who need not wait any longer."""
        if event.move.destination is Tier.HBM:
            return self.fetches.moved(event, now_s)
        if event.move.destination is Tier.PEER:
            self.lending.moved(event)
            return []
        assert self.demotions is not None, "only who has tiers moves pages"
        self.demotions.moved(event)
        if event.failed:
            self.prices.failed(event.move.destination, now_s)
        else:
            self.prices.answered(event.move.destination)
        return []

    def found(self, event: PagesFound) -> None:
        self.pools[Tier.DISK].restore(event.pages, unpacked(event.names))

    def run_demotions(self, now_s: float) -> None:
        if self.demotions is not None:
            self.demotions.run_demotions(now_s)
        if self.prices.fresh and self.shared.changes.followed and now_s >= self._told_s + TOLD_EACH_S:
            self._told_s = now_s
            self.out.tell_router(self.prices.known(now_s))

    # ------------------------------------------------------------ what computing costs

    def step_dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        if self.steps is not None:
            self.steps.dispatched(step_id, tokens, now_s)

    def step_done(self, step_id: int, now_s: float) -> None:
        if self.steps is not None:
            tokens, took_s = self.steps.done(step_id, now_s)
            self.prices.learn(COMPUTED, tokens / self.config.page_size, took_s, now_s)

    def step_failed(self, step_id: int) -> None:
        if self.steps is not None:
            self.steps.failed(step_id)

    def check_invariants(self) -> None:
        for pool in self.pools.values():
            pool.check_invariants()


def _kind_of(config: WorkerConfig) -> object:
    """What pages below HBM depend on."""
    sizes = config.page_size, config.dram_pages, config.disk_pages
    return config.has_tiers and (*sizes, config.shared_pool, config.peer_fetch, config.tier_wire)
