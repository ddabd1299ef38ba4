"""The prefix cache's ledger: equal prefixes are found, locked pages stay, leaves go first, no page is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jdisagg.policy.cache.prefix_cache import LockedPages, PrefixCache, page_hashes


def test_a_page_is_named_by_all_that_comes_before_it():
    one, other = page_hashes(range(12), 4), page_hashes([*range(4), 9, 5, 6, 7, *range(8, 12)], 4)
    assert one[0] == other[0] and one[1] != other[1]
    assert one[2] != other[2], "the third pages hold the same tokens behind different ones"


def test_a_page_that_is_not_full_has_no_name():
    assert len(page_hashes(range(11), 4)) == 2 and page_hashes(range(3), 4) == ()


def test_a_salt_keeps_equal_prompts_apart():
    assert not set(page_hashes(range(12), 4, salt="a")) & set(page_hashes(range(12), 4, salt="b"))


def test_the_longest_held_prefix_is_found():
    cache = PrefixCache()
    cache.insert((1, 2, 3), (10, 20, 30))
    assert cache.match((1, 2, 9)) == 2 and cache.match((9, 1, 2)) == 0
    assert cache.lock((1, 2, 9)).pages == (10, 20)


def test_a_path_that_is_inserted_twice_gives_the_second_pages_back():
    cache = PrefixCache()
    cache.insert((1, 2), (10, 20))
    assert cache.insert((1, 2, 3), (11, 20, 30)) == (11,)
    assert len(cache) == 3


def test_leaves_go_first_though_the_root_was_used_longest_ago():
    cache = PrefixCache()
    cache.insert((1, 2, 3), (10, 20, 30))
    assert cache.evict(2) == (30, 20)


def test_the_least_recently_used_branch_goes_first():
    cache = PrefixCache()
    cache.insert((1, 2), (10, 20))
    cache.insert((1, 3), (10, 30))
    cache.touch((1, 2))
    assert cache.evict(1) == (30,)


def test_a_locked_page_is_never_evicted_nor_what_it_stands_on():
    cache = PrefixCache()
    cache.insert((1, 2, 3), (10, 20, 30))
    handle = cache.lock((1, 2))
    assert cache.evict(9) == (30,)
    cache.release(handle)
    assert cache.evict(9) == (20, 10)


def test_a_handle_is_released_once():
    cache = PrefixCache()
    cache.insert((1,), (10,))
    handle = cache.lock((1,))
    cache.release(handle)
    with pytest.raises(AssertionError, match="released once"):
        cache.release(handle)


class CacheMachine(RuleBasedStateMachine):
    """Paths over two names a level, pages drawn from a counter, against a plain model: a set of paths."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.next_page, self.ours = PrefixCache(), 0, set()

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def insert(self, path: list[int]) -> None:
        names = tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))
        pages = tuple(range(self.next_page, self.next_page + len(path)))
        self.next_page += len(path)
        spare = self.cache.insert(names, pages)
        self.ours |= set(pages) - set(spare)
        assert self.cache.match(names) == len(names)

    @rule(target=handles, path=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def lock(self, path: list[int]) -> LockedPages:
        return self.cache.lock(tuple(hash(tuple(path[: end + 1])) for end in range(len(path))))

    @rule(handle=consumes(handles))
    def release(self, handle: LockedPages) -> None:
        assert self.cache.lock(handle.names).pages == handle.pages, "what was locked is still there"
        self.cache.release(handle)
        self.cache.release(handle)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        most = self.cache.evictable_pages
        dropped = self.cache.evict(count)
        assert len(dropped) == min(count, most) and set(dropped) <= self.ours
        self.ours -= set(dropped)

    @invariant()
    def whole(self) -> None:
        self.cache.check_invariants()
        assert len(self.cache) == len(self.ours)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
