"""Estimates of output lengths, link speeds and request costs: from measurements, and from guesses without any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.labels import Labels, LinkClass
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.router.estimates import (
    MOST_PAIRS,
    PRIOR,
    PROMPT_TOKEN_S,
    STEP_S,
    Forecasts,
    LinkSpeeds,
    Pace,
    kv_bytes,
)
from jdisagg.policy.router.worker_view import WorkerState
from tests.policy.router.test_routing import look
from tests.sim.cases import request, worker


def at(name, role=Role.PREFILL, **labels):
    return worker(name, role, labels=Labels(**labels), kv_token_bytes=1000)


HERE = at("p0", host="h0", rack="r0", pod="x")
NEAR = at("d0", Role.DECODE, host="h0", rack="r0", pod="x")
RACK = at("d1", Role.DECODE, host="h1", rack="r0", pod="x")
AWAY = at("d2", Role.DECODE, host="h2", rack="r1", pod="x")


def test_who_knows_nothing_knows_that_near_is_faster():
    speeds = LinkSpeeds()
    seconds = [speeds.byte_s(HERE, other) for other in (NEAR, RACK, AWAY, at("d3", host="h9"))]
    assert seconds == sorted(seconds) and len(set(seconds)) == 4
    assert speeds.byte_s(HERE, AWAY) == pytest.approx(1 / PRIOR[LinkClass.POD])


def test_a_class_that_is_slower_than_thought_makes_the_others_slower_too():
    speeds = LinkSpeeds()
    for _ in range(5):
        speeds.learn(HERE, AWAY, 1e6, 10e6 / PRIOR[LinkClass.POD])
    assert speeds.byte_s(HERE, AWAY) == pytest.approx(10 / PRIOR[LinkClass.POD])
    assert speeds.byte_s(HERE, NEAR) == pytest.approx(10 / PRIOR[LinkClass.HOST])


def test_a_pair_is_like_its_class_until_enough_was_seen_of_it():
    speeds, other = LinkSpeeds(), at("p1", host="h1", rack="r0", pod="x")
    for _ in range(30):
        speeds.learn(other, AWAY, 1e6, 1e-3)
    speeds.learn(HERE, AWAY, 1e6, 1e-1)
    once = speeds.byte_s(HERE, AWAY)
    assert 1e-9 < once < 0.5e-7, "one slow transfer is not yet a slow link"
    for _ in range(30):
        speeds.learn(HERE, AWAY, 1e6, 1e-1)
        speeds.learn(other, AWAY, 1e6, 1e-3)
    assert speeds.byte_s(HERE, AWAY) > 0.75e-7
    assert speeds.byte_s(other, AWAY) < 0.5 * speeds.byte_s(HERE, AWAY)


def test_a_lost_workers_pairs_are_forgotten_and_its_class_is_not():
    speeds = LinkSpeeds()
    speeds.learn(HERE, RACK, 1e6, 1.0)
    speeds.forget(WorkerId("d1"))
    assert speeds.class_byte_s(LinkClass.RACK) == pytest.approx(1e-6)
    assert speeds.byte_s(HERE, RACK) == pytest.approx(1e-6)


@pytest.mark.parametrize("told", [(0.0, 1.0), (-5.0, 1.0), (5.0, 0.0), (5.0, float("inf")), (5.0, float("nan"))])
def test_what_tells_nothing_teaches_nothing(told):
    speeds = LinkSpeeds()
    speeds.learn(HERE, RACK, *told)
    assert speeds.class_byte_s(LinkClass.RACK) == pytest.approx(1 / PRIOR[LinkClass.RACK])


def test_no_more_pairs_are_remembered_than_are_allowed(monkeypatch):
    monkeypatch.setattr("jdisagg.policy.router.estimates.MOST_PAIRS", 3)
    speeds = LinkSpeeds()
    for index in range(9):
        speeds.learn(at(f"p{index}"), AWAY, 1e6, 1.0 + index)
    assert len(speeds._pairs) == 3 and MOST_PAIRS > 3


@given(st.lists(st.tuples(st.sampled_from([NEAR, RACK, AWAY]), st.floats(1, 1e9), st.floats(1e-6, 1e3)), max_size=20))
def test_no_link_is_faster_than_the_fastest_and_none_is_free(told):
    speeds = LinkSpeeds()
    for other, size_bytes, seconds in told:
        speeds.learn(HERE, other, size_bytes, seconds)
        assert 0 < speeds.least_byte_s <= min(speeds.byte_s(HERE, each) for each in (NEAR, RACK, AWAY)) * (1 + 1e-9)


def test_a_worker_that_does_not_say_its_bytes_has_some():
    assert kv_bytes(NEAR, 7) == 7000 and kv_bytes(worker("d", Role.DECODE), 1) > 0


def test_later_transfers_count_more_than_earlier_ones():
    """A link that has become slow is known to be slow after a few dozen transfers, and so it is when it recovers."""
    speeds = LinkSpeeds()
    for seconds in (1e-3, 1e-1, 1e-3):
        for _ in range(60):
            speeds.learn(HERE, AWAY, 1e6, seconds)
        assert speeds.byte_s(HERE, AWAY) == pytest.approx(seconds / 1e6, rel=0.2)


def test_what_one_pair_teaches_is_known_of_another_pair_of_its_class():
    speeds, other = LinkSpeeds(), at("p1", host="h5", rack="r0", pod="x")
    for _ in range(9):
        speeds.learn(HERE, RACK, 1e6, 2e-3)
    assert speeds.byte_s(other, RACK) == pytest.approx(2e-9)
    assert speeds.byte_s(RACK, HERE) == pytest.approx(2e-9), "the other way is of the same class"
    assert speeds.byte_s(other, AWAY) > speeds.byte_s(other, RACK), "and what is farther is slower still"


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
