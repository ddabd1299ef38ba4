"""Workers come and go, routers too: what is told of it, and that nothing stays held for a party that is gone."""

import pytest

from jdisagg.core.events import Finish, Reject, RouterLost, Send, WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.messages import Reserve, View
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from tests.policy.bench import Bench
from tests.policy.router.test_router import D, Talk
from tests.sim.cases import pair, request, worker

D2 = WorkerId("decode-2")


def reserves(talk: Talk) -> list[WorkerId]:
    sends = [effect for effect in talk.effects if isinstance(effect, Send)]
    return [send.to for send in sends if isinstance(send.message, Reserve)]


def test_a_worker_that_joined_takes_requests():
    talk = Talk(pair()[:1])
    assert talk.take(WorkerJoined(worker(D2, Role.DECODE))) == []
    talk.submit(request("a"))
    assert reserves(talk) == [D2]


def test_a_request_waits_for_a_lost_worker_to_be_replaced():
    talk = Talk(workers_return=True)
    talk.submit(request("a"))
    talk.take(WorkerLost(D))
    assert not [effect for effect in talk.effects if isinstance(effect, Finish)]
    talk.take(WorkerJoined(worker(D2, Role.DECODE)))
    assert reserves(talk) == [D, D2]


def test_a_request_that_waited_in_vain_ends_at_its_deadline():
    talk = Talk(workers_return=True, queue_timeout_s=5.0)
    talk.submit(request("a"))
    talk.take(WorkerLost(D))
    talk.now_s = 6.0
    while "row/a" in talk.timers and not [each for each in talk.effects if isinstance(each, Finish)]:
        talk.fire("row/a")
    (finish,) = [effect for effect in talk.effects if isinstance(effect, Finish)]
    assert finish.reason == "timeout" and "reservation" in finish.detail


def test_a_worker_whose_router_is_gone_gives_every_page_back():
    bench = Bench(worker("decode-0", Role.DECODE))
    for each in (request("a"), request("b"), request("c", 30)):
        assert bench.reserve(each)
    bench.arrive(request("a"))
    bench.commit(request("a"))
    bench.arrive(request("b"))
    assert bench.pending, "a decodes"
    bench.take(RouterLost())
    bench.read_all()
    assert bench.worker.idle and bench.free_pages == bench.worker.config.num_pages


def test_a_prefill_worker_whose_router_is_gone_gives_every_page_back():
    bench = Bench(worker("prefill-0", Role.PREFILL))
    bench.start(request("a", 40))
    bench.start(request("b"))
    bench.take(RouterLost())
    bench.read_all()
    assert bench.worker.idle and bench.free_pages == bench.worker.config.num_pages


def test_a_worker_serves_its_next_router():
    bench = Bench(worker("decode-0", Role.DECODE))
    assert bench.reserve(request("a"))
    bench.take(RouterLost())
    assert bench.reserve(request("b")) and bench.said(View)


def test_a_worker_that_is_leaving_ends_what_it_has_and_gets_nothing_new():
    talk = Talk([*pair(), worker(D2, Role.DECODE)], workers_return=True)
    talk.submit(request("a"))
    (first,) = reserves(talk)
    told = talk.take(WorkerLeaving(first))
    assert not told, "what it has goes on"
    for name in "bcd":
        talk.submit(request(name))
    other = ({D, D2} - {first}).pop()
    assert reserves(talk) == [first, other, other, other]
    assert talk.router.rows[request("a").request_id].decode == first


def finishes(talk: Talk) -> list[Finish]:
    return [effect for effect in talk.effects if isinstance(effect, Finish)]


def test_where_all_workers_of_a_phase_leave_requests_wait_for_the_next_one():
    talk = Talk(workers_return=True)
    talk.take(WorkerLeaving(D))
    talk.submit(request("a"))
    assert not reserves(talk) and not finishes(talk) and "a" in talk.router.rows
    talk.take(WorkerJoined(worker(D2, Role.DECODE)))
    assert reserves(talk) == [D2]


@pytest.mark.parametrize("order", [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL), (Role.COLOCATED,)])
def test_a_router_nobody_has_joined_yet_queues_its_clients(order):
    talk = Talk(workers_return=True)
    for name in list(talk.router.peers):
        talk.take(WorkerLost(name))
    talk.submit(request("a"))
    assert not [effect for effect in talk.effects if isinstance(effect, Reject | Finish)]
    for number, role in enumerate(order):
        assert not reserves(talk)
        talk.take(WorkerJoined(worker(f"new-{number}", role)))
    assert len(reserves(talk)) == 1


def test_who_waits_in_vain_for_a_worker_is_told_which_kind_was_missing():
    talk = Talk(workers_return=True, queue_timeout_s=5.0)
    talk.take(WorkerLost(D))
    talk.submit(request("a"))
    talk.fire("row/a")
    (finish,) = finishes(talk)
    assert talk.now_s == 5.0 and finish.reason == "timeout" and "no worker is there for decode" in finish.detail


def test_the_line_of_those_who_wait_for_a_worker_is_as_long_as_any():
    talk = Talk(workers_return=True, queue_limit=2)
    talk.take(WorkerLost(D))
    for name in "abc":
        talk.submit(request(name))
    assert [effect.request_id for effect in talk.effects if isinstance(effect, Reject)] == ["c"]


def test_what_the_worker_that_came_can_never_hold_blocks_nobody():
    talk = Talk(workers_return=True)
    talk.take(WorkerLost(D))
    talk.submit(request("a", 60))
    talk.submit(request("b", 4))
    talk.take(WorkerJoined(worker(D2, Role.DECODE, num_pages=4)))
    assert [finish.request_id for finish in finishes(talk)] == ["a"] and "fit no pair" in finishes(talk)[0].detail
    assert reserves(talk) == [D2] and list(talk.router.rows) == ["b"]


def test_without_others_that_may_join_a_missing_phase_is_refused_at_once():
    talk = Talk()
    talk.take(WorkerLost(D))
    talk.submit(request("a"))
    (reject,) = [effect for effect in talk.effects if isinstance(effect, Reject)]
    assert "no worker is left for decode" in reject.detail
