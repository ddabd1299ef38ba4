"""The pages of one tier below HBM, as a literal transition table, and which of them go first when room is needed.

A page is free; in flight, while it is written; cached; or live with n readers, who copy it elsewhere. Only what is
cached or live may be read, and only what is cached may be given up. free + in_flight + live + cached = total, always.

Pages cost about alike to compute again; what differs is the chance that somebody asks. So the price of a page is how
often it was used, on top of what the last page that was given up was worth: what is not used again sinks below what
comes later (Cherkasova, Greedy-Dual-Size-Frequency, 1998). Of equal prices the deepest goes first: a page is of no use
without those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from jdisagg.core.errors import IllegalTransition
from jdisagg.policy.prefix_cache import PageHash, unheard


class Use(StrEnum):
    FREE = "free"
    IN_FLIGHT = "in_flight"
    LIVE = "live"
    CACHED = "cached"


class Turn(StrEnum):
    ADMIT = "admit"  # somebody begins to write it
    WRITTEN = "written"
    LOST = "lost"  # what was to be written did not come
    LOCK = "lock"  # one more reads it
    UNLOCK = "unlock"  # the last reader is done
    EVICT = "evict"


TABLE: Mapping[tuple[Use, Turn], Use] = MappingProxyType(
    {
        (Use.FREE, Turn.ADMIT): Use.IN_FLIGHT,
        (Use.IN_FLIGHT, Turn.WRITTEN): Use.CACHED,
        (Use.IN_FLIGHT, Turn.LOST): Use.FREE,
        (Use.CACHED, Turn.LOCK): Use.LIVE,
        (Use.LIVE, Turn.LOCK): Use.LIVE,
        (Use.LIVE, Turn.UNLOCK): Use.CACHED,
        (Use.CACHED, Turn.EVICT): Use.FREE,
    }
)
SLACK = 64  # places in the heap of victims that are no longer true, beside as many as pages


@dataclass(slots=True, eq=False)
class KeptPage:
    """A page that is not free."""

    name: PageHash
    page: int
    uses: int
    depth: int  # pages before it
    use: Use = Use.FREE
    readers: int = 0
    spoiled: bool = False  # a reader found that it is not what was written: nobody else is to read it
    price: float = 0.0


class TierPool:
    """Pages 0 to `num_pages` - 1 by the names of their content: ids and counts, never bytes. `note` hears of each that
    can be read (True), and of each that was given up."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.note: Callable[[PageHash, bool], None] = unheard
        self.kept: dict[PageHash, KeptPage] = {}
        self._free: list[int] = []
        self._first_new = 0  # it and those after it were never taken
        self._counts: Counter[Use] = Counter({Use.FREE: num_pages})
        self._worth = 0.0  # of what was given up last
        self._order: list[tuple[float, int, int, PageHash]] = []  # a heap of what is, or was, cached at that price
        self._pushed = 0

    @property
    def free_pages(self) -> int:
        return self._counts[Use.FREE]

    def by_use(self) -> dict[str, int]:
        """They sum to the tier."""
        return {use.value: self._counts[use] for use in Use}

    def readable(self, name: PageHash) -> bool:
        kept = self.kept.get(name)
        return kept is not None and kept.use in (Use.CACHED, Use.LIVE) and not kept.spoiled

    def match(self, names: Sequence[PageHash]) -> int:
        """How many leading pages may be read."""
        return next((index for index, name in enumerate(names) if not self.readable(name)), len(names))

    def names(self) -> tuple[PageHash, ...]:
        """Of those that `note` has heard of, and that were not given up."""
        return tuple(name for name, kept in self.kept.items() if kept.use is not Use.IN_FLIGHT)

    # ------------------------------------------------------------ turns

    def admit(self, name: PageHash, uses: int, depth: int) -> int | None:
        """A page for this content, in flight; None where none is free."""
        if not self.free_pages:
            return None
        assert name not in self.kept, f"a page of {name:x} is there already"
        if self._free:
            page = self._free.pop()
        else:
            page, self._first_new = self._first_new, self._first_new + 1
        return self._admit_as(name, page, uses, depth)

    def _admit_as(self, name: PageHash, page: int, uses: int, depth: int) -> int:
        kept = self.kept[name] = KeptPage(name, page, uses, depth)
        self._turn(kept, Turn.ADMIT)
        return page

    def written(self, name: PageHash, *, good: bool) -> None:
        """What was to come is there, or never will be."""
        kept = self.kept[name]
        self._turn(kept, Turn.WRITTEN if good else Turn.LOST)
        if good:
            self._priced(kept)
            self.note(name, True)
        else:
            self._forget(kept)

    def lock(self, names: Sequence[PageHash]) -> tuple[int, ...]:
        """Their pages, which stay as they are until `unlock`."""
        for name in names:
            kept = self.kept[name]
            assert not kept.spoiled, f"page {kept.page} is spoiled"
            self._turn(kept, Turn.LOCK)
            kept.readers += 1
        return tuple(self.kept[name].page for name in names)

    def unlock(self, name: PageHash, *, good: bool = True, used: bool = False) -> None:
        """A reader is done, who found the page as it was written (`good`); `used`: for somebody's prompt."""
        kept = self.kept[name]
        kept.readers -= 1
        kept.uses += used
        kept.spoiled = kept.spoiled or not good
        if kept.readers:
            return
        self._turn(kept, Turn.UNLOCK)
        if kept.spoiled:
            self.evict(name)
        else:
            self._priced(kept)

    def used(self, name: PageHash, times: int) -> None:
        """It was used elsewhere."""
        kept = self.kept.get(name)
        if kept is not None and times:
            kept.uses += times
            if kept.use is Use.CACHED:
                self._priced(kept)

    def evict(self, name: PageHash) -> None:
        kept = self.kept[name]
        self._turn(kept, Turn.EVICT)
        self._worth = max(self._worth, kept.price)
        self._forget(kept)
        self.note(name, False)

    def victims(self, stays: Callable[[KeptPage], bool] | None = None) -> Iterator[KeptPage]:
        """Cached pages, the least worth first, as far as the first that `stays`; each is to be evicted or locked before
        the next is asked for."""
        while self._order:
            price, _, _, name = self._order[0]
            kept = self.kept.get(name)
            if kept is None or kept.use is not Use.CACHED or kept.price != price:
                heappop(self._order)  # it is not so any more
            elif stays is not None and stays(kept):
                return
            else:
                heappop(self._order)
                yield kept

    def restore(self, pages: Sequence[int], names: Sequence[PageHash]) -> None:
        """Books what an earlier life has left; the tier is empty so far."""
        assert not self.kept and not self._first_new, "a tier is restored before it is used"
        for page, name in zip(pages, names, strict=True):
            self._admit_as(name, page, 1, 0)
            self.written(name, good=True)
        self._first_new = max(pages, default=-1) + 1
        self._free = sorted(set(range(self._first_new)).difference(pages), reverse=True)

    def _turn(self, kept: KeptPage, turn: Turn) -> None:
        then = TABLE.get((kept.use, turn))
        if then is None:
            raise IllegalTransition(f"page {kept.page} of a tier is {kept.use}, and cannot {turn}")
        self._counts[kept.use] -= 1
        self._counts[then] += 1
        kept.use = then

    def _forget(self, kept: KeptPage) -> None:
        del self.kept[kept.name]
        self._free.append(kept.page)

    def price_of(self, kept: KeptPage) -> float:
        """What it is worth from now on."""
        return self._worth + kept.uses

    def _priced(self, kept: KeptPage) -> None:
        kept.price = self.price_of(kept)
        self._pushed += 1
        heappush(self._order, (kept.price, -kept.depth, self._pushed, kept.name))
        if len(self._order) > 2 * len(self.kept) + SLACK:
            true = {(each.price, name) for name, each in self.kept.items() if each.use is Use.CACHED}
            self._order = list({(row[0], row[3]): row for row in self._order if (row[0], row[3]) in true}.values())
            heapify(self._order)

    def check_invariants(self) -> None:
        """Asserts the law, and that every page is in one place."""
        taken = Counter(kept.use for kept in self.kept.values())
        for use in (Use.IN_FLIGHT, Use.LIVE, Use.CACHED):
            assert taken[use] == self._counts[use], f"{taken[use]} pages are {use}, {self._counts[use]} in the ledger"
        assert sum(self._counts.values()) == self.num_pages, f"{self._counts} is not {self.num_pages} in all"
        pages = [kept.page for kept in self.kept.values()]
        assert len(set(pages)) == len(pages), "a page is kept twice"
        free = {*self._free, *range(self._first_new, self.num_pages)}
        assert free.isdisjoint(pages) and len(free) + len(pages) == self.num_pages, "pages were lost or invented"
        for kept in self.kept.values():
            assert (kept.readers > 0) == (kept.use is Use.LIVE), f"page {kept.page} is {kept.use}: {kept.readers} read"
        queued = {(row[0], row[3]) for row in self._order}
        lost = [k.page for k in self.kept.values() if k.use is Use.CACHED and (k.price, k.name) not in queued]
        assert not lost, f"pages {lost} would never be given up"
