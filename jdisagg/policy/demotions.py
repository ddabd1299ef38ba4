"""Pages of HBM on their way down: copied to the tiers below, and into the pool, before they make room.

HBM is copied ahead of need: once little of it is free or copied already, the least recently used pages go down until
much is, a few at a time, so that steps in between are hardly held up. What makes room before its turn came is copied at
that moment, in program order, as far as the budget of pages under way goes; the rest is lost to the tiers and would
have to be computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from jdisagg.core.request import Attempt
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import Node, PageHash, unpacked
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.tier_eviction import AHEAD_PAGES, Leaving, Moves, TierEviction, admits, remember
from jdisagg.policy.tier_pool import TierPool

LOW, HIGH = 0.25, 0.5  # of HBM's pages that are free, or lie below as well: from when on pages go down, and until when
MOST_PAGES = 64  # so, with those that have to go at once
PARKED_PAGES = 1024  # so, with those of sequences that had to yield, or whose worker leaves
PARKED_USES = 4  # that it is worth to a page that its sequence is to come back for it
LOOKED_AT = 256  # pages, the least recently used ones, among which those are sought that are to go down


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
        self.tiers, self._usable = tiers, usable
        self.moves = Moves(out)
        self.eviction = TierEviction(tiers, self.moves, self._takes)
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

    def _dirty(self, nodes: Sequence[Node]) -> list[Node]:
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
        pages = [page for page in pages if page.name not in self.moves.refused]
        upper = next(iter(self.tiers), Tier.POOL)
        if upper is not Tier.POOL and self._takes(upper):
            self._keep(upper, pages, most, ahead=ahead)
        if self._takes(Tier.POOL):
            self._pool(pages, most)

    def _keep(self, tier: Tier, pages: Sequence[Leaving], most: int, *, ahead: bool = False) -> None:
        """Copies those that `tier` lacks and admits, as far as there is room."""
        pool = self.tiers[tier]
        new = [page for page in pages if page.name not in pool.kept and admits(tier, page.uses)]
        new = new[: max(0, most - self.moves.pages_to(tier))]
        self.eviction.make_room(pool, len(new), ahead=ahead)
        new = new[: pool.free_pages]
        places = [pool.admit(page.name, page.uses, page.depth) for page in new]
        self.moves.begin(Tier.HBM, tier, new, tuple(place for place in places if place is not None))

    def _pool(self, pages: Sequence[Leaving], most: int) -> None:
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
