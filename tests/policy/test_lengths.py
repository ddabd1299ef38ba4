"""Lengths of answers: quantiles of the latest, by key."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.policy.lengths import ENOUGH, KEPT, MOST_KEYS, Lately, Lengths, key_of
from tests.sim.cases import request

KEY = ("", 100)


@given(st.lists(st.integers(1, 50), max_size=KEPT + 30), st.floats(0, 0.999), st.integers(0, 50))
def test_a_quantile_is_that_of_the_latest_longer_ones(lengths: list[int], share: float, over: int):
    lately = Lately()
    for length in lengths:
        lately.learn(length)
    longer = sorted(each for each in lengths[-KEPT:] if each > over)
    assert lately.quantile(share, over) == (longer[int(share * len(longer))] if longer else None)


def test_before_enough_is_known_an_answer_is_as_long_as_it_may_be():
    lengths = Lengths()
    for _ in range(ENOUGH - 1):
        lengths.learn(KEY, 5)
    assert lengths.quantile(KEY, 0.9) == 100
    lengths.learn(KEY, 5)
    assert lengths.quantile(KEY, 0.9) == 5


def test_a_key_that_is_new_is_held_to_be_like_all_others():
    lengths = Lengths()
    for length in range(1, 11):
        lengths.learn(KEY, length)
    assert lengths.quantile(("tenant", 64), 0.5) == 6
    for _ in range(ENOUGH):
        lengths.learn(("tenant", 64), 40)
    assert lengths.quantile(("tenant", 64), 0.5) == 40 and lengths.quantile(KEY, 0.5) < 40


def test_who_has_outgrown_all_others_gets_as_long_again_and_nobody_more_than_the_limit():
    lengths = Lengths()
    for _ in range(ENOUGH):
        lengths.learn(KEY, 10)
    assert lengths.quantile(KEY, 0.9, 9) == 10 and lengths.quantile(KEY, 0.9, 30) == 60
    assert lengths.quantile(KEY, 0.9, 80) == 100


def test_what_is_asked_with_one_limit_by_one_tenant_is_alike():
    plain = request("a", max_tokens=7)
    assert key_of(plain) == key_of(request("b", 20, max_tokens=7)) == ("", 7)
    assert key_of(replace(plain, cache_salt="t")) == ("t", 7)


def test_of_too_many_keys_the_one_that_learnt_longest_ago_is_forgotten():
    lengths = Lengths()
    for number in range(MOST_KEYS + 1):
        lengths.learn(("", number + 1), 3)
    assert len(lengths.by_key) == MOST_KEYS and ("", 1) not in lengths.by_key
