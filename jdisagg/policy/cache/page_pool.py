"""The pages of a worker, tier by tier, as ids and counts: one transition table for HBM and all tiers below it.

A page is free; in flight, while it is written or sent; live, while sequences compute with it or read it; or cached,
kept for its content. In every tier `free + in_flight + live + cached = total` at all times. Only a page that is cached
and has no reader may be evicted.

`PagePool` counts the pages of HBM, `SharedPages` is that pool with a prefix cache over it, and `TierPool` is a tier
below HBM."""

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
    IN_FLIGHT = "in_flight"  # part of a transfer under way: another party may still write or read it
    LIVE = "live"  # HBM: a sequence computes with it; lower tiers: it has readers
    CACHED = "cached"  # kept for its content


class PageEvent(StrEnum):
    ALLOCATE = "allocate"  # a sequence takes it to compute
    ADMIT = "admit"  # a transfer into it begins
    COMPLETE = "complete"  # all KV of a reservation has arrived: the sequence computes with it
    WRITTEN = "written"  # the transfer into it ended, or its content is published while it is still being sent
    LOST = "lost"  # the transfer failed or was given up
    SHIP = "ship"  # it is being sent elsewhere
    PUBLISH = "publish"  # the sequence that wrote it lets others read it
    RELEASE = "release"  # the sequence is done with it
    LOCK = "lock"  # one more reader
    UNLOCK = "unlock"  # the last reader is done
    EVICT = "evict"


PAGE_TABLE: Mapping[tuple[PageState, PageEvent], PageState] = MappingProxyType(
    {
        (PageState.FREE, PageEvent.ALLOCATE): PageState.LIVE,
        (PageState.FREE, PageEvent.ADMIT): PageState.IN_FLIGHT,
        (PageState.IN_FLIGHT, PageEvent.COMPLETE): PageState.LIVE,
        (PageState.IN_FLIGHT, PageEvent.WRITTEN): PageState.CACHED,
        (PageState.IN_FLIGHT, PageEvent.LOST): PageState.FREE,
        (PageState.LIVE, PageEvent.SHIP): PageState.IN_FLIGHT,
        (PageState.LIVE, PageEvent.PUBLISH): PageState.CACHED,
        (PageState.LIVE, PageEvent.RELEASE): PageState.FREE,
        (PageState.CACHED, PageEvent.LOCK): PageState.LIVE,
        (PageState.LIVE, PageEvent.LOCK): PageState.LIVE,
        (PageState.LIVE, PageEvent.UNLOCK): PageState.CACHED,
        (PageState.CACHED, PageEvent.EVICT): PageState.FREE,
    }
)
PAGE_MOVES = frozenset((before, after) for (before, _), after in PAGE_TABLE.items())
UNOWNED = (None, PageState.FREE)


class PagePool:
    """The HBM pages 1 to `num_pages` and their owners; page 0 is the null page. The page freed last is taken first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: list[int] = []  # pages that were given back
        self._first_new = (
            1  # this page and those after it were never taken: a large pool that is never full costs nothing
        )
        self._owners: dict[int, tuple[Attempt, PageState]] = {}
        self._counts: Counter[PageState] = Counter({PageState.FREE: num_pages})

    @property
    def free_pages(self) -> int:
        return len(self._free) + self.num_pages + 1 - self._first_new

    def count(self, state: PageState) -> int:
        return self._counts[state]

    def take(self, count: int, owner: Attempt, state: PageState) -> tuple[int, ...] | None:
        """Takes `count` pages; returns None, and takes none, if fewer are free."""
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
        """Moves pages of the owner to another state."""
        assert state is not PageState.FREE, "pages become free by give_back"
        for before, count in self._states_of(pages, owner).items():
            self._count(before, state, count)
        self._owners.update(dict.fromkeys(pages, (owner, state)))

    def hand_over(self, pages: Sequence[int], owner: Attempt, to: Attempt, state: PageState) -> None:
        """Moves pages of the owner to another owner, in `state`."""
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
        """Returns the owners of any page, or of any in `state`."""
        return {owner for owner, held in self._owners.values() if state in (None, held)}

    def check_invariants(self) -> None:
        """Asserts that every page is in exactly one state, and that the counts sum to the total."""
        taken = Counter(state for _, state in self._owners.values())
        free = {*self._free, *range(self._first_new, self.num_pages + 1)}
        assert len(free) == self.free_pages, f"a page is free twice: {sorted(self._free)}"
        assert free | set(self._owners) == set(range(1, self.num_pages + 1)), "pages were lost or invented"
        assert not free & set(self._owners), "a page is free and owned"
        for state in PageState:
            counted = self.free_pages if state is PageState.FREE else taken[state]
            assert counted == self._counts[state], f"{state}: {counted} pages, {self._counts[state]} in the counts"
        assert sum(self._counts.values()) == self.num_pages, f"{dict(self._counts)} is not {self.num_pages} in all"

    def _states_of(self, pages: Sequence[int], owner: Attempt) -> Counter[PageState]:
        """Returns the number of these pages of the owner in each state."""
        found: Counter[PageState] = Counter()
        left = [self._owners.get(page, UNOWNED) for page in pages]
        while left:  # as a rule all are in one state
            (holder, state), count = left[0], left.count(left[0])
            assert holder == owner, f"one of the pages {pages} belongs to {holder}, not to {owner}"
            found[state] += count
            left = [each for each in left if each != (holder, state)] if count < len(left) else []
        return found

    def _count(self, before: PageState, after: PageState, count: int) -> None:
        assert before is after or (before, after) in PAGE_MOVES, f"{count} pages cannot become {after} from {before}"
        self._counts[before] -= count
        self._counts[after] += count


# HBM pages with a prefix cache. A page is taken by one sequence, which alone writes it. Once all their KV is computed,
# full pages are published under the hashes of their tokens: then no sequence writes them, every sequence may lock and
# read them, and they are evicted when pages run out. A page is kept only if all of its KV is known to be there and
# good.

KEEPER = Attempt(RequestId("kept for its content"), 0)  # the owner of the prefix cache's pages in the pool
NOTHING = LockedPages((), ())


class SharedPages:
    """The HBM pages of one worker. Without `config.prefix_caching` no page is ever cached or found."""

    def __init__(self, config: WorkerConfig, pool: PagePool) -> None:
        self.config, self.pool, self.cache = config, pool, PrefixCache()
        self.changes = CacheChangeLog(self.cache)
        self.on_evict: Callable[[list[CachedPage]], None] | None = None  # called with pages before they are evicted

    @property
    def available(self) -> int:
        """Number of pages that `take` can return: free ones, and cached ones without readers."""
        return self.pool.free_pages + self.cache.evictable_pages

    def by_use(self) -> dict[str, int]:
        """Returns the numbers of pages in each state, which sum to the pool. A cached page with readers is live."""
        free, in_flight = self.pool.free_pages, self.pool.count(PageState.IN_FLIGHT)
        cached = self.cache.evictable_pages
        live = max(0, self.pool.num_pages - free - in_flight - cached)
        return {"free": free, "in_flight": in_flight, "live": live, "cached": cached}

    def take(self, count: int, owner: Attempt, state: PageState) -> tuple[int, ...] | None:
        """Takes `count` pages, if need be by evicting the least recently used cached ones; returns None, and changes
        nothing, if fewer are available."""
        if count > self.available:
            return None
        lacking = max(0, count - self.pool.free_pages)
        if lacking:
            if self.on_evict is not None:
                self.on_evict(self.cache.oldest(lacking))
            self.pool.give_back(self.cache.evict(lacking), KEEPER)
        return self.pool.take(count, owner, state)

    # ------------------------------------------------------------ what is in them

    def names(self, request: Request) -> tuple[PageHash, ...]:
        """Returns the hashes of the full pages of the request's prompt."""
        if not self.config.prefix_caching:
            return ()
        return page_hashes(request.prompt, self.config.page_size, request.salt)

    def names_with(self, reserve: Reserve, tail: tuple[int, ...], output: Sequence[int] = ()) -> tuple[PageHash, ...]:
        """Returns the hashes of the full pages of a prompt and these output tokens; () if the reservation names no
        pages.

        `tail`: the last tokens of the prompt, behind the pages that the reservation names."""
        names, page_size = self._named(reserve), self.config.page_size
        if not self.config.prefix_caching or len(names) != reserve.prompt_tokens // page_size:
            return ()
        first = len(tail) - reserve.prompt_tokens % page_size
        return more_page_hashes(names, tail[first:] + tuple(output), page_size, reserve.cache_salt)

    def _named(self, reserve: Reserve) -> tuple[PageHash, ...]:
        return unpacked(reserve.page_names) if self.config.prefix_caching else ()

    def to_read(self, reserve: Reserve, *, here: bool) -> tuple[PageHash, ...]:
        """Returns the hashes of the prompt's pages that no sequence will write. If the prompt is computed `here`, the
        page of its last token is not among them."""
        names = self._named(reserve)
        return names[: readable_pages(reserve, self.config)] if here else names

    def room_for(self, names: Sequence[PageHash], total: int) -> tuple[int, int]:
        """Returns (number of leading pages that are cached, number of available pages that it costs to lock these and
        to take the rest of `total`)."""
        held, idle = self.cache.found(names)
        return held, total - held + idle

    def lock(self, names: Sequence[PageHash]) -> LockedPages:
        """Locks the leading pages that are cached until `release`, and counts the use."""
        if self.config.has_tiers:
            self.cache.count_use(names)
        return self.hold(names)

    def hold(self, names: Sequence[PageHash]) -> LockedPages:
        """Locks pages as `lock` does without counting a use."""
        return self.cache.lock(names) if self.cache.match(names[:1]) else NOTHING

    def release(self, handle: LockedPages) -> None:
        if handle.names:
            self.cache.release(handle)

    def publish(
        self, names: Sequence[PageHash], pages: Sequence[int], own: Collection[int], owner: Attempt
    ) -> tuple[LockedPages, tuple[int, ...]]:
        """Publishes the pages that `names` name; returns (a lock on all of them, the `own` pages that stay the
        owner's).

        No sequence writes published pages. A page whose content is cached already stays its owner's."""
        spare = set(self.cache.insert(names, pages[: len(names)]))
        shown = {page for page in pages[: len(names)] if page not in spare}.intersection(own)
        self.pool.hand_over(tuple(shown), owner, KEEPER, PageState.CACHED)
        return self.hold(names), tuple(page for page in own if page not in shown)

    def keep(self, names: Sequence[PageHash], pages: Sequence[int], own: Collection[int], owner: Attempt) -> None:
        """Releases the pages of a finished sequence: those that `names` name stay cached, its other own pages are
        freed."""
        handle, left = self.publish(names, pages, own, owner) if names else (NOTHING, own)
        self.pool.give_back(tuple(left), owner)
        self.release(handle)

    def check_invariants(self) -> None:
        """Asserts the page law, and that exactly the cache's pages are owned by it."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert self.pool.pages_of(KEEPER) == self.cache.pages(), "the pool and the cache disagree on what is kept"


# Tiers below HBM. Pages cost about the same to compute again; what differs is the chance of reuse. The price of a page
# is the number of its uses on top of the price of the last evicted page: a page that is not used again sinks below
# later ones (Cherkasova, Greedy-Dual-Size-Frequency, 1998). Of equal prices the deepest page goes first, because a page
# is of no use without those before it.

SLACK = 64  # places in the heap of victims that are no longer true, beside as many as pages


@dataclass(slots=True, eq=False)
class TierPage:
    """A page of a lower tier that is not free."""

    name: PageHash
    page: int
    uses: int
    depth: int  # pages before it
    state: PageState = PageState.FREE
    readers: int = 0
    is_corrupt: bool = False  # a reader found other bytes than were written: it is not read again
    price: float = 0.0


class TierPool:
    """The pages 0 to `num_pages` - 1 of a lower tier by the hashes of their content: ids and counts, never bytes.

    `note` is called with each page that becomes readable (True) and with each that is evicted (False)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.note: Callable[[PageHash, bool], None] = ignore_note
        self.kept: dict[PageHash, TierPage] = {}
        self._free: list[int] = []
        self._first_new = 0  # this page and those after it were never taken
        self._counts: Counter[PageState] = Counter({PageState.FREE: num_pages})
        self._worth = 0.0  # price of the last evicted page
        self._order: list[
            tuple[float, int, int, PageHash]
        ] = []  # a heap of pages that are, or were, cached at that price
        self._pushed = 0

    @property
    def free_pages(self) -> int:
        return self._counts[PageState.FREE]

    def by_use(self) -> dict[str, int]:
        """Returns the numbers of pages in each state, which sum to the tier."""
        return {state.value: self._counts[state] for state in PageState}

    def readable(self, name: PageHash) -> bool:
        kept = self.kept.get(name)
        return kept is not None and kept.state in (PageState.CACHED, PageState.LIVE) and not kept.is_corrupt

    def match(self, names: Sequence[PageHash]) -> int:
        """Returns the number of leading pages that are readable."""
        return next((index for index, name in enumerate(names) if not self.readable(name)), len(names))

    def names(self) -> tuple[PageHash, ...]:
        """Returns the hashes of all pages whose content was written."""
        return tuple(name for name, kept in self.kept.items() if kept.state is not PageState.IN_FLIGHT)

    # ------------------------------------------------------------ events

    def admit(self, name: PageHash, uses: int, depth: int) -> int | None:
        """Takes a page for this content, in flight; returns None if none is free."""
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
        self._apply(kept, PageEvent.ADMIT)
        return page

    def written(self, name: PageHash, *, good: bool) -> None:
        """Records that the content arrived (`good`) or was lost."""
        kept = self.kept[name]
        self._apply(kept, PageEvent.WRITTEN if good else PageEvent.LOST)
        if good:
            self._priced(kept)
            self.note(name, True)
        else:
            self._forget(kept)

    def lock(self, names: Sequence[PageHash]) -> tuple[int, ...]:
        """Locks these pages until `unlock` and returns their ids."""
        for name in names:
            kept = self.kept[name]
            assert not kept.is_corrupt, f"page {kept.page} is corrupt"
            self._apply(kept, PageEvent.LOCK)
            kept.readers += 1
        return tuple(self.kept[name].page for name in names)

    def unlock(self, name: PageHash, *, good: bool = True, used: bool = False) -> None:
        """Ends a read that found the page as it was written (`good`); `used`: by a prompt."""
        kept = self.kept[name]
        kept.readers -= 1
        kept.uses += used
        kept.is_corrupt = kept.is_corrupt or not good
        if kept.readers:
            return
        self._apply(kept, PageEvent.UNLOCK)
        if kept.is_corrupt:
            self.evict(name)
        else:
            self._priced(kept)

    def used(self, name: PageHash, times: int) -> None:
        """Counts uses of the same content in another tier."""
        kept = self.kept.get(name)
        if kept is not None and times:
            kept.uses += times
            if kept.state is PageState.CACHED:
                self._priced(kept)

    def evict(self, name: PageHash) -> None:
        kept = self.kept[name]
        self._apply(kept, PageEvent.EVICT)
        self._worth = max(self._worth, kept.price)
        self._forget(kept)
        self.note(name, False)

    def victims(self, stays: Callable[[TierPage], bool] | None = None) -> Iterator[TierPage]:
        """Yields cached pages by rising price up to the first that `stays`; the caller evicts or locks each before the
        next."""
        while self._order:
            price, _, _, name = self._order[0]
            kept = self.kept.get(name)
            if kept is None or kept.state is not PageState.CACHED or kept.price != price:
                heappop(self._order)  # outdated
            elif stays is not None and stays(kept):
                return
            else:
                heappop(self._order)
                yield kept

    def restore(self, pages: Sequence[int], names: Sequence[PageHash]) -> None:
        """Takes over the pages that an earlier process left on disk; the tier must be empty."""
        assert not self.kept and not self._first_new, "a tier is restored before it is used"
        for page, name in zip(pages, names, strict=True):
            self._admit_as(name, page, 1, 0)
            self.written(name, good=True)
        self._first_new = max(pages, default=-1) + 1
        self._free = sorted(set(range(self._first_new)).difference(pages), reverse=True)

    def _apply(self, kept: TierPage, event: PageEvent) -> None:
        then = PAGE_TABLE.get((kept.state, event))
        if then is None:
            raise IllegalTransition(f"page {kept.page} of a tier is {kept.state}, and cannot {event}")
        self._counts[kept.state] -= 1
        self._counts[then] += 1
        kept.state = then

    def _forget(self, kept: TierPage) -> None:
        del self.kept[kept.name]
        self._free.append(kept.page)

    def price_of(self, kept: TierPage) -> float:
        """Returns the price of the page from now on."""
        return self._worth + kept.uses

    def _priced(self, kept: TierPage) -> None:
        kept.price = self.price_of(kept)
        self._pushed += 1
        heappush(self._order, (kept.price, -kept.depth, self._pushed, kept.name))
        if len(self._order) > 2 * len(self.kept) + SLACK:
            true = {(each.price, name) for name, each in self.kept.items() if each.state is PageState.CACHED}
            self._order = list({(row[0], row[3]): row for row in self._order if (row[0], row[3]) in true}.values())
            heapify(self._order)

    def check_invariants(self) -> None:
        """Asserts the page law, and that every page is in exactly one state."""
        taken = Counter(kept.state for kept in self.kept.values())
        for use in (PageState.IN_FLIGHT, PageState.LIVE, PageState.CACHED):
            assert taken[use] == self._counts[use], f"{taken[use]} pages are {use}, {self._counts[use]} in the counts"
        assert sum(self._counts.values()) == self.num_pages, f"{self._counts} is not {self.num_pages} in all"
        pages = [kept.page for kept in self.kept.values()]
        assert len(set(pages)) == len(pages), "a page is kept twice"
        free = {*self._free, *range(self._first_new, self.num_pages)}
        assert free.isdisjoint(pages) and len(free) + len(pages) == self.num_pages, "pages were lost or invented"
        for kept in self.kept.values():
            assert (kept.readers > 0) == (kept.state is PageState.LIVE), (
                f"page {kept.page} is {kept.state}: {kept.readers} read"
            )
        queued = {(row[0], row[3]) for row in self._order}
        lost = [k.page for k in self.kept.values() if k.state is PageState.CACHED and (k.price, k.name) not in queued]
        assert not lost, f"pages {lost} would never be given up"
