"""A worker whose router is gone: what it decodes goes on for its grace, all else is given back at once."""

from __future__ import annotations

from jdisagg.core.events import RouterFound, RouterLost
from jdisagg.core.messages import Abort, Adopt, Drawn, Ended, Kept, View
from jdisagg.core.request import FinishReason, Request
from jdisagg.core.worker_config import Role
from jdisagg.policy.worker.orphans import GRACE_TIMER
from tests.policy.bench import Bench
from tests.sim.cases import definition, request, worker

GRACE_S = 20.0


def decoding(*requests: Request, grace_s: float = GRACE_S, role: Role = Role.DECODE) -> Bench:
    """A worker that decodes these."""
    bench = Bench(worker("decode-0", role, router_grace_s=grace_s))
    for each in requests:
        assert bench.reserve(each)
        bench.arrive(each)
        bench.commit(each)
    return bench


def drawn(bench: Bench, each: Request, since: int = 0) -> dict[int, int]:
    """Tokens by their places, of what was said from word `since` on; none twice."""
    told: dict[int, int] = {}
    for message in bench.heard[since:]:
        if not isinstance(message, Drawn):
            continue
        for delta in message.deltas:
            for place, sampled in enumerate(delta.sampled, delta.index):
                if delta.attempt == bench.attempt(each.request_id):
                    assert place not in told, f"token {place} was told twice"
                    told[place] = sampled.token
    return told


def adopt(bench: Bench, each: Request, index: int) -> int:
    """Where what is said from now on begins."""
    since = len(bench.heard)
    bench.says(Adopt(bench.attempt(each.request_id), index))
    return since


def test_what_is_decoded_goes_on_without_a_router_and_is_told_to_the_next_from_where_it_asks():
    a = request("a")
    bench = decoding(a)
    bench.read()
    bench.take(RouterLost())
    bench.read()
    bench.take(RouterFound())
    assert bench.said(Kept) == [Kept(bench.attempt("a"), 0)] and isinstance(bench.heard[-1], View)
    since = adopt(bench, a, 2)
    bench.read_all()
    assert [drawn(bench, a, since)[place] for place in range(2, 8)] == definition(a)[2:8]
    assert bench.said(Ended)[-1].reason is FinishReason.LENGTH and bench.worker.idle


def test_what_ended_without_a_router_is_told_with_its_end():
    a = request("a")
    bench = decoding(a)
    bench.take(RouterLost())
    bench.read_all()
    assert bench.worker.idle and bench.free_pages == bench.worker.config.num_pages, "pages do not wait for anybody"
    bench.take(RouterFound())
    since = adopt(bench, a, 0)
    assert list(drawn(bench, a, since).values()) == definition(a)[:8]
    (ended,) = [message for message in bench.heard[since:] if isinstance(message, Ended)]
    assert ended.num_output == 8


def test_a_client_that_has_all_but_the_end_is_told_the_end_alone():
    a = request("a")
    bench = decoding(a)
    bench.take(RouterLost())
    bench.read_all()
    bench.take(RouterFound())
    since = adopt(bench, a, 8)
    assert not drawn(bench, a, since) and isinstance(bench.heard[-1], Ended)


def test_the_first_token_is_told_again_as_well():
    a = request("a")
    bench = decoding(a)
    bench.take(RouterLost())
    bench.take(RouterFound())
    since = adopt(bench, a, 0)
    assert drawn(bench, a, since) == {0: definition(a)[0]}


def test_handoffs_and_prompts_are_given_up_at_once():
    a, b, c = request("a"), request("b"), request("c", 30)
    bench = decoding(a)
    assert bench.reserve(b) and bench.reserve(c)
    bench.arrive(b)
    bench.take(RouterLost())
    assert [owner.request_id for owner in bench.worker.decode.sequences] == ["a"]
    bench.take(RouterFound())
    assert [kept.attempt.request_id for kept in bench.said(Kept)] == ["a"]


def test_a_prefill_worker_keeps_nothing():
    bench = Bench(worker("prefill-0", Role.PREFILL, router_grace_s=GRACE_S))
    bench.start(request("a", 40))
    bench.take(RouterLost())
    bench.read_all()
    assert bench.worker.idle and GRACE_TIMER not in bench.timers


def test_what_no_router_asks_for_is_given_up_when_the_grace_is_over():
    a = request("a", max_tokens=60)
    bench = decoding(a)
    bench.take(RouterLost())
    bench.read()
    bench.fire(GRACE_TIMER)
    assert bench.now_s == GRACE_S
    bench.read_all()
    assert bench.worker.idle and bench.free_pages == bench.worker.config.num_pages


def test_the_grace_begins_anew_with_a_router_and_who_was_adopted_is_not_given_up():
    a, b = request("a", max_tokens=60), request("b", max_tokens=60)
    bench = decoding(a, b)
    bench.take(RouterLost())
    bench.now_s = GRACE_S - 1.0
    bench.take(RouterFound())
    adopt(bench, a, 1)
    bench.now_s = GRACE_S
    bench.fire(GRACE_TIMER)
    assert bench.now_s == 2 * GRACE_S - 1.0
    assert [owner.request_id for owner in bench.worker.decode.sequences] == ["a"]
    assert [message.attempt.request_id for message in bench.said(Abort)] == ["b"], "the router is told of it"


def test_an_early_timer_gives_nothing_up():
    a = request("a", max_tokens=60)
    bench = decoding(a)
    bench.take(RouterLost())
    bench.timers[GRACE_TIMER] = 1.0
    bench.fire(GRACE_TIMER)
    assert bench.worker.decode.sequences


def test_what_nobody_keeps_any_longer_is_said_to_be_gone():
    a = request("a")
    bench = decoding(a)
    since = adopt(bench, a, 0)
    assert [type(message) for message in bench.heard[since:]] == [Abort]


def test_a_router_may_refuse_what_was_kept():
    a = request("a", max_tokens=60)
    bench = decoding(a)
    bench.take(RouterLost())
    bench.take(RouterFound())
    bench.abort("a")
    bench.read_all()
    assert bench.worker.idle and bench.free_pages == bench.worker.config.num_pages
    since = adopt(bench, a, 0)
    assert [type(message) for message in bench.heard[since:]] == [Abort]


def test_a_step_that_fails_without_a_router_leaves_nothing_to_adopt():
    a = request("a")
    bench = decoding(a)
    bench.take(RouterLost())
    bench.fail(bench.decode_runs[-1].plan.step_id)
    bench.take(RouterFound())
    assert not bench.said(Kept) and not bench.worker.decode.sequences


def test_a_stream_outlives_two_routers():
    a = request("a", max_tokens=20)
    bench = decoding(a)
    for index in (1, 2):
        bench.take(RouterLost())
        bench.read()
        bench.take(RouterFound())
        since = adopt(bench, a, index)
    bench.read_all()
    told = drawn(bench, a, since)
    assert [told[place] for place in range(2, 20)] == definition(a)[2:20]


def test_a_resumed_stream_counts_its_tokens_from_its_first_answer_on():
    a = request("a", 10, max_tokens=5)
    bench = Bench(worker("decode-0", Role.DECODE, router_grace_s=GRACE_S))
    assert bench.reserve(a, num_output=3)
    bench.arrive(a)
    bench.commit(a)
    bench.take(RouterLost())
    bench.read()
    bench.take(RouterFound())
    assert bench.said(Kept) == [Kept(bench.attempt("a"), 3)]
    since = adopt(bench, a, 4)
    bench.read_all()
    assert drawn(bench, a, since) == dict(zip(range(4, 8), definition(a)[1:5], strict=True))


def test_without_a_grace_nothing_is_kept_and_nothing_remembered():
    a = request("a")
    bench = decoding(a, grace_s=0.0)
    bench.read()
    assert not bench.worker.orphans._drawn
    bench.take(RouterLost())
    bench.read_all()
    bench.take(RouterFound())
    assert bench.worker.idle and not bench.said(Kept)


def test_tokens_of_sequences_that_are_over_are_forgotten():
    bench = Bench(worker("decode-0", Role.DECODE, router_grace_s=GRACE_S))
    for number in range(80):
        each = request(f"r{number}", max_tokens=3)
        assert bench.reserve(each)
        bench.arrive(each)
        bench.commit(each)
        bench.read_all()
    assert len(bench.worker.orphans._drawn) < 20
