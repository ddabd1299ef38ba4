"""Eviction from a worker's tiers below HBM: what is worth least goes from DRAM to disk, if that admits it, or is lost.

Who asks for room ahead of need gets none that a page would have to leave that HBM has as well and no other tier: that
page would be the next to go down, and in a tier too small for the watermarks the same pages would take each other's
places for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import NamedTuple

from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.tiers import MovePages, PageMove, Tier
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import PageHash, packed, unpacked
from jdisagg.policy.tier_pool import KeptPage, TierPool

LOW_DRAM, HIGH_DRAM = 0.1, 0.2  # of its pages that are free: from when on pages go to disk, and until when
AHEAD_PAGES = 16  # under way at once to one tier, of those that go ahead of need
DISK_USES = 2  # what disk admits was used so often
REMEMBERED = 1 << 16  # names of pages that went down, or into the pool, of late


class Leaving(NamedTuple):
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

    def __init__(self, out: Outbox) -> None:
        self.out = out
        self.under_way: dict[Attempt, PageMove] = {}
        self.refused: OrderedDict[PageHash, None] = OrderedDict()  # were not taken, and are not offered again
        self._owners = count(1)

    def begin(self, source: Tier, destination: Tier, pages: Sequence[Leaving], places: tuple[int, ...]) -> None:
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


class TierEviction:
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
        going = list[Leaving]()
        most = AHEAD_PAGES - self.moves.pages_to(Tier.DISK) if pool is self.tiers.get(Tier.DRAM) else 0

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
        return name in self.hbm and not elsewhere

    def _spill(self, going: Sequence[Leaving], *, ahead: bool) -> None:
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
