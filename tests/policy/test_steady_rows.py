"""Steps that repeat are formed without a look at their sequences, and are those that a look would have formed."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.request import FinishReason
from jdisagg.core.worker_config import Stages
from jdisagg.policy import scheduler
from jdisagg.policy.scheduler import Scheduler
from jdisagg.policy.step_results import StepResults
from tests.sim.cases import check_ended, check_outputs, colocated, definition, joint, pair, request, ring, turning
from tests.sim.fault_injector import Faults
from tests.sim.world import World


def formed(world: World) -> tuple[int, int]:
    """Rows that were looked at, and steps that repeat."""
    looks = mock.patch.object(Scheduler, "_rows", autospec=True, side_effect=Scheduler._rows)
    repeats = mock.patch.object(Scheduler, "_repeat", autospec=True, side_effect=Scheduler._repeat)
    with looks as looked, repeats as repeated:
        world.run()
    return looked.call_count, repeated.call_count


def test_a_long_answer_is_looked_at_where_it_needs_a_page_and_at_its_ends():
    world = World(colocated(reserve_tokens=1))
    world.submit(request("long", 4, max_tokens=60), 0.0)
    looked, repeated = formed(world)
    assert repeated > 35, f"of 59 steps {repeated} repeat, {looked} were looked at"


def test_stages_that_begin_before_their_kv_is_whole_repeat_as_well():
    world = World(pair(layer_groups=((0, 2), (2, 4)), decode=Stages(2), reserve_tokens=60))
    for n in range(2):
        world.submit(request(f"long{n}", 4, max_tokens=60), 0.0)
    looked, repeated = formed(world)
    assert repeated > 80, f"of 118 steps {repeated} repeat, {looked} were looked at"


def test_with_turns_the_same_holds_dispatch_by_dispatch():
    world = World(turning(reserve_tokens=60, page_size=32, table_buckets=(4,)))
    world.submit(request("long", 4, max_tokens=100), 0.0)
    assert formed(world)[1] > 15


def test_a_row_that_waits_for_its_last_token_never_repeats():
    world = World(colocated())
    world.submit(request("held", max_tokens=20, synchronous=True), 0.0)
    assert formed(world)[1] == 0


def test_drafts_are_chosen_anew_each_step():
    world = World(colocated(draft_tokens=2))
    world.submit(request("guessed", max_tokens=40), 0.0)
    assert formed(world)[1] == 0


@pytest.mark.parametrize("cluster", [pair, colocated, ring, turning, joint])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_what_is_said_and_done_is_the_same_as_if_every_step_were_looked_at(cluster, data: st.DataObject):
    draw = data.draw
    sizes = {
        "mixed_steps": draw(st.booleans()),
        "num_pages": draw(st.sampled_from([24, 64])),
        "page_size": draw(st.sampled_from([4, 16])),
        "decode": Stages(draw(st.sampled_from([1, 2]))),
        "layer_groups": draw(st.sampled_from([(), ((0, 2), (2, 4))])),  # whose first may begin before the others are in
        "prefix_caching": draw(st.booleans()),
        "reserve_tokens": draw(st.sampled_from([1, 8, 64])),
    }
    asked = []
    for i in range(draw(st.integers(1, 7))):
        tokens, length = draw(st.integers(1, 30)), draw(st.integers(1, 40))
        asks: list[dict[str, Any]] = [{}, {}, {"synchronous": True}, {"presence_penalty": 0.5}]
        what = draw(st.sampled_from(asks))
        one = request(f"r{i}", tokens, max_tokens=length, **what)
        if draw(st.booleans()):
            whole = definition(one)
            one = request(f"r{i}", tokens, max_tokens=length, stop_token_ids=(whole[len(whole) // 2],), **what)
        asked.append(replace(one, arrival_s=draw(st.floats(0.0, 0.1))))
    faults = Faults(seed=draw(st.integers(0, 99)), fail_plan=draw(st.sampled_from([0.0, 0.02])))
    cancelled = draw(st.booleans())
    worlds = []
    for looks in (True, False):
        world = World(cluster(**sizes), faults=faults)
        with mock.patch.object(scheduler, "steady_rows", (lambda *rest: None) if looks else scheduler.steady_rows):
            for each in asked:
                world.submit(each, each.arrival_s)
            if cancelled:
                world.cancel(asked[0].request_id, 0.05)
            world.run()
        worlds.append(world)
    looked, repeated = worlds
    assert repeated.effects == looked.effects
    if not cancelled:
        check_outputs(repeated, asked)


def test_rows_repeat_between_steps_that_fail_and_every_answer_is_whole():
    world = World(colocated(), faults=Faults(seed=3, fail_plan=0.05))
    asked = [request(f"r{n}", max_tokens=40) for n in range(4)]
    for each in asked:
        world.submit(each, each.arrival_s)
    with mock.patch.object(StepResults, "failed", autospec=True, side_effect=StepResults.failed) as failed:
        _, repeated = formed(world)
    assert failed.call_count and repeated, f"{failed.call_count} steps failed, {repeated} repeat"
    check_ended(world, asked)
    assert all(end.reason is FinishReason.LENGTH for ends in world.finished.values() for end in ends)
