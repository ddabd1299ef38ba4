from itertools import pairwise

import pytest

from jdisagg.core.worker_config import Role, Stages
from jdisagg.policy.slots import Slots
from tests.sim.cases import worker


def slots_of(num_slots=4, num_microbatches=2, steps_in_flight=2) -> Slots[str]:
    sizes = {"num_slots": num_slots, "decode": Stages(num_microbatches), "steps_in_flight": steps_in_flight}
    return Slots(worker("d", Role.DECODE, **sizes))


def seat_all(slots: Slots[str], *names: str) -> list[int]:
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
