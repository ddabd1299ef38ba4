"""Steps as they are formed: rows and chunks in one, rows wider than a token, rows that are held back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.messages import Preempted
from jdisagg.core.request import FinishReason, WorkerId
from jdisagg.core.worker_config import Ring, Role, Stages
from jdisagg.policy.worker import scheduler
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.scheduler import Scheduler
from tests.policy.bench import Bench
from tests.sim.cases import (
    check_ended,
    check_outputs,
    choosing,
    colocated,
    definition,
    joint,
    pair,
    request,
    ring,
    run_all,
    sent,
    stopping,
    turning,
    worker,
)
from tests.sim.fault_injector import Faults
from tests.sim.world import World
from tests.steps import runs_decode, runs_prefill

BOTH = {"mixed_steps": True, "prefill_buckets": (8,)}


def steps_of(world: World) -> list[Any]:
    """Of a colocated worker, from the first that decodes."""
    runs = [effect for _, _, effect in world.effects if runs_decode(effect) or runs_prefill(effect)]
    return list(itertools.dropwhile(lambda run: run.plan.decode is None, runs))


def test_prompts_that_come_while_others_decode_ride_with_their_rows():
    world, first = World(colocated(**BOTH)), request("runs", max_tokens=60)
    later = [request(f"p{i}", 40, arrival_s=0.01) for i in range(3)]
    run_all(world, [first, *later])
    mixed = [run.plan for run in steps_of(world) if run.plan.prefill is not None]
    assert len(mixed) == 15 and all(plan.mixed for plan in mixed)


def test_with_mixed_steps_off_no_step_holds_both():
    world = World(colocated(**{**BOTH, "mixed_steps": False}))
    run_all(world, [request("runs", max_tokens=60), *(request(f"p{i}", 40, arrival_s=0.01) for i in range(3))])
    assert not any(run.plan.mixed for run in steps_of(world))


def test_a_step_never_holds_more_than_its_budget():
    sizes = worker("both", Role.COLOCATED, **BOTH)
    world = World([sizes])
    run_all(world, [request(f"r{i}", 5 + 3 * i, max_tokens=30, arrival_s=0.002 * i) for i in range(9)])
    held = [
        (len(run.plan.decode.active) if run.plan.decode else 0)
        + sum(len(chunk.tokens) for chunk in (run.plan.prefill.chunks if run.plan.prefill else ()))
        for run in steps_of(world)
    ]
    assert sizes.step_tokens == 8 + 4 and max(held) <= sizes.step_tokens and max(held) > 8


def test_a_mixed_step_has_the_widest_table_so_that_there_is_one_program_a_chunk_size():
    world = World(colocated(**BOTH))
    run_all(world, [request("runs", max_tokens=60), request("long", 40, arrival_s=0.01)])
    assert {run.plan.decode.table_pages for run in steps_of(world) if run.plan.mixed} == {32}


def test_a_prompt_is_cut_at_the_same_tokens_in_any_company():
    cuts = []
    for company in (0, 3):
        world = World(colocated(**BOTH))
        others = [request(f"o{i}", max_tokens=60) for i in range(company)]
        run_all(world, [*others, request("long", 37, arrival_s=0.01)])
        runs = [effect for _, _, effect in world.effects if runs_prefill(effect)]
        chunks = [chunk for run in runs for chunk in run.plan.prefill.chunks if chunk.request_id == "long"]
        cuts.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
    assert cuts[0] == cuts[1] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 5)]


def test_a_row_that_may_draw_a_draft_gets_pages_for_all_of_it_and_tells_what_was_accepted():
    world, each = World(pair(draft_tokens=3, reserve_tokens=1)), request("a", max_tokens=30)
    run_all(world, [each])
    assert world.workers[WorkerId("decode-0")].decode.free_slots == 4 + 2
    rows = [effect.plan.decode for _, _, effect in world.effects if runs_decode(effect)]
    assert {width for row in rows for width in row.widths} == {1, 4} and len(rows) < 29


def test_rows_of_a_mixed_step_may_draw_drafts_and_so_may_rows_with_penalties():
    world = World(colocated(draft_tokens=3, **BOTH))
    asked = [request(f"r{i}", 30, arrival_s=0.01 * i, max_tokens=30, presence_penalty=i / 9) for i in range(3)]
    run_all(world, asked)
    mixed = [effect.plan for _, _, effect in world.effects if runs_decode(effect) and effect.plan.mixed]
    assert mixed and {max(plan.decode.widths) for plan in mixed} == {4}


def test_a_worker_that_chooses_begins_with_steps_of_one_token_and_verifies_drafts_where_they_are_faster():
    """A step takes as long here whatever its rows draw, and what is taken of drafts follows from no text."""
    world, asked = (
        World(pair(draft_tokens=3, draft_auto=True, num_pages=96)),
        request("a", max_tokens=120),
    )
    run_all(world, [asked])
    widths = [max(each) for each in widths_of(world)]
    assert widths[:2] == [1, 1] and set(widths) == {1, 2, 3, 4} and len(widths) < 100


def test_a_worker_that_chooses_answers_the_same_where_pages_do_not_do_for_all():
    world = World(pair(num_pages=24, reserve_tokens=1, draft_tokens=3, draft_auto=True))
    run_all(world, [request(f"r{i}", 9, max_tokens=24 + i) for i in range(4)])
    assert any(isinstance(message, Preempted) for message in sent(world, Preempted))
    assert {max(each) for each in widths_of(world)} >= {1, 4}


def rows_of(world: World) -> list[Any]:
    return [effect.plan.decode for _, _, effect in world.effects if runs_decode(effect)]


@pytest.mark.parametrize("turns", [2, 32])
def test_a_worker_that_chooses_takes_turns_where_it_verifies_no_drafts(turns: int):
    """A step takes as long here whatever its rows draw, so that many turns are faster than any draft, few are not."""
    world, asked = World(choosing(num_pages=128, draft_tokens=7, steps=turns)), request("a", max_tokens=120)
    run_all(world, [asked])
    assert world.output(asked.request_id) == definition(asked)
    turned = [rows for rows in rows_of(world) if rows.turns]
    drafted = [rows for rows in rows_of(world) if max(rows.widths) > 1 and not rows.turns]
    assert max(max(rows.widths) for rows in turned) == turns
    assert len(drafted) <= 4 if turns == 32 else len(drafted) > 10


def test_a_worker_whose_rows_want_no_drafts_takes_turns_only():
    world = World(choosing(num_pages=96))
    run_all(world, [request("a", max_tokens=50, speculative=False)])
    assert all(rows.turns or max(rows.widths) == 1 for rows in rows_of(world)) and len(rows_of(world)) < 25


def test_rows_with_a_grammar_take_what_it_forces_and_all_others_turns():
    world = World(colocated(draft_tokens=3, guesses=False, decode=Stages(1, 4), num_pages=96))
    run_all(world, [request("free", max_tokens=60), request("held", max_tokens=9, synchronous=True, grammar="even")])
    rows = rows_of(world)
    assert any(each.turns for each in rows) and any(max(each.widths) > 1 and not each.turns for each in rows)
    assert not any(each.turns and len(each.active) > 1 for each in rows)


def test_a_draft_that_runs_into_a_stop_ends_the_answer_there():
    world, each = World(pair(draft_tokens=3)), stopping("b", after=6)
    run_all(world, [each])
    assert len(definition(each)) == 6


def test_a_row_whose_tokens_are_read_one_by_one_is_held_back_and_keeps_nobody_waiting():
    bench = Bench(worker("decode-0", Role.DECODE, steps_in_flight=2))
    held, free = request("held", max_tokens=6, synchronous=True), request("free", max_tokens=6)
    for each in (held, free):
        assert bench.reserve(each)
        bench.arrive(each)
        bench.commit(each)
    bench.read_all()
    active = [run.plan.decode.active for run in bench.decode_runs]
    seats = {each.request_id: each.slot for run in bench.decode_runs for each in run.plan.decode.admit}
    with_held = [seats["held"] in slots for slots in active]
    both = [slots for slots in active if seats["free"] in slots]
    assert sum(with_held) == 5 and with_held[: len(both)] == [True, False, True, False, True]
    assert bench.free_pages == 64


def test_a_row_with_a_grammar_is_told_every_token_it_drew_before_it_draws_the_next():
    bench = Bench(worker("decode-0", Role.DECODE, steps_in_flight=2))
    asked = request("held", max_tokens=6, synchronous=True, grammar="even")
    assert bench.reserve(asked)
    bench.arrive(asked)
    bench.commit(asked)
    bench.read_all()
    (admission,) = [each for run in bench.decode_runs for each in run.plan.decode.admit]
    told = [token for run in bench.decode_runs for read in run.plan.decode.read for token in read.tokens]
    assert [*admission.history.output, *told] == definition(asked)[:-1] and admission.history.prompt == ()


@pytest.mark.parametrize("ahead", [{}, {"draft_tokens": 3}, {"forced_tokens": 3}])
def test_an_answer_keeps_to_its_grammar_when_its_pages_are_taken_half_way(ahead: dict[str, int]):
    world = World(pair(num_pages=16, reserve_tokens=1, **ahead))
    asked = [request(f"r{i}", 9, max_tokens=24, synchronous=True, grammar="even") for i in range(4)]
    run_all(world, asked)
    assert any(isinstance(message, Preempted) for message in sent(world, Preempted))
    assert all(token % 2 == 0 for each in asked for token in world.output(each.request_id))


@pytest.mark.parametrize("guesses", [True, False])
def test_a_row_with_a_grammar_may_draw_a_draft_and_is_told_all_of_it_before_the_next(guesses: bool):
    world = World(pair(draft_tokens=3, guesses=guesses))
    held = request("held", max_tokens=20, synchronous=True, grammar="even")
    run_all(world, [held, request("free", max_tokens=20), request("slow", max_tokens=9, speculative=False)])
    rows = [effect.plan.decode for _, _, effect in world.effects if runs_decode(effect)]
    told = {len(read.tokens) for each in rows for read in each.read}
    assert max(told) == 4
    seats = {str(each.request_id): each.slot for row in rows for each in row.admit}
    widest = dict.fromkeys(seats.values(), 0)
    for slot, width in [row for each in rows for row in zip(each.active, each.widths, strict=True)]:
        widest[slot] = max(widest[slot], width)
    assert widest[seats["free"]] == (4 if guesses else 1) and widest[seats["slow"]] == 1


def test_without_drafts_only_rows_with_a_grammar_may_draw_several_tokens_and_only_where_they_have_not_refused_it():
    world = World(pair(forced_tokens=3))
    held = {"synchronous": True, "grammar": "even"}
    free, plain = request("free", max_tokens=60), request("plain", max_tokens=20, speculative=False, **held)
    run_all(world, [request("held", max_tokens=20, **held), free, plain])
    rows = rows_of(world)
    seats = {str(each.request_id): each.slot for row in rows for each in row.admit}
    widths = {name: [dict(zip(each.active, each.widths, strict=True)).get(slot) for each in rows if each.widths]
              for name, slot in seats.items()}  # fmt: skip
    assert max(width or 0 for width in widths["held"]) == 4
    assert {*widths["free"], *widths["plain"]} <= {1, None}
    assert any(not each.widths for each in rows), "alone again, they are told no widths"


def test_rows_may_draw_what_is_forced_beside_chunks_as_well():
    world = World(colocated(forced_tokens=3, **BOTH))
    held = {"synchronous": True, "grammar": "even", "max_tokens": 30}
    run_all(world, [request(f"r{i}", 30, arrival_s=0.01 * i, **held) for i in range(3)])
    plans = [effect.plan for _, _, effect in world.effects if runs_decode(effect)]
    for mixed in (True, False):
        assert 4 in {max(plan.decode.widths, default=1) for plan in plans if plan.mixed is mixed}


def widths_of(world: World) -> list[tuple[int, ...]]:
    return [effect.plan.decode.widths for _, _, effect in world.effects if runs_decode(effect)]


def test_a_ring_takes_all_its_turns_where_nothing_can_change_and_no_step_behind_the_last_token():
    world, each = World(ring(reserve_tokens=64)), request("a", max_tokens=22)
    run_all(world, [each])
    assert widths_of(world) == [(4,)] * 5 + [(1,)]


def test_a_stop_within_a_rings_turns_ends_the_answer_there():
    world, each = World(ring()), stopping("b", after=6)
    run_all(world, [each])
    assert len(definition(each)) == 6


def test_a_ring_takes_one_turn_where_a_token_depends_on_how_the_last_one_is_read():
    world = World(ring())
    run_all(world, [request("held", max_tokens=9, synchronous=True), request("free", max_tokens=30)])
    together = [widths for widths in widths_of(world) if len(widths) == 2]
    assert together and set(together) == {(1, 1)} and (4,) in widths_of(world)


def test_a_ring_stops_for_who_waits_when_the_first_slot_is_sure_to_come_free():
    bench = Bench(worker("decode-0", Role.DECODE, decode=Ring(2, 8), num_slots=2, reservations_ahead=2))
    asked = [request(f"r{n}", max_tokens=6 + 9 * n) for n in range(3)]
    for each in asked:
        assert bench.reserve(each)
    for each in asked:
        bench.arrive(each)
        bench.commit(each)
    bench.read_all()
    steps = [(run.plan.decode.widths, [each.request_id for each in run.plan.decode.admit]) for run in bench.decode_runs]
    assert steps[:2] == [((2,), ["r0"]), ((2,), [])], "a quarter of the turns while KV is on its way"
    assert steps[2:4] == [((1, 1), ["r1"]), ((8, 8), ["r2"])], "the third has the place of the first at once"
    assert bench.free_pages == 64


def test_a_ring_takes_pages_of_nobody_for_turns_that_can_wait():
    """Three sequences fill the pool; each goes on token by token, and nobody is preempted for tokens to come."""
    world = World(ring(num_pages=9, reserve_tokens=1, steps=8))
    asked = [request(f"r{n}", 6, max_tokens=6) for n in range(3)]
    run_all(world, asked)
    assert not [effect for _, _, effect in world.effects if "Preempted" in str(type(getattr(effect, "message", None)))]


@pytest.mark.parametrize("cluster", [pair, colocated, ring, turning, choosing])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_answer_is_right_whatever_rows_and_chunks_share_and_whatever_fails(cluster, data: st.DataObject):
    draw = data.draw
    sizes = {
        "mixed_steps": draw(st.booleans()),
        "draft_tokens": draw(st.integers(0, 3)),
        **({} if cluster is ring else {"forced_tokens": draw(st.integers(0, 3))}),
        "num_pages": draw(st.sampled_from([24, 64])),
        "decode": Stages(draw(st.sampled_from([1, 2]))),
        "prefix_caching": draw(st.booleans()),
        "reserve_tokens": draw(st.sampled_from([1, 8])),
    }
    asked = [
        request(
            f"r{i}",
            draw(st.integers(1, 30)),
            max_tokens=draw(st.integers(1, 20)),
            **draw(st.sampled_from([{}, {"synchronous": True}, {"synchronous": True, "grammar": "even"}])),
            arrival_s=draw(st.floats(0.0, 0.02)),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    faults = Faults(seed=draw(st.integers(0, 99)), fail_plan=draw(st.sampled_from([0.0, 0.02])))
    world = World(cluster(**sizes), faults=faults)
    for each in asked:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, asked)
    for each in world.workers.values():
        assert each.decode.free_slots == each.config.num_slots + each.config.reservations_ahead


# Steps that repeat are formed without a look at their sequences, and are those that a look would have formed.


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
    with mock.patch.object(
        DecodePhase, "on_step_failed", autospec=True, side_effect=DecodePhase.on_step_failed
    ) as failed:
        _, repeated = formed(world)
    assert failed.call_count and repeated, f"{failed.call_count} steps failed, {repeated} repeat"
    check_ended(world, asked)
    assert all(end.reason is FinishReason.LENGTH for ends in world.finished.values() for end in ends)
