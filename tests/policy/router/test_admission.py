"""Admission: capacity and objectives decide whether a request is accepted, with both numbers in the error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.events import Finish, Reject, Submit, WorkerLost
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Ended, Reserve, Reserved
from jdisagg.core.request import Adapter, Attempt, FinishReason, Phase, Request, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache.prefix_cache import page_hashes
from jdisagg.policy.router.admission import LONGEST_RETRY_S, fitting, has_adapter_room
from jdisagg.policy.router.estimates import FORGET_S, Drain, crowd
from tests.policy.router.test_router import A1, Talk
from tests.sim.cases import pair, request, worker

ADAPTERS = [None, *(Adapter(name, name * 32, f"/{name}") for name in "abcd")]
KINDS = st.sampled_from(ADAPTERS)


def asking(name: str, adapter: Adapter | None) -> Request:
    plain = request(name, 6)
    return replace(plain, sampling=replace(plain.sampling, adapter=adapter))


@given(KINDS, st.lists(KINDS), st.integers(1, 4))
def test_there_is_room_just_where_so_many_hold_them_all(asked: Any, running: list[Any], most: int) -> None:
    rows = [asking("x", each) for each in running]
    needed = {*running, asked} - {None}
    fits = asked is None or asked in running or len(needed) <= most
    if len({*running} - {None}) <= most:
        assert has_adapter_room(asking("y", asked), rows, most) == fits
    assert has_adapter_room(asking("y", asked), rows, 0)


def reserved(talk: Talk) -> list[str]:
    return [message.request_id for _, message in talk.sent(Reserve)]


def test_a_request_waits_for_the_adapters_that_run_and_goes_when_one_has_ended() -> None:
    talk = Talk(max_loras=2)
    _, a, b, c, _ = ADAPTERS
    for name, adapter in (("1", a), ("2", b), ("3", a), ("4", c), ("5", None)):
        talk.submit(asking(name, adapter))
        if name != "4":
            talk.says(D, Reserved(Attempt(RequestId(name), int(name)), (1, 2)))
    assert reserved(talk) == ["1", "2", "3"]  # the fifth does not overtake the fourth
    talk.says(D, Ended(Attempt(RequestId("2"), 2), FinishReason.LENGTH, 0.0, 0))
    assert reserved(talk) == ["1", "2", "3", "4", "5"]


def test_who_waits_for_an_adapter_is_told_when_its_time_is_over() -> None:
    talk = Talk(max_loras=1, queue_timeout_s=5.0)
    talk.submit(asking("1", ADAPTERS[1]))
    talk.take(Submit(asking("2", ADAPTERS[2])))
    talk.fire("row/2")
    (ended,) = [each for each in talk.effects if isinstance(each, Finish)]
    assert (ended.request_id, ended.reason) == ("2", FinishReason.TIMEOUT)
    assert P not in [to for to, _ in talk.sent(Reserve)]


P, P1, D = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")


def asked(name: str, prompt_tokens: int = 6, ttft_s: float | None = None, tpot_s: float | None = None) -> Request:
    return replace(request(name, prompt_tokens), ttft_s=ttft_s, tpot_s=tpot_s)


class Known(Talk):
    """A router that knows its workers' paces: a second a prompt token, a second a token that is decoded alone."""

    def __init__(self, workers: Any = None, **limits: Any) -> None:
        super().__init__(workers, **limits)
        for name, peer in self.router.peers.items():
            if peer.config.role.prefills:
                self.router.routes.forecasts.drain.done(name, 1.0, -1.0, 0.0)
            if peer.config.role.decodes:
                self.router.routes.forecasts.steps.learn(name, 1.0, 0.0)

    def refused(self, each: Request) -> Reject | None:
        found = [effect for effect in self.submit(each) if isinstance(effect, Reject)]
        assert (each.request_id in self.router.rows) == (not found), "refused and kept, or neither"
        return found[0] if found else None

    def decoding(self, name: str, tokens: int, max_tokens: int = 8) -> None:
        """A request that has drawn so many of its tokens on the first decode worker."""
        self.submit(request(name, 1, max_tokens=max_tokens))
        row = self.router.rows[request(name).request_id]
        row.phase, row.output = Phase.DECODING, [0] * tokens
        self.router.peers[P].prefilled(row.request_id)
        row.decode = D
        self.router.peers[D].book(row.request_id, 0.0, 8.0)


def test_a_first_token_that_will_be_late_is_refused_with_what_was_predicted_and_what_was_asked():
    talk = Known()
    talk.router.peers[P].book(request("other").request_id, 30.0, 0.0)
    found = talk.refused(asked("a", 6, ttft_s=20.0))
    assert found is not None and found.retry_after_s == pytest.approx(28.0)
    assert "48 s (line 0 + queue 30 + prefill 18, on prefill-0), asked for within 20" in found.detail
    assert talk.refused(asked("b", 6, ttft_s=50.0)) is None


def test_what_nobody_asked_for_is_nobodys_reason():
    talk = Known()
    talk.router.peers[P].book(request("other").request_id, 3000.0, 0.0)
    assert talk.refused(asked("a", 6)) is None
    assert Known(early_rejection=False).refused(asked("a", 6, ttft_s=0.1)) is None


@pytest.mark.parametrize("output", [(), (10, 11)])
def test_a_stream_that_another_router_had_taken_is_never_refused(output: tuple[int, ...]):
    talk, each = Known(), asked("a", 6, ttft_s=1e-6, tpot_s=1e-6)
    assert not any(isinstance(effect, Reject) for effect in talk.take(Submit(each, output, resumed=True)))
    assert each.request_id in talk.router.rows


def test_nobody_is_refused_by_a_guess():
    assert not any(isinstance(each, Reject) for each in Talk().submit(asked("a", 6, ttft_s=1e-3, tpot_s=1e-6)))
    stale = Known()
    stale.now_s = 1000.0
    assert stale.refused(asked("a", 6, ttft_s=1e-3, tpot_s=1e-6)) is None, "what was known is of long ago"


def test_another_worker_that_is_free_is_enough():
    talk = Known([*pair(), worker("prefill-1", Role.PREFILL)])
    talk.router.peers[P].book(request("other").request_id, 30.0, 0.0)
    assert talk.refused(asked("a", 6, ttft_s=20.0)) is None
    talk.router.peers[P1].book(request("more").request_id, 30.0, 0.0)
    assert talk.refused(asked("b", 6, ttft_s=20.0)) is not None
    talk.router.peers[P1].leaving = True
    talk.router.peers[P].prefilled(request("other").request_id)
    talk.router.peers[P].prefilled(request("a").request_id)
    assert talk.refused(asked("c", 6, ttft_s=20.0)) is None, "the one that leaves is not waited for"


def test_a_prompt_that_is_kept_is_not_computed_again():
    talk, first = Known(pair(prefix_caching=True), routing=Routing.CACHE_AWARE), asked("a", 16, ttft_s=10.0)
    assert talk.refused(first) is not None
    routes, config = talk.router.routes, talk.router.peers[P].config
    routes.directory.sent(config, page_hashes(first.prompt[:12], config.page_size))
    assert talk.refused(first) is None, "4 tokens are to be computed, not 16"


def test_a_line_before_the_door_counts():
    talk = Known()
    talk.router.peers[D].full = True
    for name in "xyz":
        talk.submit(request(name))
    assert len(talk.router.queue) == 3
    found = talk.refused(asked("a", 6, ttft_s=8.0))
    assert found is not None and "line 3 +" in found.detail


def test_a_crowd_that_will_have_left_when_the_prompt_is_done_is_no_reason():
    talk = Known()
    for name in "wxyz":
        talk.decoding(name, tokens=7)  # a token each, at two seconds a token: gone before the prompt's six seconds
    assert talk.refused(asked("a", 6, tpot_s=1.3)) is None


def test_a_crowd_that_will_still_be_there_is_one_and_it_says_when_to_come_again():
    talk = Known()
    for name in "wxyz":
        talk.decoding(name, tokens=0, max_tokens=16)  # 16 tokens at two seconds each
    found = talk.refused(asked("a", 6, tpot_s=1.3))
    assert found is not None and found.retry_after_s == pytest.approx(32.0 - 6.0)
    assert "a token is predicted every 2.25 s on decode-0, asked for every 1.3" in found.detail
    assert talk.refused(asked("b", 6, tpot_s=2.0)) is not None, "four slots of four, and it"
    assert talk.refused(asked("c", 6, tpot_s=2.0 + 1e-6)) is None or len(talk.router.peers[D].decode_work) >= 4
    assert talk.refused(replace(asked("d", 6, tpot_s=0.1), sampling=request("d", max_tokens=1).sampling)) is None


def test_what_no_empty_worker_can_do_is_told_to_come_much_later():
    found = Known().refused(asked("a", 6, tpot_s=0.5))
    assert found is not None and found.retry_after_s == LONGEST_RETRY_S


def test_prompts_still_being_computed_are_in_the_crowd_of_their_decode_worker():
    talk = Known()
    for name in "wxyz":
        talk.submit(request(name, 1))
    assert len(talk.router.peers[D].decode_work) == 4
    assert talk.refused(asked("a", 6, tpot_s=1.3)) is not None


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.integers(1, 64))
def test_one_more_beside_those_that_fit_is_as_fast_as_was_asked(objective_s: float, alone_s: float, slots: int):
    room = fitting(objective_s, alone_s, slots)
    assert 0 <= room <= slots
    if room:
        assert alone_s * crowd(room, slots) <= objective_s * (1 + 1e-9)
    if room < slots:
        assert alone_s * crowd(room + 1, slots) > objective_s


@given(st.floats(0.5, 100.0), st.floats(0.5, 100.0), st.integers(0, 4), st.integers(0, 60))
def test_whoever_asks_for_less_is_taken_where_one_who_asks_for_more_is(
    ttft_s: float, tpot_s: float, decoding: int, queued: int
):
    def talk() -> Known:
        found = Known()
        for number in range(decoding):
            found.decoding(f"d{number}", tokens=0)
        found.router.peers[P].book(request("other").request_id, float(queued), 0.0)
        return found

    strict = talk().refused(asked("a", 6, ttft_s=ttft_s, tpot_s=tpot_s))
    mild = talk().refused(asked("a", 6, ttft_s=2 * ttft_s, tpot_s=2 * tpot_s))
    assert strict is not None or mild is None
    for each in (strict, mild):
        assert each is None or 1.0 <= each.retry_after_s <= LONGEST_RETRY_S


def test_a_line_gets_shorter_by_what_is_done_together_and_one_behind_the_other():
    drain = Drain()
    assert drain.of(P, 0.0) is None
    drain.done(P, 100.0, began_s=0.0, now_s=1.0)
    assert drain.of(P, 1.0) == pytest.approx(0.01)
    for _ in range(200):
        drain.done(P, 100.0, began_s=0.5, now_s=1.0)  # they shared the step
    assert drain.of(P, 1.0) == pytest.approx(0.0, abs=1e-4)
    for step in range(200):
        drain.done(P, 100.0, began_s=0.0, now_s=2.0 + step)  # each waited long, and was done a second after another
    assert drain.of(P, 202.0) == pytest.approx(0.01, rel=0.01)
    drain.done(P, 100.0, began_s=230.0, now_s=231.0)
    assert drain.of(P, 231.0) == pytest.approx(0.01, rel=0.01), "idle hours are nobody's pace"


def test_a_worker_that_did_nothing_of_late_is_taken_to_be_like_the_others():
    drain = Drain()
    drain.done(P, 10.0, 0.0, 1.0)
    assert drain.of(P1, 1.0) == drain.of(P, 1.0) == pytest.approx(0.1)
    assert drain.of(P1, 1.0 + FORGET_S) is None
    drain.forget(P)
    assert drain.of(P1, 1.0) is None


def test_the_router_learns_it_from_first_tokens():
    talk = Talk()
    talk.submit(request("a", 8))
    talk.says(D, Reserved(A1, (1, 2, 3, 4)))
    talk.reach(P, 1, Mark.PREFILL_STARTED)
    talk.now_s = 2.0
    talk.drawn(P, 1, 0, 10)
    assert talk.router.routes.forecasts.drain.of(P, 2.0) == pytest.approx(2.0 / 8)
    talk.take(WorkerLost(P))
    assert talk.router.routes.forecasts.drain.of(P, 2.0) is None
