"""A router after another: fronts ask for their streams, workers say what they have kept; either comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.events import Cancel, Reject, Submit, TermBegan, WorkerJoined, WorkerLost
from jdisagg.core.messages import Abort, Adopt, Ended, Kept, Reserve
from jdisagg.core.request import Attempt, FinishReason, SamplingParams
from jdisagg.core.worker_config import Role
from jdisagg.policy.router.request_state import Waiting
from jdisagg.policy.router.router import EPOCHS_PER_TERM
from tests.policy.router.test_router import A, D, P, Talk
from tests.sim.cases import request, worker

OLD = 7  # an epoch of the router before
KEPT = Kept(Attempt(A, OLD), 0)


def talk_after(output: tuple[int, ...] = (10, 11), **limits: Any) -> Talk:
    """A front has asked for the rest of this."""
    talk = Talk(**{"first_epoch": 100, "adopt_s": 5.0, "workers_return": True, **limits})
    talk.take(Submit(request("a", max_tokens=6), output, resumed=True))
    return talk


def end(talk: Talk, epoch: int, *tokens: int, index: int) -> None:
    talk.drawn(D, epoch, index, *tokens)
    talk.says(D, Ended(Attempt(A, epoch), FinishReason.LENGTH, talk.now_s, index + len(tokens)))


def test_a_stream_that_a_worker_has_kept_goes_on_where_its_client_is():
    talk = talk_after()
    assert not talk.sent(Reserve), "it waits for whoever has kept it"
    talk.says(D, KEPT)
    assert talk.sent(Adopt) == [(D, Adopt(Attempt(A, OLD), 2))]
    end(talk, OLD, 12, 13, 14, 15, index=2)
    assert talk.told() == [12, 13, 14, 15] and talk.finishes()[0].reason is FinishReason.LENGTH
    assert not talk.router.rows and not talk.sent(Reserve) and not talk.sent(Abort)


def test_the_worker_may_speak_before_the_front():
    talk = Talk(first_epoch=100)
    talk.says(D, KEPT)
    assert not talk.sent(Abort)
    talk.take(Submit(request("a", max_tokens=6), (10, 11), resumed=True))
    assert talk.sent(Adopt) == [(D, Adopt(Attempt(A, OLD), 2))]
    end(talk, OLD, 12, 13, 14, 15, index=2)
    assert talk.told() == [12, 13, 14, 15]


def test_a_stream_whose_client_has_no_token_yet_is_adopted_with_its_first():
    talk = Talk(first_epoch=100)
    talk.says(D, KEPT)
    talk.take(Submit(request("a", max_tokens=6), (), resumed=True))
    assert talk.sent(Adopt) == [(D, Adopt(Attempt(A, OLD), 0))] and not talk.sent(Reserve)


def test_a_stream_in_line_is_adopted_from_there():
    talk = Talk([worker("prefill-0", Role.PREFILL)], workers_return=True, first_epoch=100)
    talk.take(Submit(request("a", max_tokens=6), (), resumed=True))
    assert len(talk.router.queue) == 1
    row = talk.router.rows[A]
    talk.router.adoption.requests.peers[D] = talk.router.peers[P]  # somebody who speaks
    talk.says(D, KEPT)
    assert not talk.router.queue and row.decode == D


def test_tokens_that_the_client_has_are_not_told_again():
    talk = talk_after((10, 11, 12))
    talk.says(D, KEPT)
    end(talk, OLD, 11, 12, 13, 14, 15, index=1)
    assert talk.told() == [13, 14, 15]


def test_a_stream_that_nobody_has_kept_is_prefilled_with_what_its_client_has():
    talk = talk_after()
    assert talk.router.rows[A].waiting is Waiting.KEEPER
    talk.fire("row/a")
    assert talk.now_s == 5.0
    ((_, reserve),) = talk.sent(Reserve)
    assert reserve.prompt_tokens == 8 and reserve.num_output == 2 and reserve.attempt.epoch == 100


def test_a_word_of_what_was_kept_that_comes_too_late_is_refused():
    talk = talk_after()
    talk.fire("row/a")
    talk.says(D, KEPT)
    assert [(to, each.attempt) for to, each in talk.sent(Abort)] == [(D, Attempt(A, OLD))]
    assert talk.router.rows[A].epoch == 100


def test_a_client_that_lacks_tokens_from_before_the_attempt_is_served_anew():
    talk = talk_after((10,))
    talk.says(D, Kept(Attempt(A, OLD), 3))
    assert not talk.sent(Adopt) and talk.sent(Abort)
    talk.fire("row/a")
    assert talk.sent(Reserve)


def test_prompt_logprobs_that_nobody_has_any_more_are_computed_anew():
    talk = Talk(first_epoch=100)
    talk.says(D, KEPT)
    scored = SamplingParams(max_tokens=6, prompt_logprobs=1)
    talk.take(Submit(replace(request("a"), sampling=scored), (), resumed=True))
    assert not talk.sent(Adopt) and talk.sent(Abort) and talk.sent(Reserve)


def test_an_answer_that_was_whole_only_ends():
    talk = talk_after((10, 11, 12, 13, 14, 15))
    assert talk.finishes()[0].reason is FinishReason.LENGTH and not talk.router.rows
    talk = Talk(first_epoch=100)
    talk.says(D, KEPT)
    stopped = request("a", max_tokens=6, stop_token_ids=(11,))
    talk.take(Submit(stopped, (10, 11), resumed=True))
    assert talk.finishes()[0].reason is FinishReason.STOP and talk.sent(Abort), "what was kept is refused"


def test_a_running_stream_is_not_turned_away_by_a_full_house():
    talk = Talk([worker("prefill-0", Role.PREFILL)], workers_return=True, queue_limit=1, first_epoch=100)
    talk.submit(request("x"))
    talk.take(Submit(request("a", max_tokens=6), (), resumed=True))
    talk.submit(request("y"))
    assert [effect.request_id for effect in talk.effects if isinstance(effect, Reject)] == ["y"]


def test_a_client_that_goes_while_its_stream_waits_is_forgotten():
    talk = talk_after()
    talk.take(Cancel(A))
    assert talk.finishes()[0].reason is FinishReason.ABORT and not talk.router.rows
    talk.says(D, KEPT)
    talk.take(Cancel(A))
    assert talk.router.adoption.kept, "until its worker gives it up"
    talk.says(D, Abort(Attempt(A, OLD), "no router has asked for it in time"))
    assert not talk.router.adoption.kept


@pytest.mark.parametrize("first", ["front", "worker"])
def test_a_worker_that_is_lost_has_kept_nothing(first: str):
    talk = talk_after() if first == "front" else Talk(first_epoch=100, workers_return=True)
    talk.says(D, KEPT)
    talk.take(WorkerLost(D))
    assert not talk.router.adoption.kept
    if first == "front":
        talk.take(WorkerJoined(worker("decode-1", Role.DECODE)))
        assert talk.sent(Reserve)[0][1].prompt_tokens == 8, "it goes on elsewhere, with its tokens"


def test_a_worker_that_cannot_tell_what_it_said_it_kept_costs_an_attempt_and_no_token():
    talk = talk_after()
    talk.says(D, KEPT)
    talk.says(D, Abort(Attempt(A, OLD), "it was kept for a router no longer"))
    assert talk.sent(Reserve)[0][1].num_output == 2 and talk.router.rows[A].failures == 1


def test_an_adopted_stream_that_is_silent_is_begun_anew_elsewhere():
    talk = talk_after(stall_timeout_s=3.0)
    talk.says(D, KEPT)
    while talk.router.rows[A].waiting is Waiting.TOKEN:
        talk.fire("row/a")
    assert talk.sent(Reserve)[0][1].num_output == 2


def test_what_somebody_unknown_has_kept_is_nothing():
    talk = talk_after()
    talk.says("decode-9", KEPT)  # type: ignore[arg-type]
    assert not talk.sent(Adopt) and not talk.router.adoption.kept


def test_attempts_and_role_changes_of_a_term_are_numbered_above_all_of_the_terms_before():
    epochs = list[int]()
    for term in (1, 2, 5):
        talk = Talk(workers_return=True)
        talk.take(TermBegan(term))
        talk.take(Submit(request("a")))
        talk.take(Submit(request("b")))
        epochs += [message.attempt.epoch for _, message in talk.sent(Reserve)]
        assert next(talk.router.members._lives) >= term * EPOCHS_PER_TERM
    assert epochs == sorted(set(epochs)) and len(epochs) == 6
    assert [epoch // EPOCHS_PER_TERM for epoch in epochs] == [1, 1, 2, 2, 5, 5]


def test_a_term_that_is_raised_leaves_running_requests_their_attempts():
    talk = Talk(workers_return=True)
    talk.take(TermBegan(1))
    talk.take(Submit(request("a")))
    talk.take(TermBegan(9))
    talk.take(Submit(request("b")))
    assert [message.attempt.epoch // EPOCHS_PER_TERM for _, message in talk.sent(Reserve)] == [1, 9]
    assert talk.router.rows[A].epoch // EPOCHS_PER_TERM == 1
