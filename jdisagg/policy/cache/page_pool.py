"""Who holds which page of one tier: ids and counts, never arrays. free + held + in_flight + cached = total, always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.messages import Reserve
from jdisagg.core.request import Attempt, Request, RequestId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.prefix_cache import (
    CacheChangeLog,
    CachedPage,
    LockedPages,
    PageHash,
    PrefixCache,
    ignore_note,
    more_page_hashes,
    page_hashes,
    unpacked,
)
from jdisagg.policy.request_size import readable_pages


class PageState(StrEnum):
    FREE = "free"
    HELD = "held"  # a sequence computes with it here
    IN_FLIGHT = "in_flight"  # part of a handoff under way: the other end may still write or read it
    CACHED = "cached"  # kept for a prefix to come back


NOBODYS = (None, PageState.FREE)


class PagePool:
    """Pages 1 to `num_pages`; page 0 is the null page and belongs to nobody. The page freed last is taken first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: list[int] = []  # pages that were given back
        self._first_new = 1  # it and those after it were never taken: a large pool that is never full costs nothing
        self._owners: dict[int, tuple[Attempt, PageState]] = {}
        self._counts: Counter[PageState] = Counter({PageState.FREE: num_pages})

    @property
    def free_pages(self) -> int:
        return len(self._free) + self.num_pages + 1 - self._first_new

    def count(self, state: PageState) -> int:
        return self._counts[state]

    def take(self, count: int, owner: Attempt, state: PageState) -> tuple[int, ...] | None:
        """`count` pages, or None where fewer are free: then nothing is taken."""
        assert count >= 0 and state is not PageState.FREE, f"{owner} cannot take {count} pages as {state}"
        if count > self.free_pages:
            return None
        again = min(count, len(self._free))
        first, self._first_new = self._first_new, self._first_new + count - again
        pages = (*self._free[: -again - 1 : -1], *range(first, self._first_new))
        del self._free[len(self._free) - again :]
        self._owners.update(dict.fromkeys(pages, (owner, state)))
        self._count(PageState.FREE, state, count)
        return pages

    def move(self, pages: Sequence[int], owner: Attempt, state: PageState) -> None:
        """Books the owner's pages under another state."""
        assert state is not PageState.FREE, "pages become free by give_back"
        for before, count in self._states_of(pages, owner).items():
            self._count(before, state, count)
        self._owners.update(dict.fromkeys(pages, (owner, state)))

    def hand_over(self, pages: Sequence[int], owner: Attempt, to: Attempt, state: PageState) -> None:
        """The owner's pages become another's, under `state`."""
        self.move(pages, owner, state)
        self._owners.update(dict.fromkeys(pages, (to, state)))

    def give_back(self, pages: Sequence[int], owner: Attempt) -> None:
        for before, count in self._states_of(pages, owner).items():
            self._count(before, PageState.FREE, count)
        for page in pages:
            del self._owners[page]
        self._free.extend(pages)

    def pages_of(self, owner: Attempt) -> set[int]:
        return {page for page, (holder, _) in self._owners.items() if holder == owner}

    def owners(self, state: PageState | None = None) -> set[Attempt]:
        """Those who have any page, or any in `state`."""
        return {owner for owner, held in self._owners.values() if state in (None, held)}

    def check_invariants(self) -> None:
        """Asserts that every page is in exactly one ledger, and that the ledgers sum to the whole."""
        taken = Counter(state for _, state in self._owners.values())
        free = {*self._free, *range(self._first_new, self.num_pages + 1)}
        assert len(free) == self.free_pages, f"a page is free twice: {sorted(self._free)}"
        assert free | set(self._owners) == set(range(1, self.num_pages + 1)), "pages were lost or invented"
        assert not free & set(self._owners), "a page is free and owned"
        for state in PageState:
            counted = self.free_pages if state is PageState.FREE else taken[state]
            assert counted == self._counts[state], f"{state}: {counted} pages, {self._counts[state]} in the ledger"
        assert sum(self._counts.values()) == self.num_pages, f"{dict(self._counts)} is not {self.num_pages} in all"

    def _states_of(self, pages: Sequence[int], owner: Attempt) -> Counter[PageState]:
        """How many of the owner's pages are in each state."""
        found: Counter[PageState] = Counter()
        left = [self._owners.get(page, NOBODYS) for page in pages]
        while left:  # as a rule all are in one state
            (holder, state), count = left[0], left.count(left[0])
            assert holder == owner, f"one of the pages {pages} belongs to {holder}, not to {owner}"
            found[state] += count
            left = [each for each in left if each != (holder, state)] if count < len(left) else []
        return found

    def _count(self, before: PageState, after: PageState, count: int) -> None:
        self._counts[before] -= count
        self._counts[after] += count


# One worker's pages, and what it remembers is in them: a pool, and a prefix cache over the pages that it keeps.
#
# A page is taken by one sequence, which alone writes it. Once all their KV is computed, full pages are published
# under the names of their tokens: nobody's to write, anybody's to read who locks them, and free again as soon as
# somebody needs the room. A page is kept only where all of its KV is known to be there and good. What other
# workers hold, and whether reading is worth it, is not decided here.

KEEPER = Attempt(RequestId("kept for its content"), 0)  # in whose name the pool books pages of the prefix cache
NOTHING = LockedPages((), ())


def stays_nowhere(nodes: list[CachedPage]) -> None:
    """Where there is no tier below."""


def parked_nowhere(names: Sequence[PageHash], pages: Sequence[int]) -> None:
    """So."""


class SharedPages:
    """The pages of one tier of one worker. Without `config.prefix_caching` nothing is ever kept or found."""

    def __init__(self, config: WorkerConfig, pool: PagePool) -> None:
        self.config, self.pool, self.cache = config, pool, PrefixCache()
        self.changes = CacheChangeLog(self.cache)
        self.leaving: Callable[[list[CachedPage]], None] = stays_nowhere  # hears of pages that are about to make room
        # Hears of the names and pages of sequences that are to go on later.
        self.parking: Callable[[Sequence[PageHash], Sequence[int]], None] = parked_nowhere

    @property
    def available(self) -> int:
        """Pages that `take` could give: free ones, and kept ones that nobody reads."""
        return self.pool.free_pages + self.cache.evictable_pages

    def by_use(self) -> dict[str, int]:
        """Pages that are free, in flight, live (somebody computes with them or reads them), cached (nobody does now);
        they sum to the pool."""
        free, in_flight = self.pool.free_pages, self.pool.count(PageState.IN_FLIGHT)
        cached = self.cache.evictable_pages
        live = max(0, self.pool.num_pages - free - in_flight - cached)
        return {"free": free, "in_flight": in_flight, "live": live, "cached": cached}

    def take(self, count: int, owner: Attempt, state: PageState) -> tuple[int, ...] | None:
        """`count` pages, for which the least recently used kept ones make room; None, and nothing changed, where
        fewer are available."""
        if count > self.available:
            return None
        lacking = max(0, count - self.pool.free_pages)
        if lacking:
            self.leaving(self.cache.oldest(lacking))
            self.pool.give_back(self.cache.evict(lacking), KEEPER)
        return self.pool.take(count, owner, state)

    # ------------------------------------------------------------ what is in them

    def names(self, request: Request) -> tuple[PageHash, ...]:
        """Of the full pages of the request's prompt."""
        if not self.config.prefix_caching:
            return ()
        return page_hashes(request.prompt, self.config.page_size, request.salt)

    def names_with(self, reserve: Reserve, tail: tuple[int, ...], output: Sequence[int] = ()) -> tuple[PageHash, ...]:
        """Of the full pages of a prompt, as its reservation names them, with these output tokens behind it; `tail`
        ends the prompt. None where the reservation names none."""
        names, page_size = self._named(reserve), self.config.page_size
        if not self.config.prefix_caching or len(names) != reserve.prompt_tokens // page_size:
            return ()
        first = len(tail) - reserve.prompt_tokens % page_size
        return more_page_hashes(names, tail[first:] + tuple(output), page_size, reserve.cache_salt)

    def _named(self, reserve: Reserve) -> tuple[PageHash, ...]:
        return unpacked(reserve.page_names) if self.config.prefix_caching else ()

    def to_read(self, reserve: Reserve, *, here: bool) -> tuple[PageHash, ...]:
        """Names of pages of its prompt that nobody will write: where the prompt is computed `here`, its last token is
        in none of them."""
        names = self._named(reserve)
        return names[: readable_pages(reserve, self.config)] if here else names

    def room_for(self, names: Sequence[PageHash], total: int) -> tuple[int, int]:
        """(leading pages that are held, pages out of `available` that it costs to lock them and to take the rest of
        `total`)."""
        held, idle = self.cache.found(names)
        return held, total - held + idle

    def lock(self, names: Sequence[PageHash]) -> LockedPages:
        """The leading pages that are held, which stay as they are until `release`."""
        if self.config.has_tiers:
            self.cache.count_use(names)
        return self.hold(names)

    def hold(self, names: Sequence[PageHash]) -> LockedPages:
        """As `lock`, of what nobody asked for: it counts as no use."""
        return self.cache.lock(names) if self.cache.match(names[:1]) else NOTHING

    def release(self, handle: LockedPages) -> None:
        if handle.names:
            self.cache.release(handle)

    def publish(
        self, names: Sequence[PageHash], pages: Sequence[int], own: Collection[int], owner: Attempt
    ) -> tuple[LockedPages, tuple[int, ...]]:
        """Lets others read the pages that `names` name, from now on written by nobody: (a lock on all of them, what of
        the owner's `own` pages stays its own). A page whose content the cache has already stays its owner's."""
        spare = set(self.cache.insert(names, pages[: len(names)]))
        shown = {page for page in pages[: len(names)] if page not in spare}.intersection(own)
        self.pool.hand_over(tuple(shown), owner, KEEPER, PageState.CACHED)
        return self.hold(names), tuple(page for page in own if page not in shown)

    def keep(self, names: Sequence[PageHash], pages: Sequence[int], own: Collection[int], owner: Attempt) -> None:
        """A sequence is done with its pages: those that `names` name are kept, the rest of its own are free."""
        handle, left = self.publish(names, pages, own, owner) if names else (NOTHING, own)
        self.pool.give_back(tuple(left), owner)
        self.release(handle)

    def check_invariants(self) -> None:
        """Asserts the law of the pool, and that just the cache's pages are booked as kept."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert self.pool.pages_of(KEEPER) == self.cache.pages(), "the pool and the cache disagree on what is kept"


# The pages of one tier below HBM, as a literal transition table, and which of them go first when room is needed.
#
# A page is free; in flight, while it is written; cached; or live with n readers, who copy it elsewhere. Only what
# is cached or live may be read, and only what is cached may be given up. free + in_flight + live + cached =
# total, always.
#
# Pages cost about alike to compute again; what differs is the chance that somebody asks. So the price of a page
# is how often it was used, on top of what the last page that was given up was worth: what is not used again sinks
# below what comes later (Cherkasova, Greedy-Dual-Size-Frequency, 1998). Of equal prices the deepest goes first: a
# page is of no use without those before it.


class TierPageState(StrEnum):
    FREE = "free"
    IN_FLIGHT = "in_flight"
    LIVE = "live"
    CACHED = "cached"


class PageEvent(StrEnum):
    ADMIT = "admit"  # somebody begins to write it
    WRITTEN = "written"
    LOST = "lost"  # what was to be written did not come
    LOCK = "lock"  # one more reads it
    UNLOCK = "unlock"  # the last reader is done
    EVICT = "evict"


PAGE_TABLE: Mapping[tuple[TierPageState, PageEvent], TierPageState] = MappingProxyType(
    {
        (TierPageState.FREE, PageEvent.ADMIT): TierPageState.IN_FLIGHT,
        (TierPageState.IN_FLIGHT, PageEvent.WRITTEN): TierPageState.CACHED,
        (TierPageState.IN_FLIGHT, PageEvent.LOST): TierPageState.FREE,
        (TierPageState.CACHED, PageEvent.LOCK): TierPageState.LIVE,
        (TierPageState.LIVE, PageEvent.LOCK): TierPageState.LIVE,
        (TierPageState.LIVE, PageEvent.UNLOCK): TierPageState.CACHED,
        (TierPageState.CACHED, PageEvent.EVICT): TierPageState.FREE,
    }
)
SLACK = 64  # places in the heap of victims that are no longer true, beside as many as pages


@dataclass(slots=True, eq=False)
class TierPage:
    """A page that is not free."""

    name: PageHash
    page: int
    uses: int
    depth: int  # pages before it
    use: TierPageState = TierPageState.FREE
    readers: int = 0
    spoiled: bool = False  # a reader found that it is not what was written: nobody else is to read it
    price: float = 0.0


class TierPool:
    """Pages 0 to `num_pages` - 1 by the names of their content: ids and counts, never bytes. `note` hears of each that
    can be read (True), and of each that was given up."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.note: Callable[[PageHash, bool], None] = ignore_note
        self.kept: dict[PageHash, TierPage] = {}
        self._free: list[int] = []
        self._first_new = 0  # it and those after it were never taken
        self._counts: Counter[TierPageState] = Counter({TierPageState.FREE: num_pages})
        self._worth = 0.0  # of what was given up last
        self._order: list[tuple[float, int, int, PageHash]] = []  # a heap of what is, or was, cached at that price
        self._pushed = 0

    @property
    def free_pages(self) -> int:
        return self._counts[TierPageState.FREE]

    def by_use(self) -> dict[str, int]:
        """They sum to the tier."""
        return {use.value: self._counts[use] for use in TierPageState}

    def readable(self, name: PageHash) -> bool:
        kept = self.kept.get(name)
        return kept is not None and kept.use in (TierPageState.CACHED, TierPageState.LIVE) and not kept.spoiled

    def match(self, names: Sequence[PageHash]) -> int:
        """How many leading pages may be read."""
        return next((index for index, name in enumerate(names) if not self.readable(name)), len(names))

    def names(self) -> tuple[PageHash, ...]:
        """Of those that `note` has heard of, and that were not given up."""
        return tuple(name for name, kept in self.kept.items() if kept.use is not TierPageState.IN_FLIGHT)

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
        kept = self.kept[name] = TierPage(name, page, uses, depth)
        self._turn(kept, PageEvent.ADMIT)
        return page

    def written(self, name: PageHash, *, good: bool) -> None:
        """What was to come is there, or never will be."""
        kept = self.kept[name]
        self._turn(kept, PageEvent.WRITTEN if good else PageEvent.LOST)
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
            self._turn(kept, PageEvent.LOCK)
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
        self._turn(kept, PageEvent.UNLOCK)
        if kept.spoiled:
            self.evict(name)
        else:
            self._priced(kept)

    def used(self, name: PageHash, times: int) -> None:
        """It was used elsewhere."""
        kept = self.kept.get(name)
        if kept is not None and times:
            kept.uses += times
            if kept.use is TierPageState.CACHED:
                self._priced(kept)

    def evict(self, name: PageHash) -> None:
        kept = self.kept[name]
        self._turn(kept, PageEvent.EVICT)
        self._worth = max(self._worth, kept.price)
        self._forget(kept)
        self.note(name, False)

    def victims(self, stays: Callable[[TierPage], bool] | None = None) -> Iterator[TierPage]:
        """Cached pages, the least worth first, as far as the first that `stays`; each is to be evicted or locked before
        the next is asked for."""
        while self._order:
            price, _, _, name = self._order[0]
            kept = self.kept.get(name)
            if kept is None or kept.use is not TierPageState.CACHED or kept.price != price:
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

    def _turn(self, kept: TierPage, turn: PageEvent) -> None:
        then = PAGE_TABLE.get((kept.use, turn))
        if then is None:
            raise IllegalTransition(f"page {kept.page} of a tier is {kept.use}, and cannot {turn}")
        self._counts[kept.use] -= 1
        self._counts[then] += 1
        kept.use = then

    def _forget(self, kept: TierPage) -> None:
        del self.kept[kept.name]
        self._free.append(kept.page)

    def price_of(self, kept: TierPage) -> float:
        """What it is worth from now on."""
        return self._worth + kept.uses

    def _priced(self, kept: TierPage) -> None:
        kept.price = self.price_of(kept)
        self._pushed += 1
        heappush(self._order, (kept.price, -kept.depth, self._pushed, kept.name))
        if len(self._order) > 2 * len(self.kept) + SLACK:
            true = {(each.price, name) for name, each in self.kept.items() if each.use is TierPageState.CACHED}
            self._order = list({(row[0], row[3]): row for row in self._order if (row[0], row[3]) in true}.values())
            heapify(self._order)

    def check_invariants(self) -> None:
        """Asserts the law, and that every page is in one place."""
        taken = Counter(kept.use for kept in self.kept.values())
        for use in (TierPageState.IN_FLIGHT, TierPageState.LIVE, TierPageState.CACHED):
            assert taken[use] == self._counts[use], f"{taken[use]} pages are {use}, {self._counts[use]} in the ledger"
        assert sum(self._counts.values()) == self.num_pages, f"{self._counts} is not {self.num_pages} in all"
        pages = [kept.page for kept in self.kept.values()]
        assert len(set(pages)) == len(pages), "a page is kept twice"
        free = {*self._free, *range(self._first_new, self.num_pages)}
        assert free.isdisjoint(pages) and len(free) + len(pages) == self.num_pages, "pages were lost or invented"
        for kept in self.kept.values():
            assert (kept.readers > 0) == (kept.use is TierPageState.LIVE), (
                f"page {kept.page} is {kept.use}: {kept.readers} read"
            )
        queued = {(row[0], row[3]) for row in self._order}
        lost = [k.page for k in self.kept.values() if k.use is TierPageState.CACHED and (k.price, k.name) not in queued]
        assert not lost, f"pages {lost} would never be given up"
