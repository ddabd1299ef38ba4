"""Pages on their way down: copied from HBM before they make room, from DRAM to disk, and into the pool.

HBM is copied ahead of need: once little of it is free or copied already, the least recently used pages go down until
much is, a few at a time, so that steps in between are hardly held up. What makes room before its turn came is copied at
that moment, in program order, as far as the budget of pages under way goes; the rest is lost to the tiers and would
have to be computed again. Disk takes only what was used twice.

What goes ahead of need takes no place of a page that HBM has as well and no other tier: that one would be the next to
go down, and in a tier too small for the watermarks the same pages would take each other's places for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.tiers import MovePages, PageMove, PagesMoved, Tier
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import Node, PageHash, packed, unpacked
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.tier_pool import KeptPage, TierPool

LOW, HIGH = 0.25, 0.5  # of HBM's pages that are free, or lie below as well: from when on pages go down, and until when
LOW_DRAM, HIGH_DRAM = 0.1, 0.2  # so, of DRAM's, for the disk
AHEAD_PAGES = 16  # under way at once to one tier, of those that go ahead of need
MOST_PAGES = 64  # so, with those that have to go at once
PARKED_PAGES = 1024  # so, with those of sequences that had to yield, or whose worker leaves
PARKED_USES = 4  # that it is worth to a page that its sequence is to come back for it
LOOKED_AT = 256  # pages, the least recently used ones, among which those are sought that are to go down
DISK_USES = 2  # what disk admits was used so often
REMEMBERED = 1 << 16  # names of pages that went down, or into the pool, of late


class Leaving(NamedTuple):
    """A page of HBM that is to go down."""

    name: PageHash
    page: int
    uses: int
    depth: int


class Demotions:
    """Of one worker. `tiers` are its own below HBM, the upper one first."""

    def __init__(
        self,
        shared: SharedPages,
        tiers: dict[Tier, TierPool],
        out: Outbox,
        usable: Callable[[Tier, float], bool],
    ) -> None:
        """usable: whether a tier takes pages at a time."""
        shared.parking = self.park
        self.shared, self.tiers, self.out, self._usable = shared, tiers, out, usable
        self.under_way: dict[Attempt, PageMove] = {}
        self._owners = count(1)
        self._pooled: OrderedDict[PageHash, None] = OrderedDict()
        self._seen: OrderedDict[PageHash, None] = OrderedDict()  # went down once: who comes again was used twice
        self._refused: OrderedDict[PageHash, None] = OrderedDict()  # were not taken, and are not offered again
        self._going_down = self._spilling = False
        self._now_s = 0.0
        shared.leaving = self.make_way

    def follow(self, shared: SharedPages) -> None:
        """Another HBM, which holds nothing yet. What left the last one is on its way still."""
        self.shared, self._going_down = shared, False
        shared.leaving, shared.parking = self.make_way, self.park

    # ------------------------------------------------------------ from HBM

    def make_way(self, nodes: list[Node]) -> None:
        """These pages make room now."""
        self._go_down(nodes, MOST_PAGES)

    def park(self, names: Sequence[PageHash], pages: Sequence[int]) -> None:
        """The full pages of a sequence that is to go on later, here or on another worker: copied now, and kept longer
        than what nobody is known to ask for again."""
        found = zip(names, pages, strict=False)
        parked = [Leaving(name, page, PARKED_USES, depth) for depth, (name, page) in enumerate(found)]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            for name in names:
                self.tiers[upper].used(name, PARKED_USES)
            self._keep(upper, parked, PARKED_PAGES)
        if self._takes(Tier.POOL):
            self._pool(parked, PARKED_PAGES)

    def tend(self, now_s: float) -> None:
        """Copies ahead of need what the watermarks say."""
        self._now_s = now_s
        self._tend_hbm()
        self._tend_dram()

    def _tend_hbm(self) -> None:
        pool, cache = self.shared.pool, self.shared.cache
        if not cache.evictable_pages or max(map(self._pages_to, Tier)) >= AHEAD_PAGES:
            return
        oldest = cache.oldest(LOOKED_AT)
        dirty = self._dirty(oldest)
        share = (pool.free_pages + len(oldest) - len(dirty)) / pool.num_pages
        self._going_down = share < (HIGH if self._going_down else LOW)
        if self._going_down and dirty:
            self._go_down(dirty[:AHEAD_PAGES], AHEAD_PAGES, ahead=True)

    def _pages_to(self, tier: Tier) -> int:
        """That are under way there."""
        return sum(len(unpacked(move.names)) for move in self.under_way.values() if move.destination is tier)

    def _dirty(self, nodes: Sequence[Node]) -> list[Node]:
        """Those for which something is left to be done. Asked with every event: what holds for all is asked once."""
        tier, upper = next(iter(self.tiers.items()), (Tier.POOL, None))
        kept = upper.kept if upper is not None and self._takes(tier) else None
        disk = self.tiers[Tier.DISK].kept if Tier.DISK in self.tiers else {}
        pooled = self._pooled if self._takes(Tier.POOL) else None
        refused, any_use = self._refused, tier is not Tier.DISK
        return [
            node
            for node in nodes
            if node.name not in refused
            and (
                (
                    kept is not None
                    and node.name not in kept
                    and node.name not in disk
                    and (any_use or self._admits(tier, self._uses(node)))
                )
                or (pooled is not None and node.name not in pooled)
            )
        ]

    def _uses(self, node: Node) -> int:
        return node.uses + (node.name in self._seen)

    def _takes(self, tier: Tier) -> bool:
        there = self.shared.config.shared_pool if tier is Tier.POOL else tier in self.tiers
        return there and self._usable(tier, self._now_s)

    def _go_down(self, nodes: Sequence[Node], most: int, *, ahead: bool = False) -> None:
        pages = [Leaving(node.name, node.page, self._uses(node), node.depth) for node in nodes]
        remember(self._seen, [node.name for node in nodes])
        for node in nodes:
            for tier in self.tiers.values():
                tier.used(node.name, max(0, node.uses - 1))
            node.uses = 0  # they are counted there
        pages = [page for page in pages if page.name not in self._refused]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            self._keep(upper, pages, most, ahead=ahead)
        if self._takes(Tier.POOL):
            self._pool(pages, most)

    def _keep(self, tier: Tier, pages: Sequence[Leaving], most: int, *, ahead: bool = False) -> None:
        """Copies those that `tier` lacks and admits, as far as there is room."""
        pool = self.tiers[tier]
        new = [page for page in pages if page.name not in pool.kept and self._admits(tier, page.uses)]
        new = new[: max(0, most - self._pages_to(tier))]
        self._make_room(pool, len(new), ahead=ahead)
        new = new[: pool.free_pages]
        places = [pool.admit(page.name, page.uses, page.depth) for page in new]
        self._move(Tier.HBM, tier, new, tuple(place for place in places if place is not None))

    def _admits(self, tier: Tier, uses: int) -> bool:
        return tier is not Tier.DISK or uses >= DISK_USES

    def _pool(self, pages: Sequence[Leaving], most: int) -> None:
        new = [page for page in pages if page.name not in self._pooled][: max(0, most - self._pages_to(Tier.POOL))]
        remember(self._pooled, [page.name for page in new])
        self._move(Tier.HBM, Tier.POOL, new, ())

    def _move(self, source: Tier, destination: Tier, pages: Sequence[Leaving], places: tuple[int, ...]) -> None:
        if not pages:
            return
        owner = Attempt(RequestId("move"), next(self._owners))
        names = packed([page.name for page in pages])
        move = PageMove(owner, source, destination, names, tuple(page.page for page in pages), places)
        self.under_way[owner] = move
        self.out.put(MovePages(move))

    # ------------------------------------------------------------ from DRAM

    def _tend_dram(self) -> None:
        """Gives up what is worth least until enough is free; what disk admits goes there first, and room that it is
        about to leave is not made twice."""
        dram = self.tiers.get(Tier.DRAM)
        if dram is None:
            return
        share = dram.free_pages / dram.num_pages
        self._spilling = share < (HIGH_DRAM if self._spilling else LOW_DRAM)
        if self._spilling:
            wanted = min(AHEAD_PAGES, int(HIGH_DRAM * dram.num_pages) + 1)
            self._make_room(dram, wanted - self._pages_to(Tier.DISK), ahead=True)

    def _make_room(self, pool: TierPool, wanted: int, *, ahead: bool) -> None:
        """Until `wanted` pages of it are free, or on their way from DRAM to disk, or nothing more may go."""
        if pool.free_pages >= wanted:
            return
        going = list[Leaving]()
        most = AHEAD_PAGES - self._pages_to(Tier.DISK) if pool is self.tiers.get(Tier.DRAM) else 0

        def spills(kept: KeptPage) -> bool:
            return len(going) < most and self._spills(kept.name, kept.uses)

        def stays(kept: KeptPage) -> bool:
            return ahead and self._would_return(pool, kept.name) and not spills(kept)

        for kept in pool.victims(stays):
            if spills(kept):
                (page,) = pool.lock((kept.name,))
                going.append(Leaving(kept.name, page, kept.uses, kept.depth))
            else:
                pool.evict(kept.name)
            if pool.free_pages + len(going) >= wanted:
                break
        if going:
            self._spill(going, ahead=ahead)

    def _would_return(self, pool: TierPool, name: PageHash) -> bool:
        """HBM has it as well, and it would have to go down again if it left this tier."""
        elsewhere = any(name in tier.kept for tier in self.tiers.values() if tier is not pool)
        return name in self.shared.cache and not elsewhere

    def _spill(self, going: Sequence[Leaving], *, ahead: bool) -> None:
        """These, which are locked, from DRAM to disk, as far as there is room."""
        dram, disk = self.tiers[Tier.DRAM], self.tiers[Tier.DISK]
        self._make_room(disk, len(going), ahead=ahead)
        places = [disk.admit(page.name, page.uses, page.depth) for page in going]
        kept_places = tuple(place for place in places if place is not None)
        for page in going[len(kept_places) :]:
            dram.unlock(page.name)
        self._move(Tier.DRAM, Tier.DISK, going[: len(kept_places)], kept_places)

    def _spills(self, name: PageHash, uses: int) -> bool:
        if not self._takes(Tier.DISK) or name in self._refused:
            return False
        return name not in self.tiers[Tier.DISK].kept and self._admits(Tier.DISK, uses)

    # ------------------------------------------------------------ what came of it

    def moved(self, event: PagesMoved) -> None:
        """A move ended."""
        move = event.move
        del self.under_way[move.owner]
        names = unpacked(move.names)
        for name, good in zip(names, event.good, strict=True):
            if move.destination is not Tier.POOL:
                self.tiers[move.destination].written(name, good=good)
            elif not good:
                self._pooled.pop(name, None)
            if not good and not event.failed:
                remember(self._refused, (name,))
            if move.source is Tier.DRAM:
                self._spilt(name, good=good)

    def _spilt(self, name: PageHash, *, good: bool) -> None:
        """It lies on disk (`good`): it may leave DRAM, unless somebody reads it meanwhile."""
        dram = self.tiers[Tier.DRAM]
        dram.unlock(name)
        if good and not dram.kept[name].readers:
            dram.evict(name)


def remember(names: OrderedDict[PageHash, None], new: Sequence[PageHash]) -> None:
    """Adds the new ones, and forgets the oldest of too many."""
    names.update(dict.fromkeys(new))
    while len(names) > REMEMBERED:
        names.popitem(last=False)
