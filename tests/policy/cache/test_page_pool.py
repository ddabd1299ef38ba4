"""Tests of the page pools: HBM pages, the prefix cache over them, and the tiers below."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache.page_pool import (
    PAGE_MOVES,
    PAGE_TABLE,
    PageEvent,
    PagePool,
    PageState,
    SharedPages,
    TierPage,
    TierPool,
)
from jdisagg.policy.cache.prefix_cache import LockedPages
from jdisagg.policy.worker.worker import Worker
from tests.sim.cases import request, worker

A, B = Attempt(RequestId("a"), 1), Attempt(RequestId("b"), 2)
TAKEN = (PageState.LIVE, PageState.IN_FLIGHT)
OWNED = (*TAKEN, PageState.CACHED)


def test_pages_are_numbered_from_one_and_the_null_page_is_nobodys():
    pool = PagePool(5)
    pages = pool.take(5, A, PageState.LIVE)
    assert sorted(pages or ()) == [1, 2, 3, 4, 5]


def test_taking_more_than_is_free_takes_nothing():
    pool = PagePool(3)
    assert pool.take(4, A, PageState.LIVE) is None
    assert pool.free_pages == 3
    pool.check_invariants()


def test_giving_back_twice_is_a_broken_invariant():
    pool = PagePool(3)
    pages = pool.take(2, A, PageState.LIVE) or ()
    pool.give_back(pages, A)
    with pytest.raises(AssertionError, match="belongs to None"):
        pool.give_back(pages, A)


def test_giving_back_or_moving_what_is_anothers_is_a_broken_invariant():
    pool = PagePool(3)
    pages = pool.take(2, A, PageState.LIVE) or ()
    with pytest.raises(AssertionError, match="not to Attempt"):
        pool.give_back(pages, B)
    with pytest.raises(AssertionError, match="not to Attempt"):
        pool.move(pages, Attempt(RequestId("a"), 2), PageState.IN_FLIGHT)


def test_the_check_finds_a_page_that_went_missing():
    pool = PagePool(3)
    pool._first_new += 1
    with pytest.raises(AssertionError, match="lost or invented"):
        pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Random owners take, move and give back; a model of sets says what must be where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.model: dict[Attempt, dict[int, PageState]] = {}

    @rule(epoch=st.integers(1, 4), count=st.integers(0, 6), state=st.sampled_from(TAKEN))
    def take(self, epoch: int, count: int, state: PageState) -> None:
        owner, free = Attempt(RequestId("x"), epoch), 12 - sum(map(len, self.model.values()))
        pages = self.pool.take(count, owner, state)
        assert (pages is None) == (count > free)
        for page in pages or ():
            assert all(page not in held for held in self.model.values())
            self.model.setdefault(owner, {})[page] = state

    @rule(epoch=st.integers(1, 4), state=st.sampled_from(OWNED), data=st.data())
    def move(self, epoch: int, state: PageState, data: st.DataObject) -> None:
        owner = Attempt(RequestId("x"), epoch)
        pages = data.draw(st.sets(st.sampled_from(sorted(self.model[owner])))) if self.model.get(owner) else set()
        states = {self.model[owner][page] for page in pages}
        if any(before is not state and (before, state) not in PAGE_MOVES for before in states):
            if len(states) == 1:
                with pytest.raises(AssertionError, match="cannot become"):
                    self.pool.move(sorted(pages), owner, state)
            return
        self.pool.move(sorted(pages), owner, state)
        for page in pages:
            self.model[owner][page] = state

    @rule(epoch=st.integers(1, 4))
    def give_back(self, epoch: int) -> None:
        owner = Attempt(RequestId("x"), epoch)
        self.pool.give_back(list(self.model.pop(owner, {})), owner)

    @invariant()
    def every_page_is_in_one_ledger(self) -> None:
        self.pool.check_invariants()
        for owner, held in self.model.items():
            assert self.pool.pages_of(owner) == set(held)
        states = [state for held in self.model.values() for state in held.values()]
        assert all(self.pool.count(state) == states.count(state) for state in OWNED)
        assert self.pool.free_pages == 12 - len(states)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

# Random owners over one pool and its prefix cache: the law holds after each operation, and what is read stays.
#
# python -m tests.policy.cache.test_page_pool 1000000

PAGES, ALPHABET, LONGEST = 24, 2, 6  # texts of two letters, a letter a page: many begin alike


class Holder:
    """One sequence: the text that it writes, a letter a page, the pages it reads and those that are its own."""

    def __init__(self, owner: Attempt, text: tuple[int, ...], held: LockedPages, own: tuple[int, ...]) -> None:
        self.owner, self.text, self.held, self.own = owner, text, held, own
        self.pages = (*held.pages, *own)

    def names(self) -> tuple[int, ...]:
        """The whole beginning is the name: no two texts share one."""
        return tuple(int("1" + "".join(map(str, self.text[: end + 1]))) for end in range(len(self.text)))


class Hammer:
    """Takes, publishes, keeps and drops at random; `texts` says what is in each page, as a device would know it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shared: SharedPages = Worker(worker("w", Role.DECODE, num_pages=PAGES, prefix_caching=True)).shared
        self.holders: list[Holder] = []
        self.texts: dict[int, tuple[int, ...]] = {}
        self.epoch = 0

    def step(self) -> None:
        move = self.random.choice((self.begin, self.begin, self.publish, self.keep, self.drop))
        move()
        for each in self.holders:
            for place, page in enumerate(each.pages):
                assert self.texts[page] == each.text[: place + 1], f"page {page} of {each.owner} holds another's text"
        self.shared.check_invariants()
        counts = self.shared.pool
        assert sum(counts.count(state) for state in PageState) == PAGES

    def begin(self) -> None:
        text = tuple(self.random.randrange(ALPHABET) for _ in range(self.random.randint(1, LONGEST)))
        self.epoch += 1
        new = Holder(Attempt(RequestId("r"), self.epoch), text, LockedPages((), ()), ())
        found, cost = self.shared.room_for(new.names(), len(text))
        if cost > self.shared.available:
            return
        held = self.shared.lock(new.names()[:found])
        own = self.shared.take(len(text) - found, new.owner, PageState.LIVE)
        assert own is not None, "what room_for promises is there"
        new = Holder(new.owner, text, held, own)
        for place, page in enumerate(own, found):
            self.texts[page] = text[: place + 1]
        self.holders.append(new)

    def publish(self) -> None:
        if self.holders:
            each = self.random.choice(self.holders)
            before = each.held
            each.held, each.own = self.shared.publish(each.names(), each.pages, each.own, each.owner)
            self.shared.release(before)

    def keep(self) -> None:
        if self.holders:
            each = self.holders.pop(self.random.randrange(len(self.holders)))
            self.shared.keep(each.names(), each.pages, each.own, each.owner)
            self.shared.release(each.held)

    def drop(self) -> None:
        """It failed: nothing of its own is kept."""
        if self.holders:
            each = self.holders.pop(self.random.randrange(len(self.holders)))
            self.shared.keep((), each.pages, each.own, each.owner)
            self.shared.release(each.held)


@pytest.mark.parametrize("seed", range(4))
def test_no_page_that_is_read_is_written_or_lost_whatever_happens(seed):
    hammer = Hammer(seed)
    for _ in range(2_500):
        hammer.step()
    while hammer.holders:
        hammer.keep()
    assert hammer.shared.available == PAGES and hammer.shared.cache.pages()


def test_names_tell_salts_and_beginnings_apart_and_only_full_pages_have_one():
    shared = Worker(worker("w", Role.DECODE, prefix_caching=True)).shared
    each = request("a", 11)
    assert len(shared.names(each)) == 2
    other = type(each)(each.request_id, each.prompt, each.sampling, cache_salt="tenant")
    assert not set(shared.names(each)) & set(shared.names(other))
    assert Worker(worker("w", Role.DECODE)).shared.names(each) == ()


if __name__ == "__main__":
    at_once = Hammer(0)
    for _ in range(int(sys.argv[1])):
        at_once.step()
    print(f"{sys.argv[1]} operations, the law held after each")

# The pages of a tier below HBM: every turn of the table, what goes first, and the law under any order of events.


def pool_of(*names: int, pages: int = 8, uses: int = 1) -> TierPool:
    """These are cached."""
    pool = TierPool(pages)
    for depth, name in enumerate(names):
        assert pool.admit(name, uses, depth) is not None
        pool.written(name, good=True)
    pool.check_invariants()
    return pool


def given_up(pool: TierPool, count: int) -> list[int]:
    """The names that go first."""
    found = []
    for kept in itertools.islice(pool.victims(), count):
        found.append(kept.name)
        pool.evict(kept.name)
    pool.check_invariants()
    return found


# ------------------------------------------------------------------ the table


def test_only_what_nobody_reads_or_writes_is_ever_given_up():
    assert [use for use, turn in PAGE_TABLE if turn is PageEvent.EVICT] == [PageState.CACHED]
    assert {use for use, turn in PAGE_TABLE if turn is PageEvent.LOCK} == {PageState.CACHED, PageState.LIVE}


def test_every_page_comes_back_to_the_free_ones_from_wherever_it_is():
    reached = {PageState.FREE}
    for _ in PageState:
        reached |= {use for (use, _), then in PAGE_TABLE.items() if then in reached}
    assert reached == set(PageState)


@pytest.mark.parametrize("use", PageState)
@pytest.mark.parametrize("turn", PageEvent)
def test_a_turn_without_a_row_is_refused_and_changes_nothing(use, turn):
    pool, kept = TierPool(4), TierPage(1, 0, 1, 0, use)
    before = pool.by_use()
    if (use, turn) in PAGE_TABLE:
        pool._apply(kept, turn)
        assert kept.state is PAGE_TABLE[use, turn]
    else:
        with pytest.raises(IllegalTransition, match=f"is {use}, and cannot {turn}"):
            pool._apply(kept, turn)
        assert (kept.state, pool.by_use()) == (use, before)


# ------------------------------------------------------------------ what may be read


def test_a_page_is_read_only_when_it_is_wholly_written():
    pool = TierPool(2)
    pool.admit(7, 1, 0)
    assert not pool.readable(7) and pool.match((7,)) == 0
    pool.written(7, good=True)
    assert pool.readable(7) and pool.match((7, 8)) == 1


def test_a_page_that_was_not_written_is_free_again():
    pool = TierPool(1)
    pool.admit(7, 1, 0)
    pool.written(7, good=False)
    assert pool.free_pages == 1 and not pool.kept
    pool.check_invariants()


def test_a_full_tier_admits_nothing():
    pool = pool_of(1, 2, pages=2)
    assert pool.admit(3, 1, 0) is None
    given_up(pool, 1)
    assert pool.admit(3, 1, 0) is not None


def test_a_match_ends_at_the_first_page_that_is_missing():
    pool = pool_of(1, 2, 4)
    assert pool.match((1, 2, 3, 4)) == 2 and pool.match((3,)) == 0 and pool.match(()) == 0


def test_a_page_that_is_read_stays_until_its_last_reader_is_done():
    pool = pool_of(1, 2)
    assert pool.lock((1,)) == pool.lock((1,))
    assert given_up(pool, 9) == [2]
    pool.unlock(1)
    assert given_up(pool, 9) == []
    pool.unlock(1)
    assert given_up(pool, 9) == [1]


def test_a_page_that_came_back_broken_is_read_by_nobody_else_and_goes_with_its_last_reader():
    pool = pool_of(1)
    pool.lock((1,))
    pool.lock((1,))
    pool.unlock(1, good=False)
    assert not pool.readable(1) and pool.by_use()["live"] == 1
    pool.unlock(1, good=True)
    assert not pool.kept and pool.free_pages == 8
    pool.check_invariants()


# ------------------------------------------------------------------ what goes first


def test_of_equal_prices_the_deepest_goes_first():
    assert given_up(pool_of(1, 2, 3), 3) == [3, 2, 1]


def test_what_was_used_more_often_goes_later():
    pool = pool_of(1, 2, 3)
    pool.used(3, 2)
    assert given_up(pool, 3) == [2, 1, 3]


def test_a_read_for_somebodys_prompt_is_a_use_and_a_copy_is_none():
    pool = pool_of(1, 2)
    for name, used in ((1, False), (2, True)):
        pool.lock((name,))
        pool.unlock(name, used=used)
    assert given_up(pool, 2) == [1, 2]


def test_what_was_loved_once_sinks_below_what_comes_later():
    pool = pool_of(1, pages=4, uses=5)
    for name in range(100, 140):
        if pool.admit(name, 1, 0) is None:
            given_up(pool, 1)
            pool.admit(name, 1, 0)
        pool.written(name, good=True)
    assert 1 not in pool.kept, "it was used five times, forty pages ago"


def test_the_order_of_victims_does_not_grow_with_every_use():
    pool = pool_of(1, 2, 3)
    for _ in range(5000):
        pool.used(2, 1)
    assert len(pool._order) < 200
    assert given_up(pool, 3) == [3, 1, 2]


# ------------------------------------------------------------------ an earlier life


def test_what_an_earlier_life_has_left_is_there_and_the_rest_is_free():
    pool = TierPool(6)
    pool.restore((4, 1), (40, 10))
    pool.check_invariants()
    assert pool.lock((40, 10)) == (4, 1) and pool.free_pages == 4
    taken = {pool.admit(name, 1, 0) for name in range(4)}
    assert taken == {0, 2, 3, 5} and pool.admit(99, 1, 0) is None
    pool.check_invariants()


def test_a_tier_in_use_is_not_restored():
    pool = pool_of(1)
    with pytest.raises(AssertionError, match="before it is used"):
        pool.restore((0,), (2,))


# ------------------------------------------------------------------ any order of events


class AnyOrder(RuleBasedStateMachine):
    """Readers, writers and evictions as they come; a model of who reads what stands beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.writing, self.reading = TierPool(5), set[int](), list[int]()

    @rule(name=st.integers(0, 11), uses=st.integers(1, 3))
    def admit(self, name, uses):
        if name not in self.pool.kept and self.pool.admit(name, uses, name % 3) is not None:
            self.writing.add(name)

    @precondition(lambda self: self.writing)
    @rule(good=st.booleans(), data=st.data())
    def written(self, good, data):
        name = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(name)
        self.pool.written(name, good=good)
        assert self.pool.readable(name) == good

    @rule(name=st.integers(0, 11))
    def lock(self, name):
        if self.pool.readable(name):
            self.pool.lock((name,))
            self.reading.append(name)

    @precondition(lambda self: self.reading)
    @rule(good=st.booleans(), used=st.booleans(), data=st.data())
    def unlock(self, good, used, data):
        name = data.draw(st.sampled_from(self.reading))
        self.reading.remove(name)
        self.pool.unlock(name, good=good, used=used)

    @rule(count=st.integers(1, 3))
    def make_room(self, count):
        for name in given_up(self.pool, count):
            assert name not in self.reading and name not in self.writing

    @invariant()
    def the_law_holds(self):
        self.pool.check_invariants()
        use = self.pool.by_use()
        assert sum(use.values()) == 5 and use["in_flight"] == len(self.writing)
        assert use["live"] == len(set(self.reading))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
