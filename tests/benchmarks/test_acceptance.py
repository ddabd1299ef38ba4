"""A pair of answers is compared where both drew something, and what was to happen to them is looked for."""

from dataclasses import replace

import pytest

from benchmarks.acceptance import ANEW, FOUND, LOST, PARKED, PREEMPTED, Answer, Row, compared, missing
from benchmarks.drawn_rows import Rows
from jdisagg.core.request import RequestId

ROW = Row("eagle", "new", FOUND, 1, 1, 0, [2.0] * 4, [2.0] * 4, 1.0, 0)


def test_the_end_of_an_answer_is_held_against_the_end_of_the_undisturbed_one():
    whole = Answer("new", [1, 2, 3, 4, 5, 6, 7, 8], [[1, 1], [2], [2, 2], [2]], 0)
    found = compared("eagle", "new", "found", [(whole, Answer("new", [5, 6, 9, 8], [[], [], [1, 1, 2], [2]]))])
    assert found.undisturbed == [1, 2, 2, 2] and found.tokens_a_row == [None, None, 4 / 3, 2]
    assert found.ratio == 1.5 / 2 and found.differing == 1 and found.times == found.answers == 1


@pytest.mark.parametrize(
    ("disturbed", "cached", "preempted", "back", "said"),
    [
        (FOUND, 936, 0, 0, ""),
        (FOUND, 0, 0, 0, "0 tokens were there already, of 936"),
        (ANEW, 0, 0, 0, ""),
        (ANEW, 16, 0, 0, "16 tokens were there already"),
        (LOST, 0, 0, 0, ""),
        (LOST, 0, 1, 0, "pages did not do for 1 answers"),
        (PREEMPTED, 0, 1, 0, ""),
        (PREEMPTED, 0, 0, 0, "1 answers were begun again, and 0 had given back"),
        (PARKED, 0, 1, 7, ""),
        (PARKED, 0, 1, 0, "no page came up again"),
        (PARKED, 0, 0, 7, "0 had given back"),
    ],
)
def test_a_disturbance_that_did_not_happen_is_told(disturbed: str, cached: int, preempted: int, back: int, said: str):
    rows = Rows(back=back)
    rows.preempted.update({RequestId("a"): preempted})
    why = missing(disturbed, replace(ROW, cached=cached), 936, rows)
    assert said in why and bool(why) == bool(said)
