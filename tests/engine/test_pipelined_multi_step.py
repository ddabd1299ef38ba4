"""A step of all slots is the single steps of each microbatch, turn by turn: every row in each, no change told twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import RequestId, Sampled, SamplingParams
from jdisagg.core.steps import Admission, DecodeRows, PageGrant, Read
from jdisagg.engine.multi_step import PendingPipelinedMultiStep, PipelinedMultiStep, single_steps


def order(steps: tuple[DecodeRows, ...]) -> list[tuple[int, tuple[int, ...]]]:
    return [(step.microbatch, step.active) for step in steps]


def turns(*widths: int, **changes) -> DecodeRows:
    return DecodeRows(0, tuple(range(len(widths))), 4, widths=widths, turns=max(widths) > 1, **changes)


def test_microbatches_take_turns_so_that_no_stage_waits_for_the_next_turn_of_one():
    assert order(single_steps(turns(2, 2, 2, 2), 2, 2)) == [(0, (0, 1)), (1, (2, 3)), (0, (0, 1)), (1, (2, 3))]


def test_a_row_draws_as_often_as_it_is_wide_and_the_others_go_on():
    assert order(single_steps(turns(1, 3, 2, 1), 2, 2)) == [
        (0, (0, 1)), (1, (2, 3)), (0, (1,)), (1, (2,)), (0, (1,)),
    ]  # fmt: skip


def test_changes_are_told_once_to_their_own_microbatch_before_its_first_turn():
    admission = Admission(0, RequestId("a"), 3, 4, (1,), SamplingParams(), 1)
    grant, read = PageGrant(2, 1, 9), Read(1, (5,))
    rows = turns(2, 2, 2, admit=(admission,), grants=(grant,), retire=(3,), read=(read,))
    steps = single_steps(rows, 2, 2)
    assert [(s.admit, s.grants, s.retire, s.read) for s in steps] == [
        ((admission,), (), (), (read,)), ((), (grant,), (3,), ()), *[((), (), (), ())] * 2,
    ]  # fmt: skip


def test_who_left_a_microbatch_that_nobody_sits_in_is_told_though_nothing_is_drawn_there():
    rows = DecodeRows(0, (0,), 4, retire=(2,), widths=(2,), turns=True)
    assert [(s.microbatch, s.active, s.retire) for s in single_steps(rows, 2, 2)] == [
        (0, (0,), ()), (1, (), (2,)), (0, (0,), ()),
    ]  # fmt: skip


def test_rows_that_a_grammar_forces_keep_their_widths_in_one_step():
    rows = DecodeRows(0, (0, 2, 3), 4, widths=(3, 1, 4))
    assert [(s.active, s.widths, s.turns) for s in single_steps(rows, 2, 2)] == [
        ((0,), (3,), False), ((2, 3), (1, 4), False),
    ]  # fmt: skip


def test_rows_that_repeat_are_taken_apart_once_and_their_turns_are_one_object():
    joint, rows = PipelinedMultiStep(2, 2), turns(3, 3, 3, 3)
    steps = joint.of(rows)
    assert joint.of(rows) is steps
    assert steps[0] is steps[2] is steps[4] and steps[1] is steps[3]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_row_is_in_as_many_steps_as_it_is_wide(batches: int, size: int, data: st.DataObject):
    slots = data.draw(st.sets(st.integers(0, batches * size - 1), min_size=1))
    active = tuple(sorted(slots))
    widths = tuple(data.draw(st.integers(1, 5)) for _ in active)
    steps = single_steps(DecodeRows(0, active, 4, widths=widths, turns=max(widths) > 1), batches, size)
    drawn = [slot for step in steps for slot in step.active]
    assert {slot: drawn.count(slot) for slot in active} == dict(zip(active, widths, strict=True))
    assert all(slot // size == step.microbatch for step in steps for slot in step.active)


class Told:
    """What a single step drew."""

    def __init__(self, *rows: tuple[int, int | None]) -> None:
        self.rows = rows

    def read(self):
        return tuple((slot, None if token is None else (Sampled(token),)) for slot, token in self.rows)

    def guessed(self) -> tuple[()]:
        return ()


def test_what_a_row_drew_turn_by_turn_is_told_together_and_one_that_masked_itself_tells_nothing():
    steps = [Told((0, 5), (1, None)), Told((2, 6)), Told((0, 7), (1, None)), Told((2, None))]
    done = PendingPipelinedMultiStep(3, turns(2, 2, 2), steps, ()).read()
    assert done.step_id == 3
    assert done.decode == ((0, (Sampled(5), Sampled(7))), (1, None), (2, (Sampled(6),)))
