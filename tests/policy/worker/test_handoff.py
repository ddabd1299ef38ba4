"""Tests of the handoff's transition table and its timers."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.request import Attempt, RequestId
from jdisagg.policy.worker.handoff import (
    OVER,
    TABLE,
    WAITS,
    Handoff,
    HandoffRole,
    Signal,
    State,
    mermaid,
    next_state,
    owner_of_timer,
)

OWNER = Attempt(RequestId("a/b/c"), 7)


def after(end: HandoffRole, *signals: Signal) -> Handoff:
    handoff = Handoff(OWNER, end, 1.0)
    for signal in signals:
        handoff.take(signal)
    return handoff


def states_of(end: HandoffRole) -> set[State]:
    rows = [(state, then) for (side, state, _), then in TABLE.items() if side is end]
    return {state for row in rows for state in row}


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_source_ships_parts_while_it_computes_and_releases_them_on_ack(parts):
    streamed = after(HandoffRole.SOURCE, Signal.START, *[Signal.SHIP] * parts)
    assert not streamed.can_take(Signal.ACK)
    streamed.take(Signal.COMMIT)
    streamed.take(Signal.ACK)
    assert streamed.state is State.RELEASED


@pytest.mark.parametrize("order", set(permutations([Signal.ARRIVE, Signal.ARRIVE, Signal.COMMIT])))
def test_a_reservation_can_be_complete_only_after_its_commit(order):
    reservation = after(HandoffRole.DESTINATION, Signal.RESERVE)
    for signal in order:
        assert reservation.can_take(Signal.COMPLETE) == (reservation.state is State.COMMITTED)
        reservation.take(signal)
    reservation.take(Signal.COMPLETE)
    assert reservation.state is State.ADMITTED


@pytest.mark.parametrize(("end", "state", "signal"), list(product(HandoffRole, State, Signal)))
def test_an_illegal_event_raises_and_changes_nothing(end, state, signal):
    handoff = Handoff(OWNER, end, 1.0, state)
    if (end, state, signal) in TABLE:
        handoff.take(signal)
        assert handoff.state is TABLE[end, state, signal]
    else:
        assert not handoff.can_take(signal)
        with pytest.raises(IllegalTransition, match=f"{end} that is {state} cannot take {signal}"):
            handoff.take(signal)
        assert handoff.state is state


@pytest.mark.parametrize("end", HandoffRole)
def test_every_living_state_can_be_aborted_and_every_wait_has_a_deadline_and_an_owner(end):
    living = states_of(end) - OVER - {State.IDLE}
    for state in living:
        assert next_state(end, state, Signal.ABORT) is State.ABORTED
        wait = WAITS[end, state]
        assert wait.owner and wait.deadline
    by_a_worker = {state for state in living if "Worker" in WAITS[end, state].owner.title().replace(" ", "")}
    assert all(next_state(end, state, Signal.EXPIRE) is State.ABORTED for state in by_a_worker)


@pytest.mark.parametrize("end", HandoffRole)
def test_nothing_leaves_a_state_that_is_over_and_every_state_can_get_there(end):
    assert not [key for key in TABLE if key[0] is end and key[1] in OVER]
    reached = set(OVER)
    while more := {s for (side, s, _), then in TABLE.items() if side is end and then in reached} - reached:
        reached |= more
    assert states_of(end) <= reached


def test_a_timer_names_its_end_and_its_handoff_whatever_the_id_looks_like():
    handoff = Handoff(OWNER, HandoffRole.DESTINATION, 1.0)
    assert owner_of_timer(handoff.timer) == (HandoffRole.DESTINATION, OWNER)


def test_the_table_draws_itself_for_the_reader():
    drawn = mermaid(HandoffRole.DESTINATION)
    assert drawn.startswith("stateDiagram-v2") and "    committed --> admitted: complete" in drawn.splitlines()
    assert len(drawn.splitlines()) == 2 + sum(end is HandoffRole.DESTINATION for end, _, _ in TABLE)
