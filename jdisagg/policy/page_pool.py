"""Who holds which page of one tier: ids and counts, never arrays. free + held + in_flight + cached = total, always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from jdisagg.core.request import Attempt


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
