"""One worker's pages, and what it remembers is in them: a pool, and a prefix cache over the pages that it keeps.

A page is taken by one sequence, which alone writes it. Once all their KV is computed, full pages are published under
the names of their tokens: nobody's to write, anybody's to read who locks them, and free again as soon as somebody
needs the room. A page is kept only where all of its KV is known to be there and good. What other workers hold, and
whether reading is worth it, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jdisagg.core.messages import Reserve
from jdisagg.core.request import Attempt, Request, RequestId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache_changes import CacheChanges
from jdisagg.policy.page_pool import PagePool, PageState
from jdisagg.policy.planning import readable_pages
from jdisagg.policy.prefix_cache import Handle, Node, PageHash, PrefixCache, more_page_hashes, page_hashes, unpacked

KEEPER = Attempt(RequestId("kept for its content"), 0)  # in whose name the pool books pages of the prefix cache
NOTHING = Handle((), ())


def stays_nowhere(nodes: list[Node]) -> None:
    """Where there is no tier below."""


def parked_nowhere(names: Sequence[PageHash], pages: Sequence[int]) -> None:
    """So."""


class SharedPages:
    """The pages of one tier of one worker. Without `config.prefix_caching` nothing is ever kept or found."""

    def __init__(self, config: WorkerConfig, pool: PagePool) -> None:
        self.config, self.pool, self.cache = config, pool, PrefixCache()
        self.changes = CacheChanges(self.cache)
        self.leaving: Callable[[list[Node]], None] = stays_nowhere  # hears of pages that are about to make room
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

    def lock(self, names: Sequence[PageHash]) -> Handle:
        """The leading pages that are held, which stay as they are until `release`."""
        if self.config.has_tiers:
            self.cache.count_use(names)
        return self.hold(names)

    def hold(self, names: Sequence[PageHash]) -> Handle:
        """As `lock`, of what nobody asked for: it counts as no use."""
        return self.cache.lock(names) if self.cache.match(names[:1]) else NOTHING

    def release(self, handle: Handle) -> None:
        if handle.names:
            self.cache.release(handle)

    def publish(
        self, names: Sequence[PageHash], pages: Sequence[int], own: Collection[int], owner: Attempt
    ) -> tuple[Handle, tuple[int, ...]]:
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
