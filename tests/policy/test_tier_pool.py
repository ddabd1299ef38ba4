"""The pages of a tier below HBM: every turn of the table, what goes first, and the law under any order of events."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.core.errors import IllegalTransition
from jdisagg.policy.tier_pool import TABLE, KeptPage, TierPool, Turn, Use


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
    assert [use for use, turn in TABLE if turn is Turn.EVICT] == [Use.CACHED]
    assert {use for use, turn in TABLE if turn is Turn.LOCK} == {Use.CACHED, Use.LIVE}


def test_every_page_comes_back_to_the_free_ones_from_wherever_it_is():
    reached = {Use.FREE}
    for _ in Use:
        reached |= {use for (use, _), then in TABLE.items() if then in reached}
    assert reached == set(Use)


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("turn", Turn)
def test_a_turn_without_a_row_is_refused_and_changes_nothing(use, turn):
    pool, kept = TierPool(4), KeptPage(1, 0, 1, 0, use)
    before = pool.by_use()
    if (use, turn) in TABLE:
        pool._turn(kept, turn)
        assert kept.use is TABLE[use, turn]
    else:
        with pytest.raises(IllegalTransition, match=f"is {use}, and cannot {turn}"):
            pool._turn(kept, turn)
        assert (kept.use, pool.by_use()) == (use, before)


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
