"""Timers of a process: in their order, the last setting of a key counts, and what is due may still be moved."""

from jdisagg.core.request import WorkerId
from jdisagg.serve.driver.driver import Timers

ONE, OTHER = WorkerId("one"), WorkerId("other")


def timers(*settings: tuple[float, WorkerId, str]) -> Timers:
    made = Timers()
    for each in settings:
        made.set(*each)
    return made


def test_timers_are_due_in_the_order_of_their_times():
    made = timers((2.0, ONE, "lease"), (1.0, OTHER, "lease"), (3.0, ONE, "stall"))
    assert made.wait_s(0.5) == 0.5
    assert [*made.due(2.0)] == [(OTHER, "lease"), (ONE, "lease")]
    assert made.wait_s(4.0) == 0.0 and [*made.due(4.0)] == [(ONE, "stall")]
    assert made.wait_s(4.0) is None


def test_the_last_setting_of_a_key_counts():
    made = timers((1.0, ONE, "lease"), (5.0, ONE, "lease"))
    assert not [*made.due(4.0)] and [*made.due(5.0)] == [(ONE, "lease")]


def test_one_that_is_due_may_be_moved_by_what_an_earlier_one_brings():
    made = timers((1.0, ONE, "renew"), (2.0, ONE, "lease"))
    seen = []
    for actor, key in made.due(3.0):
        seen.append(key)
        made.set(9.0, actor, "lease")
    assert seen == ["renew"] and made.wait_s(3.0) == 6.0
