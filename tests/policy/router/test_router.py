"""The router, word by word; the test speaks for every worker."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    Cancel,
    EmitTokens,
    Finish,
    Received,
    Reject,
    Send,
    SetTimer,
    Submit,
    TimerFired,
    WorkerLost,
)
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Commit,
    Drawn,
    Ended,
    Message,
    Preempted,
    Progress,
    Refused,
    Reserve,
    Reserved,
    StartPrefill,
    TokenDelta,
    View,
)
from jdisagg.core.request import Attempt, FinishReason, Phase, Request, RequestId, Sampled, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role
from jdisagg.policy.router.router import Router
from tests.sim.cases import pair, request, worker

A1 = Attempt(RequestId("a"), 1)

P, D, D1 = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-1")
A = RequestId("a")


class Talk:
    """Speaks to one router and remembers what it did."""

    def __init__(self, workers: Any = None, **limits: Any) -> None:
        self.router, self.now_s = Router(RouterConfig(**limits), workers or pair()), 0.0
        self.effects: list[Any] = []
        self.timers: dict[str, float] = {}

    def take(self, event: Any) -> list[Any]:
        effects = self.router.handle(event, self.now_s)
        self.timers |= {effect.key: effect.at_s for effect in effects if isinstance(effect, SetTimer)}
        self.effects += effects
        return effects

    def submit(self, each: Request) -> list[Any]:
        return self.take(Submit(each))

    def says(self, sender: WorkerId, message: Message) -> list[Any]:
        return self.take(Received(sender, message))

    def fire(self, key: str) -> list[Any]:
        self.now_s = max(self.now_s, self.timers.pop(key))
        return self.take(TimerFired(key))

    def drawn(self, sender: WorkerId, epoch: int, index: int, *tokens: int) -> list[Any]:
        return self.says(
            sender, Drawn((TokenDelta(Attempt(A, epoch), index, tuple(Sampled(token) for token in tokens)),))
        )

    def reach(self, sender: WorkerId, epoch: int, mark: Mark) -> list[Any]:
        return self.says(sender, Progress(Attempt(A, epoch), mark, self.now_s))

    def to_decode(self, **sampling: Any) -> None:
        """Request `a`, epoch 1, its first token 10 told, decoding."""
        self.submit(request("a", 6, **sampling))
        self.says(D, Reserved(A1, (1, 2, 3, 4)))
        self.drawn(P, 1, 0, 10)
        self.reach(P, 1, Mark.FIRST_TOKEN)
        self.reach(D, 1, Mark.COMMITTED)

    def told(self) -> list[int]:
        emitted = [effect for effect in self.effects if isinstance(effect, EmitTokens)]
        return [sampled.token for effect in emitted for sampled in effect.delta.sampled]

    def sent(self, kind: type) -> list[tuple[WorkerId, Any]]:
        sends = [effect for effect in self.effects if isinstance(effect, Send)]
        return [(effect.to, effect.message) for effect in sends if isinstance(effect.message, kind)]

    def finishes(self) -> list[Finish]:
        return [effect for effect in self.effects if isinstance(effect, Finish)]


def test_a_request_is_reserved_then_started_then_told_and_then_finished_once():
    talk = Talk()
    talk.to_decode(max_tokens=3)
    talk.drawn(D, 1, 1, 11)
    talk.drawn(D, 1, 2, 12)
    talk.says(D, Ended(A1, FinishReason.LENGTH, 0.0, 3))
    assert [to for to, _ in talk.sent(Reserve)] == [D] and [to for to, _ in talk.sent(StartPrefill)] == [P]
    assert talk.told() == [10, 11, 12] and [finish.reason for finish in talk.finishes()] == [FinishReason.LENGTH]
    assert not talk.sent(Abort) and not talk.router.rows


def test_the_prefill_worker_learns_which_pages_to_fill():
    talk = Talk()
    talk.to_decode()
    (_, start), (_, reserve) = talk.sent(StartPrefill)[0], talk.sent(Reserve)[0]
    assert start.decode_pages == (1, 2, 3, 4) and start.decode_worker == D
    assert (start.attempt, start.request.prompt_tokens) == (reserve.attempt, reserve.prompt_tokens)


def test_a_word_that_comes_late_charges_no_other_part():
    talk = Talk()
    talk.to_decode()
    talk.reach(D, 1, Mark.FIRST_STEP)
    talk.now_s = 5.0
    for mark in (Mark.PREFILL_STARTED, Mark.FIRST_TOKEN, Mark.FIRST_STEP):
        talk.reach(P, 1, mark)
    talk.take(Cancel(A))
    parts = talk.finishes()[0].ledger.parts_ns()
    assert parts["decode"] == 5_000_000_000 == sum(parts.values())


def test_tokens_that_come_out_of_order_are_told_in_order_and_once():
    talk = Talk()
    talk.to_decode(max_tokens=5)
    talk.drawn(D, 1, 3, 13)
    talk.drawn(D, 1, 2, 12)
    assert talk.told() == [10]
    talk.drawn(D, 1, 1, 11)
    talk.drawn(D, 1, 2, 12)
    assert talk.told() == [10, 11, 12, 13]


def test_an_end_waits_for_the_tokens_before_it():
    talk = Talk()
    talk.to_decode(max_tokens=3)
    talk.says(D, Ended(A1, FinishReason.LENGTH, 0.0, 3))
    talk.drawn(D, 1, 2, 12)
    assert not talk.finishes()
    talk.drawn(D, 1, 1, 11)
    assert talk.told() == [10, 11, 12] and len(talk.finishes()) == 1


def test_late_words_of_an_earlier_attempt_change_nothing():
    talk = Talk()
    talk.to_decode()
    talk.says(D, Preempted(A1, (10,), "no pages"))
    row = talk.router.rows[A]
    before = (row.phase, row.epoch, row.waiting, list(row.ledger.marks))
    talk.drawn(D, 1, 1, 99)
    talk.says(D, Ended(A1, FinishReason.STOP, 0.0, 2))
    talk.reach(D, 1, Mark.FIRST_STEP)
    talk.says(D, Reserved(A1, (9, 9)))
    talk.says(D, Preempted(A1, (), "again"))
    assert talk.told() == [10] and not talk.finishes()
    assert (row.phase, row.epoch, row.waiting, list(row.ledger.marks)) == before


def test_a_preempted_request_is_prefilled_again_with_its_output():
    talk = Talk()
    talk.to_decode(max_tokens=8)
    talk.drawn(D, 1, 1, 11)
    talk.says(D, Preempted(A1, (10, 11), "no pages"))
    _, again = talk.sent(Reserve)[-1]
    assert (again.attempt.epoch, again.num_output) == (2, 2)
    assert again.prompt_tokens == 8 and again.sampling.max_tokens == 6
    assert talk.router.rows[A].to_prefill().prompt == (*request("a", 6).prompt, 10, 11)


def test_a_refusal_waits_for_word_of_free_pages():
    talk = Talk()
    talk.submit(request("a", 6))
    talk.says(D, Refused(A1, "full"))
    assert len(talk.sent(Reserve)) == 1
    talk.says(D, View(60, 4, 0, 0))
    assert [message.attempt.epoch for _, message in talk.sent(Reserve)] == [1, 2]


def test_a_full_house_is_asked_again_should_its_word_be_lost():
    talk = Talk(capacity_retry_s=2.0)
    talk.submit(request("a", 6))
    talk.says(D, Refused(A1, "full"))
    talk.fire("capacity")
    assert talk.now_s == 2.0 and len(talk.sent(Reserve)) == 2


def test_reservations_asked_for_and_not_yet_answered_are_counted():
    talk = Talk(pair(num_slots=1, reservations_ahead=1))
    for name in "abc":
        talk.submit(request(name, 6))
    assert [message.attempt.request_id for _, message in talk.sent(Reserve)] == ["a", "b"]


def test_an_answer_that_does_not_come_is_asked_of_another():
    talk = Talk([*pair(), worker("decode-1", Role.DECODE)], handoff_timeout_s=5.0)
    talk.submit(request("a", 6))
    talk.fire("row/a")
    assert [to for to, _ in talk.sent(Reserve)] == [D, D1]
    assert [(to, message.attempt.epoch) for to, message in talk.sent(Abort)] == [(D, 1)]
    assert not talk.router.peers[D].unanswered and talk.router.peers[D].work_tokens == 0


def test_a_late_reservation_for_an_attempt_that_is_over_starts_nothing():
    talk = Talk([*pair(), worker("decode-1", Role.DECODE)], handoff_timeout_s=5.0)
    talk.submit(request("a", 6))
    talk.fire("row/a")
    talk.says(D, Reserved(A1, (1, 2)))
    assert not talk.sent(StartPrefill)
    assert [message.attempt.epoch for to, message in talk.sent(Abort) if to == D] == [1, 1], (
        "that reservation is to be given back"
    )


def test_an_abort_is_sent_again_until_acknowledged_and_not_for_ever():
    talk = Talk(abort_tries=3)
    talk.to_decode()
    talk.take(Cancel(A))
    for _ in range(5):
        if f"abort/{D}/1/a" in talk.timers:
            talk.fire(f"abort/{D}/1/a")
    assert len(talk.sent(Abort)) == 3 and len(talk.router.aborts) == 0


def test_a_cancel_for_a_stop_string_ends_as_stop():
    talk = Talk()
    talk.to_decode()
    talk.take(Cancel(A, FinishReason.STOP))
    assert [finish.reason for finish in talk.finishes()] == [FinishReason.STOP] and len(talk.sent(Abort)) == 1


def test_a_stop_string_found_once_its_answer_was_given_back_ends_it_as_stop():
    """Texts are searched beside the router: the row may be in its queue again by then, with the tokens so far."""
    talk = Talk()
    talk.to_decode(max_tokens=8)
    talk.drawn(D, 1, 1, 11)
    talk.says(D, Preempted(A1, (10, 11), "no pages"))
    talk.says(D, Refused(Attempt(A, 2), "full"))
    assert talk.router.rows[A].phase is Phase.QUEUED
    talk.take(Cancel(A, FinishReason.STOP))
    assert [finish.reason for finish in talk.finishes()] == [FinishReason.STOP]
    assert not talk.router.rows and not talk.router.requests.queue


@pytest.mark.parametrize(
    ("sender", "phase", "blamed"), [(D, "prefilling", P), (P, "prefilling", P), (P, "shipping", D)]
)
def test_whoever_waited_in_vain_is_not_the_one_to_avoid(sender, phase, blamed):
    talk = Talk()
    talk.submit(request("a", 6))
    talk.says(D, Reserved(A1, (1, 2)))
    if phase == "shipping":
        talk.drawn(P, 1, 0, 10)
    talk.says(sender, Abort(A1, "nothing was heard", FinishReason.TIMEOUT))
    assert talk.router.rows[A].avoid == {blamed}


@pytest.mark.parametrize(
    "lie",
    [
        Drawn((TokenDelta(A1, 0, (Sampled(7),)),)),
        Ended(A1, FinishReason.STOP, 0.0, 0),
        Preempted(A1, (), "no pages"),
        Progress(A1, Mark.COMMITTED, 0.0),
        Abort(A1, "not mine"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_nobody_speaks_for_a_request_that_is_not_with_him(lie):
    talk = Talk([*pair(), worker("decode-1", Role.DECODE)])
    talk.submit(request("a", 6))
    taken = D if talk.router.rows[A].decode == D else D1
    stranger = D1 if taken == D else D
    talk.says(taken, Reserved(A1, (1, 2)))
    talk.says(stranger, lie)
    row = talk.router.rows[A]
    assert (row.epoch, row.output, row.phase.value, row.failures) == (1, [], "prefilling", 0)


@pytest.mark.parametrize(
    "lie",
    [
        Drawn((TokenDelta(A1, 0, (Sampled(7),)),)),
        Ended(A1, FinishReason.STOP, 0.0, 0),
        Preempted(A1, (), "no pages"),
        Progress(A1, Mark.COMMITTED, 0.0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_of_what_nobody_has_begun_there_is_nothing_to_say(lie):
    talk = Talk()
    talk.submit(request("a", 6))
    talk.says(D, lie)
    assert not talk.finishes() and not talk.router.queue and not talk.router.rows[A].output
    talk.fire("row/a")  # the answer did not come: tried again, nothing was told
    assert talk.router.rows[A].failures == 1


def test_a_bed_is_answered_for_by_who_was_asked():
    talk = Talk()
    talk.submit(request("a", 6))
    talk.says(P, Reserved(A1, (1, 2)))
    assert talk.router.rows[A].phase.value == "queued"


def test_tokens_that_were_not_asked_for_are_not_kept():
    talk = Talk()
    talk.to_decode()
    row = talk.router.rows[A]
    talk.drawn(D, row.epoch, 10**6, *range(1000))
    assert not row.early


def test_a_word_that_is_for_a_worker_is_refused_by_name_and_changes_nothing():
    talk = Talk()
    talk.submit(request("a", 6))
    with pytest.raises(SenselessWord, match="decode-0 says Commit, which is not for a router"):
        talk.says(D, Commit(A1, Sampled(1), 6, 1))
    talk.says(D, Reserved(A1, (1, 2)))
    assert talk.router.rows[A].phase.value == "prefilling"


def test_an_acknowledged_abort_is_not_sent_again():
    talk = Talk()
    talk.to_decode()
    talk.take(Cancel(A))
    talk.says(D, AbortAck(A1))
    talk.fire(f"abort/{D}/1/a")
    assert len(talk.sent(Abort)) == 1


def test_a_cancel_during_prefill_aborts_both_ends():
    talk = Talk()
    talk.submit(request("a", 6))
    talk.says(D, Reserved(A1, (1, 2)))
    talk.take(Cancel(A))
    assert sorted(to for to, _ in talk.sent(Abort)) == [D, P]
    assert [finish.reason for finish in talk.finishes()] == [FinishReason.ABORT]


def test_a_source_that_missed_its_ack_does_not_end_a_request_that_decodes():
    talk = Talk()
    talk.to_decode()
    talk.says(P, Abort(A1, "no Ack", FinishReason.TIMEOUT))
    talk.drawn(D, 1, 1, 11)
    assert talk.told() == [10, 11] and not talk.finishes() and (P, AbortAck(A1)) in talk.sent(AbortAck)


def test_a_silent_decode_worker_has_a_deadline_that_tokens_move():
    talk = Talk(stall_timeout_s=10.0, max_retries=0)
    talk.to_decode()
    talk.now_s = 8.0
    talk.drawn(D, 1, 1, 11)
    talk.fire("row/a")
    assert talk.now_s == 10.0 and not talk.finishes()
    talk.fire("row/a")
    assert talk.now_s == 18.0 and talk.finishes()[0].reason is FinishReason.TIMEOUT


def test_an_output_that_is_complete_ends_naturally_though_its_end_was_lost():
    talk = Talk(stall_timeout_s=10.0)
    talk.to_decode(max_tokens=2)
    talk.drawn(D, 1, 1, 11)
    while not talk.finishes():
        talk.fire("row/a")
    assert talk.finishes()[0].reason is FinishReason.LENGTH


def test_losing_the_prefill_worker_after_the_commit_costs_nothing():
    talk = Talk([*pair(), worker("prefill-1", Role.PREFILL)])
    talk.to_decode()
    talk.take(WorkerLost(P))
    assert len(talk.sent(Reserve)) == 1 and talk.router.rows[A].epoch == 1


def test_failures_are_bounded_and_the_last_one_is_what_the_client_hears():
    talk = Talk(max_retries=2)
    talk.submit(request("a", 6))
    for epoch in (1, 2, 3):
        talk.says(D, Reserved(Attempt(A, epoch), (1, 2)))
        talk.says(P, Abort(Attempt(A, epoch), f"prefill-0 failed: reason {epoch}"))
    (finish,) = talk.finishes()
    assert finish.reason is FinishReason.ERROR and "reason 3" in finish.detail and "attempt 3" in finish.detail


def test_a_rejected_request_is_told_when_to_come_back_and_leaves_nothing_behind():
    talk = Talk(pair(num_slots=1, reservations_ahead=0), queue_limit=2)
    for name in ("a", "b", "c", "d"):
        talk.submit(request(name))
    (reject,) = [effect for effect in talk.effects if isinstance(effect, Reject)]
    assert reject.request_id == "d" and reject.retry_after_s >= 1 and "limit is 2" in reject.detail
    assert set(talk.router.rows) == {"a", "b", "c"}


@pytest.mark.parametrize("deadline_s", [3.0, None])
def test_the_wait_for_a_reservation_ends_at_its_deadline(deadline_s):
    talk = Talk(pair(num_slots=1, reservations_ahead=0), queue_timeout_s=7.0)
    talk.submit(request("first"))
    waits = request("a")
    talk.submit(Request(A, waits.prompt, waits.sampling, queue_deadline_s=deadline_s))
    talk.fire("row/a")
    assert talk.now_s == (deadline_s or 7.0) and [finish.reason for finish in talk.finishes()] == [FinishReason.TIMEOUT]


def test_an_answer_that_lost_its_pages_late_and_is_refused_new_ones_waits_as_long_as_any():
    talk = Talk(queue_timeout_s=7.0)
    talk.to_decode(max_tokens=8)
    talk.now_s = 100.0  # long behind the deadline of its first wait
    talk.says(D, Preempted(A1, (10,), "no pages"))
    _, again = talk.sent(Reserve)[-1]
    talk.now_s = 101.0
    talk.says(D, Refused(again.attempt, "full"))
    while not talk.finishes():
        talk.fire("row/a")
    assert talk.now_s == 107.0 and [finish.reason for finish in talk.finishes()] == [FinishReason.TIMEOUT]


def test_an_id_that_is_running_cannot_be_submitted_again():
    talk = Talk()
    talk.submit(request("a"))
    with pytest.raises(AssertionError, match="'a' is running"):
        talk.submit(request("a"))


def test_an_id_may_come_again_after_its_end_and_old_words_do_not_reach_it():
    talk = Talk()
    talk.to_decode()
    talk.take(Cancel(A))
    talk.submit(request("a", 6))
    talk.drawn(D, 1, 1, 99)
    assert talk.told() == [10] and talk.router.rows[A].epoch == 2
