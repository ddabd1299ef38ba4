"""One worker's tiers below HBM: demotion of pages, eviction, and the measured cost of each source.

Pages of HBM are copied down ahead of need: once few of them are free or copied already, the least recently used ones
are copied until many are, a few at a time, so that steps in between are hardly delayed. A page that is evicted before
it was copied is copied at that moment, in program order, as long as the budget of pages under way allows; otherwise
it would have to be computed again.

Eviction moves the cheapest pages from DRAM to disk, if disk admits them, or drops them. When making room ahead of
need, no page is evicted that HBM has as well and no other tier: that page would be the next to be copied down, and in a
tier too small for the watermarks the same pages would replace each other for ever.
"""

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

LOW_DRAM, HIGH_DRAM = 0.1, 0.2  # free share of DRAM below which pages go to disk, and up to which
AHEAD_PAGES = 16  # most pages under way to one tier that are moved ahead of need
DISK_USES = 2  # uses from which on disk admits a page
REMEMBERED = 1 << 16  # hashes of pages recently copied down, or to the shared pool


class EvictionCandidate(NamedTuple):
    """A page that is to be moved to a lower tier."""

    name: PageHash
    page: int
    uses: int
    depth: int


def admits(tier: Tier, uses: int) -> bool:
    return tier is not Tier.DISK or uses >= DISK_USES


def remember(names: OrderedDict[PageHash, None], new: Sequence[PageHash]) -> None:
    """Adds new hashes, and drops the oldest ones beyond `REMEMBERED`."""
    names.update(dict.fromkeys(new))
    while len(names) > REMEMBERED:
        names.popitem(last=False)


class Moves:
    """The transfers of pages to lower tiers that are under way."""

    def __init__(self, out: EffectBuffer) -> None:
        self.out = out
        self.under_way: dict[Attempt, PageMove] = {}
        self.refused: OrderedDict[PageHash, None] = OrderedDict()  # pages that a store did not accept
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
        """Returns the number of pages under way to the tier."""
        return sum(len(unpacked(move.names)) for move in self.under_way.values() if move.destination is tier)


class EvictionPolicy:
    """Evicts pages of one worker's lower tiers. `takes`: True for a tier that accepts pages; `hbm`: the pages there."""

    def __init__(self, tiers: dict[Tier, TierPool], moves: Moves, takes: Callable[[Tier], bool]) -> None:
        self.tiers, self.moves, self.takes = tiers, moves, takes
        self.hbm: Container[PageHash] = ()
        self._spilling = False

    def tend(self) -> None:
        """Evicts the cheapest DRAM pages until enough are free. Pages that disk admits go there first, and pages on
        their way there count as freed."""
        dram = self.tiers.get(Tier.DRAM)
        if dram is None:
            return
        share = dram.free_pages / dram.num_pages
        self._spilling = share < (HIGH_DRAM if self._spilling else LOW_DRAM)
        if self._spilling:
            wanted = min(AHEAD_PAGES, int(HIGH_DRAM * dram.num_pages) + 1)
            self.make_room(dram, wanted - self.moves.pages_to(Tier.DISK), ahead=True)

    def make_room(self, pool: TierPool, wanted: int, *, ahead: bool) -> None:
        """Evicts until `wanted` pages are free or on their way from DRAM to disk, or no more can be evicted."""
        if pool.free_pages >= wanted:
            return
        leaving = list[EvictionCandidate]()
        most = AHEAD_PAGES - self.moves.pages_to(Tier.DISK) if pool is self.tiers.get(Tier.DRAM) else 0

        def spills(kept: TierPage) -> bool:
            return len(leaving) < most and self._spills(kept.name, kept.uses)

        def stays(kept: TierPage) -> bool:
            return ahead and self._would_return(pool, kept.name) and not spills(kept)

        for kept in pool.victims(stays):
            if spills(kept):
                (page,) = pool.lock((kept.name,))
                leaving.append(EvictionCandidate(kept.name, page, kept.uses, kept.depth))
            else:
                pool.evict(kept.name)
            if pool.free_pages + len(leaving) >= wanted:
                break
        if leaving:
            self._spill(leaving, ahead=ahead)

    def _would_return(self, pool: TierPool, name: PageHash) -> bool:
        """Returns True if HBM has the page and no other tier: evicted from here, it would be copied down again."""
        elsewhere = any(name in tier.kept for tier in self.tiers.values() if tier is not pool)
        return name in self.hbm and not elsewhere

    def _spill(self, going: Sequence[EvictionCandidate], *, ahead: bool) -> None:
        """Moves these locked pages from DRAM to disk, as far as there is room."""
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

    def on_spilled(self, name: PageHash, *, good: bool) -> None:
        """Ends a move to disk: if it succeeded, the DRAM page is evicted unless it has readers."""
        dram = self.tiers[Tier.DRAM]
        dram.unlock(name)
        if good and not dram.kept[name].readers:
            dram.evict(name)


LOW, HIGH = 0.25, 0.5  # share of HBM pages free or copied below which pages are copied down, and up to which
MOST_DEMOTED = 64  # most pages under way to one tier, with those that are evicted now
PARKED_PAGES = 1024  # most pages under way, with those of preempted sequences or of a worker that leaves
PARKED_USES = 4  # uses credited to a parked page, whose sequence will resume
LOOKED_AT = 256  # least recently used pages that are considered for copying down


class DemotionPolicy:
    """Copies HBM pages of one worker to its lower tiers. `tiers`: those below HBM, the upper one first."""

    def __init__(
        self,
        shared: SharedPages,
        tiers: dict[Tier, TierPool],
        out: EffectBuffer,
        usable: Callable[[Tier, float], bool],
    ) -> None:
        """usable: returns True if a tier accepts pages at a time in seconds."""
        self.tiers, self._usable = tiers, usable
        self.moves = Moves(out)
        self.eviction = EvictionPolicy(tiers, self.moves, self._takes)
        self._pooled: OrderedDict[PageHash, None] = OrderedDict()
        self._seen: OrderedDict[PageHash, None] = OrderedDict()  # copied down once; seen again, used twice
        self._now_s = 0.0
        self.follow(shared)

    @property
    def under_way(self) -> dict[Attempt, PageMove]:
        return self.moves.under_way

    def follow(self, shared: SharedPages) -> None:
        """Switches to a new, empty HBM pool. Transfers from the old one go on."""
        self.shared, self._going_down = shared, False
        self.eviction.hbm = shared.cache
        shared.on_evict = self.make_way

    # ------------------------------------------------------------ from HBM

    def make_way(self, nodes: list[CachedPage]) -> None:
        """Copies pages down that are evicted from HBM now."""
        self._go_down(nodes, MOST_DEMOTED)

    def park(self, names: Sequence[PageHash], pages: Sequence[int]) -> None:
        """Copies the full pages of a sequence that will resume, here or on another worker, and credits them with uses,
        so that they are kept longer than pages without a known reader."""
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
        """Copies pages ahead of need, as the watermarks demand."""
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
        """Returns the pages that are not copied yet. It runs with every event, so common conditions are tested once."""
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
            node.uses = 0  # they are counted in the tiers now
        pages = [page for page in pages if page.name not in self.moves.refused]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            self._keep(upper, pages, most, ahead=ahead)
        if self._takes(Tier.POOL):
            self._pool(pages, most)

    def _keep(self, tier: Tier, pages: Sequence[EvictionCandidate], most: int, *, ahead: bool = False) -> None:
        """Copies the pages that `tier` lacks and admits, as far as there is room."""
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

    # ------------------------------------------------------------ results

    def moved(self, event: PagesMoved) -> None:
        """Records the end of a transfer to a lower tier."""
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
                self.eviction.on_spilled(name, good=good)


SEND_PRICES_S = 1.0  # shortest time between two messages with prices


class Tiers:
    """All lower tiers of one worker; without `config.has_tiers` there are none."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer) -> None:
        self.config, self.shared, self.out, self.prices = config, shared, out, Prices()
        sizes = {Tier.DRAM: config.dram_pages, Tier.DISK: config.disk_pages}
        self.pools = {tier: TierPool(size) for tier, size in sizes.items() if size and config.has_tiers}
        self.steps = StepTimer() if config.has_tiers else None
        self.fetches = Fetches(shared, self.pools, out, self.prices, shared_pool=config.shared_pool)
        self.demotions = DemotionPolicy(shared, self.pools, out, self.prices.usable) if config.keeps_below else None
        self._prices_sent_s = -math.inf  # when prices were last sent to the router
        self.lending = PeerPageServer(shared, self.pools, out)
        self.changes = tuple(CacheChangeLog(pool, tier) for tier, pool in self.pools.items())

    @property
    def busy(self) -> bool:
        """True if a request waits for pages. Pages on their way down hold no HBM."""
        return bool(self.fetches.under_way)

    def follow(self, config: WorkerConfig, shared: SharedPages) -> Tiers:
        """Continues after a role change with a new, empty HBM. Pages of lower tiers stay, transfers to them go on, and
        late transfers to HBM are dropped."""
        assert _kind_of(config) == _kind_of(self.config), f"tiers of {self.config} cannot be those of {config}"
        assert not self.busy, "a worker with waiting requests is not idle"
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
        """Starts a fetch, as `Fetches.begin` does; returns False without tiers."""
        lenders = holders if self.config.peer_fetch else ()
        return self.config.has_tiers and self.fetches.begin(waiter, names, room, now_s, lenders)

    def hear(self, message: FetchPages | NoPages, sender: WorkerId, now_s: float, *, lends: bool) -> list[Attempt]:
        """Handles a request for pages or a refusal of another worker; returns the attempts that need not wait any
        longer.

        lends: False while the worker cannot read its pages, so that it refuses."""
        if isinstance(message, NoPages):
            return self.fetches.refused(message, sender, now_s)
        if lends:
            self.lending.asked(message, sender)
        else:
            self.out.send(sender, NoPages(message.attempt))
        return []

    def moved(self, event: PagesMoved, now_s: float) -> list[Attempt]:
        """Handles the end of a transfer; returns the attempts that need not wait any longer."""
        if event.move.destination is Tier.HBM:
            return self.fetches.moved(event, now_s)
        if event.move.destination is Tier.PEER:
            self.lending.moved(event)
            return []
        assert self.demotions is not None, "only a worker with tiers moves pages"
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
        if self.prices.fresh and self.shared.changes.followed and now_s >= self._prices_sent_s + SEND_PRICES_S:
            self._prices_sent_s = now_s
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
    """Returns the parts of the configuration that the pages of lower tiers depend on."""
    sizes = config.page_size, config.dram_pages, config.disk_pages
    return config.has_tiers and (*sizes, config.shared_pool, config.peer_fetch, config.tier_wire)
