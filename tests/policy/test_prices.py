"""What sources cost as they were measured: a line through it, forgotten in time, and sources that fail left alone."""

import pytest

from jdisagg.core.tiers import Tier
from jdisagg.policy.prices import COMPUTED, LONGEST_PAUSE_S, Prices
from jdisagg.policy.router.estimates import FORGET_S, LinearFit
from jdisagg.policy.step_times import StepTimes


def measured(fetched: float, computed: float, tier: Tier = Tier.DRAM) -> Prices:
    """Seconds a page."""
    prices = Prices()
    for pages in (1, 4, 9, 16):
        prices.learn(tier, pages, fetched * pages, now_s=1.0)
        prices.learn(COMPUTED, pages, computed * pages, now_s=1.0)
    return prices


def test_a_line_finds_what_a_move_and_what_a_page_costs():
    line = LinearFit()
    for pages in (1, 8, 3, 64, 16) * 3:
        line.learn(pages, 0.002 + 0.0005 * pages, now_s=1.0)
    assert line.fit() == pytest.approx((0.002, 0.0005))
    assert line.at(10, now_s=2.0) == pytest.approx(0.007)


def test_sizes_that_are_all_alike_cost_by_the_page():
    line = LinearFit()
    for _ in range(5):
        line.learn(4, 0.008, now_s=0.0)
    assert line.fit() == (0.0, pytest.approx(0.002)) and line.at(8, now_s=0.0) == pytest.approx(0.016)


def test_a_line_never_falls_and_nothing_costs_less_than_nothing():
    line = LinearFit()
    for pages, seconds in ((1, 0.010), (10, 0.004), (20, 0.001)) * 4:
        line.learn(pages, seconds, now_s=0.0)
    first, last = line.at(1, 0.0), line.at(500, 0.0)
    assert first is not None and last is not None and 0 < first <= last


def test_what_took_no_time_or_no_page_teaches_nothing():
    line = LinearFit()
    line.learn(0, 1.0, now_s=0.0)
    line.learn(4, 0.0, now_s=0.0)
    assert line.at(4, now_s=0.0) is None


def test_a_machine_that_slowed_down_is_believed_soon():
    line = LinearFit()
    for each in (0.001, 0.01):
        for _ in range(30):
            line.learn(8, 8 * each, now_s=0.0)
    assert line.at(8, 0.0) == pytest.approx(0.08, rel=0.1)


def test_a_measurement_is_forgotten_after_a_while_so_that_the_source_is_tried_again():
    prices = measured(fetched=0.5, computed=0.001)
    assert not prices.pays(Tier.DRAM, 8, now_s=2.0)
    assert prices.pays(Tier.DRAM, 8, now_s=2.0 + FORGET_S)


@pytest.mark.parametrize(("fetched", "pays"), [(0.001, True), (0.02, False)])
def test_fetching_pays_where_it_is_quicker_than_computing(fetched, pays):
    assert measured(fetched, computed=0.01).pays(Tier.DRAM, 8, now_s=2.0) is pays


def test_a_source_nobody_has_measured_is_tried():
    assert Prices().pays(Tier.POOL, 1, now_s=0.0)


def test_a_pool_that_seldom_has_what_is_asked_is_worth_less():
    prices = measured(0.005, computed=0.01, tier=Tier.POOL)
    assert prices.pays(Tier.POOL, 8, now_s=2.0)
    for _ in range(30):
        prices.asked_pool(10, 1)
    assert not prices.pays(Tier.POOL, 8, now_s=2.0)
    for _ in range(30):
        prices.asked_pool(10, 10)
    assert prices.pays(Tier.POOL, 8, now_s=2.0)


def test_a_source_that_fails_is_left_alone_for_longer_and_longer():
    prices, now_s, pauses = Prices(), 0.0, []
    for _ in range(9):
        prices.failed(Tier.POOL, now_s)
        assert not prices.usable(Tier.POOL, now_s) and prices.usable(Tier.DRAM, now_s)
        pauses.append(prices.backoffs[Tier.POOL].until_s - now_s)
        now_s = prices.backoffs[Tier.POOL].until_s
        assert prices.usable(Tier.POOL, now_s)
    assert pauses == sorted(pauses) and pauses[:3] == [1.0, 2.0, 4.0] and pauses[-1] == LONGEST_PAUSE_S


def test_an_answer_ends_the_trouble():
    prices = Prices()
    for _ in range(4):
        prices.failed(Tier.DISK, 0.0)
    prices.answered(Tier.DISK)
    assert prices.usable(Tier.DISK, 0.0)
    prices.failed(Tier.DISK, 0.0)
    assert prices.backoffs[Tier.DISK].pause_s == 1.0


def test_steps_in_a_row_take_the_time_since_the_one_before():
    times = StepTimes()
    times.dispatched(1, 10, now_s=0.0)
    times.dispatched(2, 20, now_s=0.1)
    times.dispatched(3, 30, now_s=9.0)
    assert times.done(1, now_s=1.0) == (10, 1.0)
    assert times.done(2, now_s=3.0) == (20, 2.0), "it waited for the first until 1.0"
    assert times.done(3, now_s=9.5) == (30, 0.5)


def test_a_step_that_failed_is_not_waited_for():
    times = StepTimes()
    times.dispatched(1, 10, now_s=0.0)
    times.failed(1)
    with pytest.raises(KeyError):
        times.done(1, now_s=1.0)
