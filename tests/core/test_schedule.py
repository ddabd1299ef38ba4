"""How much of a program's collectives stands behind its products, by the order of both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.hardware import Collective, Work
from jdisagg.core.schedule import End, Start, Turns, Waited, waited

SECOND = Work(flops=1.0)


def across(seconds: int) -> Collective:
    return Collective("all-reduce", seconds, (), depth=0)


def seconds_of(events, *loops: int) -> Waited:
    return waited(events, lambda work: work.flops, lambda one: float(one.size_bytes), loops)


def test_a_collective_that_nothing_runs_beside_is_exposed():
    assert seconds_of([SECOND, Start("a", across(3)), End("a"), SECOND]) == Waited(3.0, 3.0)


def test_what_runs_between_start_and_end_hides_as_much_of_it():
    assert seconds_of([Start("a", across(3)), SECOND, End("a")]) == Waited(3.0, 2.0)
    assert seconds_of([Start("a", across(3)), SECOND, SECOND, SECOND, SECOND, End("a")]).exposed_s == 0.0


def test_two_collectives_share_the_links():
    events = [Start("a", across(2)), Start("b", across(2)), SECOND, SECOND, SECOND, End("a"), End("b")]
    assert seconds_of(events) == Waited(4.0, 1.0)


def test_a_loop_is_gone_round_and_what_starts_in_it_ends_in_it():
    turn = Turns((Start("a", across(2)), SECOND))
    assert seconds_of([turn, SECOND, SECOND], 5) == Waited(10.0, 5.0)


def test_loops_within_a_loop_go_round_as_often_as_each_is_told_and_those_deeper_once():
    """A dispatch of 4 turns over 80 layers, and a draw's bisections: not 320 times 320 times 320."""
    bisected = Turns((SECOND,))
    layers = Turns((Start("a", across(2)), bisected, End("a")))
    found = seconds_of([Turns((layers, Start("b", across(1)), End("b")))], 4, 80)
    assert found == Waited(4 * (80 * 2 + 1), 4 * (80 * 1 + 1))


def test_where_nothing_is_sent_all_is_hidden():
    assert seconds_of([SECOND]).hidden == 1.0
    assert seconds_of([Start("a", across(4)), SECOND, End("a")]).hidden == pytest.approx(0.25)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_exposed_time_is_never_more_than_all_nor_less_than_what_the_products_leave(steps):
    events = [
        event
        for number, (sent, worked) in enumerate(steps)
        for event in (Start(str(number), across(sent)), Work(flops=worked), End(str(number)))
    ]
    found = seconds_of(events)
    assert found.total_s == sum(sent for sent, _ in steps)
    assert found.exposed_s == sum(max(sent - worked, 0) for sent, worked in steps)
