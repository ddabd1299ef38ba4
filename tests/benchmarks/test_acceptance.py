"""Quarters of answers are told apart, and a pair is compared where both drew something."""

from benchmarks.acceptance import Answer, Drawn, Rows, compared, quarters
from jdisagg.core.events import EmitTokens, Send
from jdisagg.core.messages import Preempted, TokenDelta
from jdisagg.core.request import Attempt, RequestId, Sampled, WorkerId

A, B = (Attempt(RequestId("a"), epoch) for epoch in (0, 1))
PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")


def emit(attempt: Attempt, place: int, number: int, worker: WorkerId) -> EmitTokens:
    return EmitTokens(TokenDelta(attempt, place, (Sampled(1),) * number), worker)


def test_each_row_of_a_step_counts_and_the_prompts_tokens_do_not():
    rows = Rows()
    for each in (emit(A, 0, 1, PREFILL), emit(A, 1, 3, DECODE), emit(A, 4, 2, DECODE)):
        rows("router", each, 0.0)
    assert rows.drawing() == DECODE and rows.times(A.request_id) == 0
    rows("decode-0", Send(WorkerId("router"), Preempted(A, (), "")), 0.0)
    for each in (emit(B, 6, 1, PREFILL), emit(B, 7, 4, DECODE), emit(B, 11, 0, DECODE)):
        rows("router", each, 0.0)
    assert rows.of == {A.request_id: [Drawn(1, 3), Drawn(4, 2), Drawn(7, 4)]}
    assert rows.times(A.request_id) == rows.preempted[A.request_id] == 1


def test_a_row_is_of_the_quarter_that_it_begins_in():
    assert quarters([Drawn(0, 2), Drawn(2, 3), Drawn(7, 4)], 8) == [[2], [3], [], [4]]
    assert quarters([Drawn(1, 1), Drawn(3, 1)], 8, first=4) == [[], [], [1], [1]]


def test_the_end_of_an_answer_is_held_against_the_end_of_the_undisturbed_one():
    whole = Answer("new", [1, 2, 3, 4, 5, 6, 7, 8], [[1, 1], [2], [2, 2], [2]], 0)
    found = compared("eagle", "new", "found", [(whole, Answer("new", [5, 6, 9, 8], [[], [], [1, 1, 2], [2]]))])
    assert found.undisturbed == [1, 2, 2, 2] and found.tokens_a_row == [None, None, 4 / 3, 2]
    assert found.ratio == 1.5 / 2 and found.differing == 1 and found.times == found.answers == 1
