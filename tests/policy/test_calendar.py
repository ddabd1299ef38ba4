"""The calendar: what is least free, as if every moment were looked at."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.policy.calendar import Stay, fits, least_free

NOW_S = 10.0
times = st.integers(0, 40).map(float)


@st.composite
def stays(draw: st.DrawFn) -> Stay:
    first, here = draw(st.integers(0, 20)), draw(st.booleans())
    comes_s, last = draw(times), first + draw(st.integers(0, 20))
    leaves_s = draw(st.sampled_from([math.inf, max(NOW_S, comes_s) + draw(st.integers(1, 20))]))
    return Stay(comes_s, leaves_s, float(first), float(last), here)


def held(stay: Stay, at_s: float) -> float:
    """More than now, that it holds at a moment; at that of its leaving nothing."""
    comes_s = max(NOW_S, stay.comes_s)
    had = stay.first if stay.here else 0.0
    if at_s < comes_s:
        return 0.0
    if stay.leaves_s == math.inf:
        return stay.last - had
    if at_s >= stay.leaves_s:
        return -had
    grown = (stay.last - stay.first) * (at_s - comes_s) / (stay.leaves_s - comes_s)
    return stay.first + grown - had


@given(st.lists(stays(), max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_the_least_that_is_free_is_that_of_the_worst_moment(all_stays: list[Stay], ahead_s: int, long_s: int):
    from_s, until_s = NOW_S + ahead_s, NOW_S + ahead_s + long_s
    found = least_free(50.0, all_stays, NOW_S, from_s, until_s)
    ends = [max(NOW_S, each.leaves_s) for each in all_stays if each.leaves_s < math.inf]
    moments = {from_s, until_s, *(max(NOW_S, each.comes_s) for each in all_stays), *ends, *(end - 1e-6 for end in ends)}
    looked_at = [50.0 - sum(held(each, at_s) for each in all_stays) for at_s in moments if from_s <= at_s <= until_s]
    assert found == pytest.approx(min(looked_at), abs=1e-3)


@given(st.lists(stays(), max_size=5), stays(), st.integers(0, 60))
def test_who_fits_where_there_is_less_fits_where_there_is_more(others: list[Stay], new: Stay, free: int):
    new = new._replace(here=False)
    if fits(float(free), others, new, NOW_S):
        assert fits(free + 1.0, others, new, NOW_S)
        assert fits(float(free), others[1:], new, NOW_S) or others[0].here, "one less to come leaves no less room"


def test_a_place_is_promised_for_when_another_has_left():
    there = Stay(0.0, 20.0, 8.0, 8.0, here=True)
    new = Stay(21.0, 30.0, 8.0, 8.0)
    assert fits(0.0, [there], new, NOW_S)
    assert not fits(0.0, [there], new._replace(comes_s=19.0), NOW_S), "it would come too soon"
    assert fits(0.0, [there], new._replace(comes_s=20.0), NOW_S), "one leaves as the other comes"


def test_what_will_grow_is_reckoned_with():
    there = Stay(0.0, 30.0, 4.0, 12.0, here=True)
    assert fits(8.0, [there], Stay(10.0, 15.0, 6.0, 6.0), NOW_S), "it is gone before the other has grown"
    assert not fits(8.0, [there], Stay(10.0, 25.0, 6.0, 6.0), NOW_S)


def test_where_nobody_is_known_to_leave_there_is_what_is_free_now():
    there = Stay(0.0, math.inf, 4.0, 6.0, here=True)
    assert fits(8.0, [there], Stay(10.0, math.inf, 6.0, 6.0), NOW_S)
    assert not fits(7.0, [there], Stay(10.0, math.inf, 6.0, 6.0), NOW_S), "two pages it may still grow by"
