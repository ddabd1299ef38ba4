"""What a request is predicted to meet: from what was measured, and from guesses where nothing was."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.forecasts import PROMPT_TOKEN_S, STEP_S, Forecasts
from jdisagg.policy.pace import Pace
from jdisagg.policy.worker_state import WorkerState
from tests.policy.test_routing import look
from tests.sim.cases import request, worker

P, D = WorkerId("p"), WorkerId("d")


def forecasts() -> Forecasts:
    peers = {P: WorkerState(worker("p", Role.PREFILL)), D: WorkerState(worker("d", Role.DECODE, short_prompt_tokens=8))}
    return Forecasts(peers, Pace(), short_weight=2.0)


def test_where_nothing_was_measured_there_are_guesses():
    found = forecasts().of(request("a", max_tokens=5), 0.0)
    assert found.prefill(look("p", Role.PREFILL), 8) == pytest.approx(8 * PROMPT_TOKEN_S)
    assert found.prefill(look("d", Role.DECODE), 8) == pytest.approx(2 * 8 * PROMPT_TOKEN_S), "rows there wait for it"
    assert found.decode(look("d", Role.DECODE)) == pytest.approx(4 * STEP_S * 1.25)
    assert found.transfer(P, D, 100) >= found.least_transfer(D, 100) > 0


def test_a_queue_is_the_tokens_before_it_at_the_workers_own_pace():
    known = forecasts()
    known.pace.prompt.learn(P, 0.5, 0.0)
    known.peers[P].book(request("b").request_id, 10.0, 0.0)
    assert known.of(request("a"), 0.0).queue(look("p", Role.PREFILL)) == pytest.approx(5.0)
    late = replace(request("a"), arrival_s=-3.0)
    assert known.of(late, 0.0).queue(look("p", Role.PREFILL)) == pytest.approx(8.0), "what it waited counts"
    known.peers[P].prefilled(request("b").request_id)
    assert known.of(request("a"), 0.0).queue(look("p", Role.PREFILL)) == 0.0


def test_prompts_that_share_steps_make_a_line_no_slower_than_it_is():
    """Four prompts of a step each take a second for ten tokens, and the line forty tokens a second."""
    known = forecasts()
    known.peers[P].book(request("b").request_id, 80.0, 0.0)
    known.pace.prompt.learn(P, 0.1, 1.0)
    assert known.of(request("a", arrival_s=1.0), 1.0).queue(look("p", Role.PREFILL)) == pytest.approx(8.0)
    for _ in range(4):
        known.drain.done(P, 10.0, 0.0, 1.0)
    found = known.of(request("a", arrival_s=1.0), 1.0)
    assert 1.7 <= found.queue(look("p", Role.PREFILL)) < 2.4
    assert found.prefill(look("p", Role.PREFILL), 8) < 0.3


def test_a_crowded_worker_decodes_more_slowly_and_its_gap_is_learnt_as_if_alone():
    known = forecasts()
    for name in "xyzw":
        known.peers[D].book(request(name).request_id, 0.0, 8.0)
    known.decoded(D, 0.2, 0.0)
    assert known.steps.of(D, 0.0) == pytest.approx(0.1), "four of four slots were taken"
    assert known.of(request("a", max_tokens=2), 0.0).decode(look("d", Role.DECODE)) == pytest.approx(0.1 * 2.25)


def test_a_lost_worker_teaches_nothing_any_more():
    known = forecasts()
    known.decoded(D, 0.2, 0.0)
    known.forget(D)
    assert known.steps.of(D, 0.0) is None
    known.peers = {P: known.peers[P]}
    known.decoded(D, 0.2, 0.0)
    known.shipped(P, D, 10, 1.0)
    assert known.steps.of(D, 0.0) is None


def test_objectives_are_of_the_request_and_none_where_it_asks_for_none():
    free, asked = (forecasts().of(each, 0.0) for each in (request("a"), replace(request("a"), ttft_s=0.3, tpot_s=0.01)))
    assert free.ttft_s == free.later_s == float("inf")
    assert (asked.ttft_s, asked.later_s) == (0.3, pytest.approx(0.07))


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.integers(0, 1000)), max_size=9), st.integers(0, 1000))
def test_more_tokens_never_take_less(told, tokens):
    known = forecasts()
    for seconds, shipped in told:
        known.shipped(P, D, shipped, seconds)
    found = known.of(request("a"), 0.0)
    assert found.transfer(P, D, tokens + 1) > found.transfer(P, D, tokens) >= found.least_transfer(D, tokens) >= 0
