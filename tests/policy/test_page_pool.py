import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jdisagg.core.request import Attempt, RequestId
from jdisagg.policy.page_pool import PagePool, PageState

A, B = Attempt(RequestId("a"), 1), Attempt(RequestId("b"), 2)
TAKEN = (PageState.HELD, PageState.IN_FLIGHT, PageState.CACHED)


def test_pages_are_numbered_from_one_and_the_null_page_is_nobodys():
    pool = PagePool(5)
    pages = pool.take(5, A, PageState.HELD)
    assert sorted(pages or ()) == [1, 2, 3, 4, 5]


def test_taking_more_than_is_free_takes_nothing():
    pool = PagePool(3)
    assert pool.take(4, A, PageState.HELD) is None
    assert pool.free_pages == 3
    pool.check_invariants()


def test_giving_back_twice_is_a_broken_invariant():
    pool = PagePool(3)
    pages = pool.take(2, A, PageState.HELD) or ()
    pool.give_back(pages, A)
    with pytest.raises(AssertionError, match="belongs to None"):
        pool.give_back(pages, A)


def test_giving_back_or_moving_what_is_anothers_is_a_broken_invariant():
    pool = PagePool(3)
    pages = pool.take(2, A, PageState.HELD) or ()
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

    @rule(epoch=st.integers(1, 4), state=st.sampled_from(TAKEN), data=st.data())
    def move(self, epoch: int, state: PageState, data: st.DataObject) -> None:
        owner = Attempt(RequestId("x"), epoch)
        pages = data.draw(st.sets(st.sampled_from(sorted(self.model[owner])))) if self.model.get(owner) else set()
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
        assert all(self.pool.count(state) == states.count(state) for state in TAKEN)
        assert self.pool.free_pages == 12 - len(states)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
