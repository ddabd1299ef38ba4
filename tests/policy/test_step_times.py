"""How long steps take that wait for one another."""

import pytest

from jdisagg.policy.step_times import StepTimes


def test_a_step_that_waited_for_another_took_the_time_since_that_one_ended():
    times = StepTimes()
    times.dispatched(1, 100, 10.0)
    times.dispatched(2, 50, 10.5)
    assert times.done(1, 12.0) == (100, pytest.approx(2.0))
    assert times.done(2, 13.0) == (50, pytest.approx(1.0))


def test_a_step_that_waited_for_none_took_the_time_since_it_was_dispatched():
    times = StepTimes()
    times.dispatched(1, 100, 1.0)
    times.done(1, 2.0)
    times.dispatched(2, 8, 30.0)
    assert times.done(2, 30.25) == (8, pytest.approx(0.25))


def test_a_step_that_failed_is_forgotten():
    times = StepTimes()
    times.dispatched(1, 100, 1.0)
    times.failed(1)
    with pytest.raises(KeyError):
        times.done(1, 2.0)
