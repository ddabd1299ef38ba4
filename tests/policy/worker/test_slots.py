"""Tests of decode slots, step times and multi-step sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.messages import Preempted
from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import Ring, Role, Stages
from jdisagg.policy.worker.slots import MOST_GAP_S, DecodeSlots, StepTimer, TurnTimes, most_turns, one_by_one
from tests.sim.cases import choosing, colocated, definition, joint, pair, request, ring, run_all, sent, turning, worker
from tests.sim.world import World
from tests.steps import runs_decode


def slots_of(num_slots=4, num_microbatches=2, steps_in_flight=2) -> DecodeSlots[str]:
    sizes = {"num_slots": num_slots, "decode": Stages(num_microbatches), "steps_in_flight": steps_in_flight}
    return DecodeSlots(worker("d", Role.DECODE, **sizes))


def seat_all(slots: DecodeSlots[str], *names: str) -> list[int]:
    taken = []
    for name in names:
        slot = slots.free_slot()
        assert slot is not None
        slots.seat(slot, name)
        taken.append(slot)
    return taken


def test_sequences_spread_over_the_microbatches():
    assert seat_all(slots_of(), "a", "b", "c", "d") == [0, 2, 1, 3]


def test_microbatches_take_steps_so_that_every_stage_has_work():
    slots = slots_of(num_slots=3, num_microbatches=3)
    seat_all(slots, "a", "b", "c")
    order = []
    for _ in range(6):
        order.append(slots.due()[0])
        slots.begin_step(order[-1])
    assert order == [0, 1, 2, 0, 1, 2] and slots.due() == []
    slots.end_step(0)
    assert slots.due() == [0]


def test_two_steps_of_a_microbatch_never_stand_before_another_that_could_run():
    slots = slots_of()
    order: list[int] = []
    seat_all(slots, "a")
    for _ in range(2):  # alone, it runs ahead of itself
        order += slots.due()[:1]
        slots.begin_step(0)
    seat_all(slots, "b")
    for step in range(6):
        while due := slots.due():
            order.append(due[0])
            slots.begin_step(due[0])
        slots.end_step(order[step])  # results come in the order of their dispatch
    assert order[:2] == [0, 0] and all(one != other for one, other in pairwise(order[2:])), order


def test_a_microbatch_that_cannot_take_its_step_holds_the_others_up_only_while_its_last_is_in_flight():
    slots = slots_of()
    seat_all(slots, "a", "b")
    slots.begin_step(0)
    slots.begin_step(1)
    assert slots.due() == [0], "and its worker finds that it has no page for it"
    slots.end_step(0)
    assert slots.due() == [0, 1]


def test_a_cleared_slot_is_retired_by_the_next_step_of_its_microbatch_once():
    slots = slots_of()
    seat_all(slots, "a", "b", "c")
    slots.clear(0, on_device=True)
    slots.clear(2, on_device=False)
    assert slots.begin_step(1) == ()
    assert slots.begin_step(0) == (0,)
    assert slots.begin_step(0) == ()


def test_a_retirement_that_failed_comes_again():
    slots = slots_of()
    seat_all(slots, "a")
    slots.clear(0, on_device=True)
    slots.retire_again(0, slots.begin_step(0))
    assert slots.begin_step(0) == (0,)


def test_a_slot_is_cleared_once():
    slots = slots_of()
    with pytest.raises(AssertionError, match="slot 3 is free already"):
        slots.clear(3, on_device=True)


# How many turns a dispatch takes: as many as nobody could use better, and as no reader would notice.

ONE_STAGE = worker("decode-0", Role.DECODE, decode=Stages(1, 8))
RING = worker("decode-0", Role.DECODE, decode=Ring(2, 8))
JOINT = worker("decode-0", Role.DECODE, decode=Stages(2, 8))


class Seated:
    """What is asked of a sequence."""

    def __init__(self, **sampling: Any) -> None:
        self.sampling = SamplingParams(**sampling)


def chosen(
    *left: int, times: TurnTimes | None = None, most: int = 8, stops: tuple[int, ...] = (), **waits: bool
) -> int:
    asked = {"ready": False, "expects": False, "prompts": False, **waits}
    seated: Any = [Seated(stop_token_ids=stops) for _ in left]
    config = replace(ONE_STAGE, decode=Stages(1, most))
    return most_turns(config, seated, left, times or TurnTimes(ONE_STAGE), **asked)


def ended(*seconds: float, turns: int = 1) -> TurnTimes:
    """Steps of so many turns that took so long, one behind the other."""
    times, now_s = TurnTimes(ONE_STAGE), 0.0
    for step, took_s in enumerate(seconds):
        times.dispatched(step, DecodeRows(0, (0,), 1, widths=(turns,), turns=turns > 1), now_s)
        now_s += took_s
        times.done(step, now_s)
    return times


def widths_of(world: World) -> list[tuple[int, ...]]:
    return [
        effect.plan.decode.widths for _, _, effect in world.effects if runs_decode(effect) and effect.plan.decode.widths
    ]


def test_where_nobody_waits_all_turns_are_taken():
    assert chosen(20, 30) == 8


def test_a_prompt_that_waits_to_be_computed_is_behind_one_turn_at_most():
    assert chosen(20, prompts=True) == 1


def test_who_is_ready_waits_until_the_first_slot_is_sure_to_come_free():
    assert chosen(20, 3, ready=True) == 3


def test_who_is_ready_waits_for_a_few_turns_where_a_row_may_stop_at_any():
    fast = ended(*[0.001] * 3)
    assert chosen(60, 70, most=32, times=fast, ready=True) == 32
    assert chosen(60, 70, most=32, times=fast, ready=True, stops=(2,)) == 8
    assert chosen(60, 5, most=32, times=fast, ready=True, stops=(2,)) == 5


def test_few_turns_are_taken_until_one_has_been_timed():
    assert chosen(60, most=32) == 8
    assert chosen(60, most=32, times=ended(0.001)) == 32


def test_kv_that_is_on_its_way_finds_a_dispatch_of_a_quarter():
    assert chosen(20, expects=True) == 2


def test_nobody_takes_no_turns():
    assert chosen() == 1


@pytest.mark.parametrize("turns", [1, 4, 8])
def test_a_bunch_of_tokens_comes_within_the_gap(turns: int):
    for turn_s, most in ((0.001, 8), (MOST_GAP_S / 4.5, 4), (MOST_GAP_S / 3.5, 3), (1.0, 1)):
        assert chosen(20, times=ended(*[turn_s * turns] * 3, turns=turns)) == most


def test_a_slow_minute_of_the_machine_is_not_the_turns():
    assert chosen(20, times=ended(*[0.004] * 8, *[0.5] * 8)) == 8


def test_turns_are_counted_again_when_they_have_become_longer():
    assert chosen(20, times=ended(*[0.001] * 20, *[0.02] * 17)) == 2


def test_a_step_that_verifies_drafts_is_no_turn():
    times = TurnTimes(ONE_STAGE)
    times.dispatched(1, DecodeRows(0, (0,), 1, widths=(4,)), 0.0)
    times.done(1, 5.0)
    assert times.turn_s is None


def test_a_step_that_failed_tells_nothing():
    times = TurnTimes(ONE_STAGE)
    times.dispatched(1, DecodeRows(0, (0,), 1), 0.0)
    times.failed(1)
    assert times.turn_s is None and chosen(20, times=times) == 8


@pytest.mark.parametrize(
    ("asked", "of_a_ring", "of_one_stage"),
    [
        ({}, False, False),
        ({"temperature": 1.0, "seed": 3}, False, False),
        ({"synchronous": True}, True, True),
        ({"presence_penalty": 0.5}, False, True),
        ({"logprobs": 2}, False, True),
    ],
)
def test_tokens_come_one_by_one_where_programs_of_turns_cannot_draw_them(asked, of_a_ring, of_one_stage):
    sampling = SamplingParams(**asked)
    assert (one_by_one(sampling, RING), one_by_one(sampling, ONE_STAGE)) == (of_a_ring, of_one_stage)
    assert one_by_one(sampling, JOINT) == of_a_ring, "turns of stages are single steps, which draw anything"


def test_a_worker_of_one_stage_takes_turns_and_ends_where_single_steps_do():
    asked = [request(f"r{n}", max_tokens=7 + 6 * n) for n in range(4)]
    alone, several = World(colocated()), World(turning())
    run_all(alone, asked)
    run_all(several, asked)
    assert several.told == alone.told
    assert not widths_of(alone) and max(map(max, widths_of(several))) == 4
    assert len(several.effects) < len(alone.effects)


def test_stages_take_turns_of_all_slots_and_end_where_single_steps_do():
    asked = [request(f"r{n}", max_tokens=7 + 6 * n, presence_penalty=0.5 * (n % 2)) for n in range(4)]
    alone, several = World(pair(decode=Stages(2))), World(joint())
    run_all(alone, asked)
    run_all(several, asked)
    assert several.told == alone.told
    assert max(map(max, widths_of(several))) == 4 and max(map(len, widths_of(several))) > 2, "more than a stage's slots"
    assert len(several.effects) < len(alone.effects)


@pytest.mark.parametrize("at_s", [0.02, 0.05, 0.08])
def test_who_is_cancelled_or_sent_back_between_two_dispatches_of_stages_leaves_every_page(at_s: float):
    world = World(joint(num_pages=12, reserve_tokens=1))
    asked = [request(f"r{n}", max_tokens=24, priority=n % 2) for n in range(5)]
    for each in asked:
        world.submit(each)
    world.cancel(asked[0].request_id, at_s)
    world.run()
    world.check_all_ended()
    assert sent(world, Preempted), "no page was short"
    assert all(world.output(each.request_id) == definition(each) for each in asked[1:])


def test_a_row_with_penalties_holds_its_company_to_one_turn():
    world = World(turning())
    run_all(world, [request("held", max_tokens=9, presence_penalty=0.5), request("free", max_tokens=40)])
    together = [widths for widths in widths_of(world) if len(widths) == 2]
    assert together and set(together) == {(1, 1)} and (4,) in widths_of(world)


def test_a_prompt_that_comes_finds_single_steps_on_a_worker_that_computes_it():
    world = World(turning(prefill_buckets=(8,), chunks_in_flight=1))
    run_all(world, [request("runs", max_tokens=60), request("long", 60, arrival_s=0.01)])
    plans = [effect.plan for _, _, effect in world.effects if runs_decode(effect)]
    widths = [max(plan.decode.widths) for plan in plans]
    assert 4 in widths and 1 in widths[widths.index(4) :]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"num_slots": 5}, "5 slots do not fill the microbatches of Stages"),
        ({"draft_tokens": 2, "draft_auto": True}, "only decodes, without drafts .* draft_tokens or forced_tokens 2"),
        ({"mixed_steps": True}, "mixed_steps True"),
    ],
)
def test_stages_that_all_slots_go_round_have_whole_microbatches_and_guess_nothing(sizes: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        replace(JOINT, **sizes).check()


@pytest.mark.parametrize(
    ("role", "decode", "sizes", "told"),
    [
        (Role.DECODE, Stages(1, 8), {"draft_tokens": 2}, "it is decode with .* draft_tokens or forced_tokens 2"),
        (Role.PREFILL, Stages(1, 8), {}, "Stages.n=1, steps_per_dispatch=8. only decodes, .* it is prefill"),
        (Role.COLOCATED, Stages(2, 8), {}, "Stages.n=2, steps_per_dispatch=8. only decodes, .* it is colocated"),
        (Role.COLOCATED, Ring(2, 8), {}, "Ring.n=2, steps_per_dispatch=8. only decodes, .* it is colocated"),
        (Role.DECODE, Ring(2), {"short_prompt_tokens": 8}, "Ring.* with short_prompt_tokens 8"),
        (Role.DECODE, Ring(2), {"forced_tokens": 3}, "Ring.* draft_tokens or forced_tokens 3"),
        (Role.DECODE, Ring(1), {}, "Ring.n=1, steps_per_dispatch=1., must have n from 2 on"),
        (Role.DECODE, Stages(0), {}, "Stages.n=0, .* must have n from 1 on"),
        (Role.DECODE, Stages(1, 0), {}, "steps_per_dispatch=0., must have"),
        (Role.DECODE, Stages(3), {}, "4 slots do not fill the microbatches of Stages.n=3"),
    ],
)
def test_a_schedule_that_a_worker_cannot_run_is_refused(role: Role, decode: Any, sizes: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        worker("decode-0", role, decode=decode, **sizes).check()


def test_schedules_of_every_kind_are_accepted():
    at_times = colocated(draft_tokens=2, guesses=False, decode=Stages(1, 2))
    for each in (*turning(), *ring(), *joint(), *pair(), *choosing(), *at_times):
        each.check()


# How long steps take that wait for one another.


def test_a_step_that_waited_for_another_took_the_time_since_that_one_ended():
    times = StepTimer()
    times.dispatched(1, 100, 10.0)
    times.dispatched(2, 50, 10.5)
    assert times.done(1, 12.0) == (100, pytest.approx(2.0))
    assert times.done(2, 13.0) == (50, pytest.approx(1.0))


def test_a_step_that_waited_for_none_took_the_time_since_it_was_dispatched():
    times = StepTimer()
    times.dispatched(1, 100, 1.0)
    times.done(1, 2.0)
    times.dispatched(2, 8, 30.0)
    assert times.done(2, 30.25) == (8, pytest.approx(0.25))


def test_a_step_that_failed_is_forgotten():
    times = StepTimer()
    times.dispatched(1, 100, 1.0)
    times.failed(1)
    with pytest.raises(KeyError):
        times.done(1, 2.0)
