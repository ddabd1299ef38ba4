"""Pages on their way down and up, one worker's ledgers alone: what is moved when, and what comes of each answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from jdisagg.core.events import SetTimer
from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, PageMove, PagesFound, PagesMoved, Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.fetch import COMPUTED, LONGEST_PAUSE_S, SHORTEST_S, USUAL_S, Prices
from jdisagg.policy.cache.page_pool import PagePool, PageState, SharedPages
from jdisagg.policy.cache.prefix_cache import packed, unpacked
from jdisagg.policy.cache.tiers import AHEAD_PAGES, MOST_DEMOTED, Tiers
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.router.estimates import FORGET_S, LinearFit
from jdisagg.policy.worker.slots import StepTimer
from tests.sim.cases import worker

ME = Attempt(RequestId("me"), 1)


def config(**sizes: Any) -> WorkerConfig:
    return worker("both", Role.COLOCATED, **{"prefix_caching": True, "num_pages": 16, "dram_pages": 64, **sizes})


@dataclass
class Desk:
    """The ledgers of one worker; its moves lie here until they are answered."""

    config: WorkerConfig
    now_s: float = 0.0
    asked: list[PageMove] = field(default_factory=list)  # to HBM, not answered yet
    downs: list[PageMove] = field(default_factory=list)  # from HBM or DRAM, so
    done: list[Any] = field(default_factory=list)  # inserted or dropped
    timers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out, self.pool = EffectBuffer(), PagePool(self.config.num_pages)
        self.shared = SharedPages(self.config, self.pool)
        self.tiers = Tiers(self.config, self.shared, self.out)

    def settle(self) -> None:
        """Takes what the ledgers ask for, and holds them to their laws."""
        for effect in self.out.drain():
            match effect:
                case MovePages(move):
                    (self.asked if move.destination is Tier.HBM else self.downs).append(move)
                case SetTimer(at_s, key):
                    self.timers[key] = at_s
                case _:
                    self.done.append(effect)
        self.shared.check_invariants()
        self.tiers.check_invariants()
        filled = {owner for owner in self.pool.owners(PageState.IN_FLIGHT) if owner.request_id == "fetch"}
        assert filled == set(self.tiers.fetches.pages_of())

    def compute(self, *names: int) -> None:
        """A prompt with these pages is computed here and ends."""
        held = self.shared.lock(names)
        pages = self.shared.take(len(names) - len(held.pages), ME, PageState.LIVE)
        assert pages is not None
        self.shared.keep(names, (*held.pages, *pages), pages, ME)
        self.shared.release(held)
        self.settle()

    def tend(self) -> None:
        self.tiers.run_demotions(self.now_s)
        self.settle()

    def fetch(self, *names: int, room: int = 99, waiter: Attempt = ME) -> bool:
        waits = self.tiers.fetch(waiter, names, min(room, self.shared.available), self.now_s)
        self.settle()
        return waits

    def answer(
        self, *good: bool, failed: str = "", took_s: float = 0.01, at: int = 0, down: bool = False
    ) -> list[Attempt]:
        """The move that was asked for first (or `at`) ends; all pages are good unless told."""
        move = (self.downs if down else self.asked).pop(at)
        number = len(unpacked(move.names))
        found = good or ((not failed,) * number)
        ready = self.tiers.moved(PagesMoved(move, found, took_s, failed=failed), self.now_s)
        self.settle()
        return ready

    def answer_downs(self) -> None:
        while self.downs:
            self.answer(down=True)

    def expire(self) -> list[Attempt]:
        """The deadline of the fetch that is under way is due."""
        fetch = next(iter(self.tiers.fetches.under_way.values()))
        self.now_s = fetch.deadline_s
        ready = self.tiers.fetches.expire(fetch.owner, self.now_s)
        self.settle()
        return ready

    def held(self, *names: int) -> int:
        """Leading pages of HBM."""
        return self.shared.cache.match(names)

    def dram(self, *names: int) -> int:
        return self.tiers.pools[Tier.DRAM].match(names)


def names_of(move: PageMove) -> tuple[int, ...]:
    return unpacked(move.names)


def kept_below(count: int = 8, **sizes: Any) -> Desk:
    """Pages 1 to `count` lie in DRAM and no longer in HBM."""
    desk = Desk(config(**sizes))
    desk.compute(*range(1, count + 1))
    desk.compute(*range(100, 100 + desk.config.num_pages))
    desk.answer_downs()
    assert desk.dram(*range(1, count + 1)) == count and not desk.held(1)
    return desk


PREFIX = (1, 2, 3, 4, 5, 6, 7, 8)


# ------------------------------------------------------------------ down


def test_what_makes_room_is_copied_before_it_does():
    desk = Desk(config())
    desk.compute(*range(1, 17))
    desk.compute(*range(101, 105))
    (move,) = desk.downs
    assert (move.source, move.destination) == (Tier.HBM, Tier.DRAM)
    assert set(names_of(move)) == {13, 14, 15, 16} and not desk.dram(13), "not read before it is written"
    desk.answer(down=True)
    assert desk.tiers.pools[Tier.DRAM].readable(13)


def test_pages_go_down_ahead_of_need_once_little_is_free_and_no_more_than_a_few_at_once():
    desk = Desk(config(num_pages=100, dram_pages=200))
    desk.compute(*range(1, 61))
    desk.tend()
    assert not desk.downs, "40 of 100 are free"
    desk.compute(*range(101, 121))
    for _ in range(5):
        desk.tend()
    assert [len(move.source_pages) for move in desk.downs] == [AHEAD_PAGES]
    while desk.downs:
        desk.answer(down=True)
        desk.tend()
    copied = sum(name in desk.tiers.pools[Tier.DRAM].kept for name in (*range(1, 61), *range(101, 121)))
    assert 30 <= copied < 60, "until half of HBM is free or lies below too"
    assert desk.held(*range(1, 61)) == 60, "and stays where it is"


def test_no_more_than_a_bounded_number_of_pages_is_under_way():
    desk = Desk(config(num_pages=200, dram_pages=400))
    desk.compute(*range(1, 201))
    desk.compute(*range(1001, 1151))
    assert sum(len(move.source_pages) for move in desk.downs) == MOST_DEMOTED


def test_what_lies_below_already_is_not_copied_again():
    desk = kept_below()
    assert desk.fetch(*PREFIX)
    desk.answer()
    desk.answer_downs()
    assert desk.held(*PREFIX) == 8
    desk.compute(*range(200, 216))
    assert not {*PREFIX} & {name for move in desk.downs for name in names_of(move)}


def test_a_copy_that_failed_leaves_its_place_free_and_the_tier_alone_for_a_while():
    desk = Desk(config())
    desk.compute(*range(1, 17))
    desk.compute(*range(101, 105))
    desk.answer(down=True, failed="out of memory")
    assert desk.tiers.pools[Tier.DRAM].free_pages == 64
    desk.compute(*range(201, 205))
    assert not desk.downs
    desk.now_s = 2.0
    desk.tend()
    assert desk.downs


def test_what_a_tier_refuses_is_not_offered_for_ever():
    desk = Desk(config())
    desk.compute(*range(1, 17))
    for _ in range(20):
        desk.tend()
        if desk.downs:
            desk.answer(*[False] * len(desk.downs[0].source_pages), down=True)
    assert not desk.downs


def test_disk_takes_only_what_was_used_twice():
    desk = Desk(config(dram_pages=0, disk_pages=64))
    desk.compute(1, 2, 3, 4)
    desk.compute(1, 2)
    desk.compute(*range(101, 117))
    assert [set(names_of(move)) for move in desk.downs] == [{1, 2}]
    assert desk.downs[0].destination is Tier.DISK


def test_dram_makes_room_by_giving_to_disk_what_that_admits():
    desk = Desk(config(dram_pages=16, disk_pages=64))
    for _ in range(2):
        desk.compute(*PREFIX)
    for first in range(100, 200, 16):
        desk.compute(*range(first, first + 16))
        desk.tend()
        desk.answer_downs()
    assert desk.tiers.pools[Tier.DISK].match(PREFIX) == 8
    assert all(desk.tiers.pools[Tier.DISK].readable(name) == (name < 100) for name in (*PREFIX, 100, 120))


def test_room_that_disk_is_about_to_leave_in_dram_is_not_made_twice():
    desk, names = Desk(config(num_pages=128, dram_pages=40, disk_pages=64)), range(1, 41)
    for _ in range(2):
        desk.compute(*names)
    desk.compute(*range(101, 229))
    desk.answer_downs()
    assert desk.dram(*names) == 40
    for _ in range(5):
        desk.tend()
    pool = desk.tiers.pools[Tier.DRAM]
    assert all(name in pool.kept for name in names), "what goes to disk was given up before it came there"
    desk.answer_downs()
    assert pool.free_pages


# ------------------------------------------------------------------ up


def test_a_prompt_waits_for_what_comes_and_finds_it():
    desk = kept_below()
    assert desk.fetch(*PREFIX, 9) and desk.tiers.fetches.holds_up(ME)
    (move,) = desk.asked
    assert (move.source, names_of(move)) == (Tier.DRAM, PREFIX) and len(move.destination_pages) == 8
    assert not desk.held(*PREFIX), "nobody sees a page that has not come"
    assert desk.answer() == [ME]
    assert desk.held(*PREFIX, 9) == 8 and not desk.tiers.busy
    assert isinstance(desk.done[-1], InsertPages)


def test_what_makes_room_for_a_fetch_takes_no_place_of_what_is_fetched():
    desk = kept_below(dram_pages=8)
    assert desk.fetch(*PREFIX)
    assert desk.answer() == [ME] and desk.held(*PREFIX) == 8
    assert desk.dram(*PREFIX) == 8


def test_only_what_hbm_lacks_is_fetched():
    desk = kept_below()
    desk.compute(1, 2, 3)
    desk.fetch(*PREFIX)
    assert names_of(desk.asked[-1]) == PREFIX[3:]


def test_two_prompts_that_begin_alike_wait_for_one_fetch():
    desk, other = kept_below(), Attempt(RequestId("other"), 1)
    assert desk.fetch(*PREFIX) and desk.fetch(*PREFIX, 9, waiter=other)
    assert len(desk.asked) == 1 and desk.answer() == [ME, other]


def test_who_is_over_is_not_told():
    desk = kept_below()
    desk.fetch(*PREFIX)
    desk.tiers.fetches.forget(ME)
    assert not desk.tiers.fetches.holds_up(ME)
    assert desk.answer() == [] and desk.held(*PREFIX) == 8


def test_no_more_is_fetched_than_there_is_room_for():
    desk = kept_below()
    assert desk.fetch(*PREFIX, room=3)
    assert names_of(desk.asked[0]) == PREFIX[:3]
    desk.answer()
    assert not desk.fetch(*PREFIX, room=0)


def test_behind_a_page_that_came_broken_nothing_is_kept():
    desk = kept_below()
    desk.fetch(*PREFIX)
    desk.answer(True, True, False, True, True, True, True, True)
    assert desk.held(*PREFIX) == 2
    assert desk.dram(*PREFIX) == 2 and not desk.tiers.pools[Tier.DRAM].readable(3), "it is not read again"


def test_a_tier_that_did_not_answer_keeps_its_pages_for_later():
    desk = kept_below()
    desk.fetch(*PREFIX)
    assert desk.answer(failed="no answer") == [ME]
    assert not desk.held(1) and desk.dram(*PREFIX) == 8 and not desk.fetch(*PREFIX)
    desk.now_s = 5.0
    assert desk.fetch(*PREFIX)


def test_a_fetch_that_is_late_is_waited_for_no_longer_and_its_pages_are_not_written():
    desk = kept_below()
    desk.fetch(*PREFIX)
    assert desk.expire() == [ME] and not desk.held(1) and not desk.tiers.busy
    assert desk.answer() == [] and isinstance(desk.done[-1], DropPages)
    assert desk.dram(*PREFIX) == 8


@pytest.mark.parametrize(("computed_s", "patience_s"), [(None, USUAL_S), (0.001, SHORTEST_S), (0.1, 1.6)])
def test_a_fetch_is_waited_for_twice_as_long_as_computing_takes(computed_s, patience_s):
    desk = kept_below()
    if computed_s is not None:
        desk.tiers.prices.learn(COMPUTED, 8, 8 * computed_s, 0.0)
    desk.fetch(*PREFIX)
    assert list(desk.timers.values()) == [pytest.approx(patience_s)]


def test_what_is_cheaper_to_compute_is_not_fetched():
    desk = kept_below()
    desk.fetch(*PREFIX)
    desk.answer(took_s=8.0)
    desk.tiers.prices.learn(COMPUTED, 8, 0.1, 0.0)
    desk.compute(*range(300, 316))
    desk.answer_downs()
    assert not desk.held(1) and not desk.fetch(*PREFIX)


def test_a_beginning_comes_from_several_tiers_at_once_and_is_kept_as_one():
    desk = kept_below(shared_pool=True)
    desk.fetch(*PREFIX, 9, 10)
    assert [(move.source, len(move.names) // 16) for move in desk.asked] == [(Tier.DRAM, 8), (Tier.POOL, 2)]
    assert desk.answer(True, True, at=1) == [] and not desk.held(1)
    assert desk.answer() == [ME] and desk.held(*PREFIX, 9, 10) == 10


@pytest.mark.parametrize("late", [Tier.DRAM, Tier.POOL])
def test_where_one_tier_is_late_what_came_before_its_pages_is_kept(late):
    desk = kept_below(shared_pool=True)
    desk.fetch(*PREFIX, 9, 10)
    desk.answer(at=0 if late is Tier.POOL else 1)
    assert desk.expire() == [ME]
    assert desk.held(*PREFIX, 9, 10) == (8 if late is Tier.POOL else 0)


def test_a_pool_that_lacks_a_page_gives_what_is_before_it():
    desk = Desk(config(dram_pages=0, shared_pool=True))
    assert desk.fetch(*PREFIX)
    assert desk.answer(True, True, True, *[False] * 5) == [ME]
    assert desk.held(*PREFIX) == 3


def test_what_is_computed_meanwhile_stays_and_what_comes_is_given_back():
    desk = kept_below()
    desk.fetch(1, 2, 3)
    desk.compute(1, 2)
    desk.answer()
    assert desk.held(1, 2, 3) == 3 and desk.pool.count(PageState.IN_FLIGHT) == 0


def test_pages_of_an_earlier_life_are_fetched_from_disk():
    desk = Desk(config(dram_pages=0, disk_pages=8))
    desk.tiers.found(PagesFound((3, 5), packed((1, 2))))
    assert desk.fetch(1, 2, 3)
    assert desk.asked[0].source_pages == (3, 5)
    desk.answer()
    assert desk.held(1, 2) == 2


def test_when_the_router_is_gone_every_page_comes_back():
    desk = kept_below()
    desk.fetch(*PREFIX)
    desk.tiers.fetches.give_up_all()
    desk.settle()
    assert desk.shared.available == 16 and not desk.tiers.busy
    desk.answer()
    assert desk.dram(*PREFIX) == 8


def test_without_tiers_nothing_moves():
    desk = Desk(config(dram_pages=0))
    desk.compute(*PREFIX)
    desk.compute(*range(101, 117))
    desk.tend()
    assert not desk.asked and not desk.fetch(*PREFIX)


# What sources cost as they were measured: a line through it, forgotten in time, and sources that fail left alone.


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
    times = StepTimer()
    times.dispatched(1, 10, now_s=0.0)
    times.dispatched(2, 20, now_s=0.1)
    times.dispatched(3, 30, now_s=9.0)
    assert times.done(1, now_s=1.0) == (10, 1.0)
    assert times.done(2, now_s=3.0) == (20, 2.0), "it waited for the first until 1.0"
    assert times.done(3, now_s=9.5) == (30, 0.5)


def test_a_step_that_failed_is_not_waited_for():
    times = StepTimer()
    times.dispatched(1, 10, now_s=0.0)
    times.failed(1)
    with pytest.raises(KeyError):
        times.done(1, now_s=1.0)
