"""A gate says what it found, and a test ends by it."""

import pytest
from _pytest.outcomes import Failed, XFailed

from tests.published.gates import GATES, OUTSIDE, WITHIN, absolute, between, hold, hold_all, in_order, relative


@pytest.fixture(autouse=True)
def booked():
    """These gates are of no published figure: they leave the table as it was."""
    before = list(GATES)
    yield
    GATES[:] = before


@pytest.mark.parametrize(
    ("gate", "verdict"),
    [
        (relative("t", 100.0, 95.0, 0.05), WITHIN),
        (relative("t", 100.0, 94.9, 0.05), OUTSIDE),
        (absolute("t", 36.0, 40.1, 4.0), OUTSIDE),
        (between("t", "at most 24", 18.0, 0.0, 24.0), WITHIN),
        (in_order("t", "a < b", "b < a", right=False), OUTSIDE),
    ],
)
def test_a_gate_knows_on_which_side_of_its_band_it_is(gate, verdict):
    assert gate.verdict == verdict


def test_a_miss_fails_its_test_and_an_explained_one_is_expected():
    missed = relative("t", 1.0, 2.0, 0.1)
    with pytest.raises(Failed, match="published 1, ours 2"):
        hold(missed)
    with pytest.raises(XFailed):
        hold(missed, miss="they measured something else")
    assert GATES[-1].note == "they measured something else"


def test_an_explained_miss_that_is_none_any_more_is_told():
    with pytest.raises(AssertionError, match="within its band now"):
        hold(relative("t", 1.0, 1.0, 0.1), miss="once")


def test_one_miss_among_several_fails_the_test_and_all_are_booked():
    good, missed = relative("good", 1.0, 1.0, 0.1), relative("missed", 1.0, 2.0, 0.1)
    with pytest.raises(Failed, match="missed: published 1, ours 2"):
        hold_all([missed, good])
    assert GATES[-2:] == [missed, good]
    hold_all([good])
