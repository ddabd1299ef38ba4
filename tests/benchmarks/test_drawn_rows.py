"""Quarters of answers are told apart, and what an observer sees says whether a disturbance happened."""

from benchmarks.drawn_rows import Drawn, Rows, quarters
from jdisagg.core.events import EmitTokens, Send
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Preempted, Progress, TokenDelta
from jdisagg.core.request import Attempt, RequestId, Sampled, WorkerId
from jdisagg.core.tiers import MovePages, PageMove, Tier

A, B = (Attempt(RequestId("a"), epoch) for epoch in (0, 1))
ROUTER, PREFILL, DECODE = WorkerId("router"), WorkerId("prefill-0"), WorkerId("decode-0")


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


def test_what_each_attempt_found_and_what_came_up_again_is_told():
    rows = Rows()
    for attempt, cached in ((A, 16), (B, 48)):
        rows("prefill-0", Send(ROUTER, Progress(attempt, Mark.PREFILL_STARTED, 1.0, cached_tokens=cached)), 1.0)
        rows("decode-0", Send(ROUTER, Progress(attempt, Mark.COMMITTED, 2.0, cached_tokens=8)), 2.0)
    assert rows.found(A.request_id) == 64 and rows.found(A.request_id, first=1) == 48
    assert rows.found(RequestId("b")) == 0
    for source, destination in ((Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)):
        rows("prefill-0", MovePages(PageMove(A, source, destination, b"", (1, 2), (3, 4))), 3.0)
    assert rows.back == 2
