"""Promised places: no page before the source claims it, and nobody is lost where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.events import ShipKV
from jdisagg.core.messages import Abort, Ack, Claim, Commit, Granted, Preempted, Refused, Renew, Reserved, View
from jdisagg.core.request import Request
from jdisagg.core.router_config import Reserving, RouterConfig
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.policy.router.request_state import reserve_for
from tests.policy.bench import OTHER, Bench
from tests.sim.cases import check_ended, definition, pair, reasons, request, run_all, sent, worker
from tests.sim.fault_injector import Faults
from tests.sim.world import World

SMALL = worker("decode-0", Role.DECODE, num_pages=5, reserve_tokens=1, claim_timeout_s=3.0)
PREFILL = worker("prefill-0", Role.PREFILL)


def promised(bench: Bench, each: Request, **fields: Any) -> Bench:
    bench.epochs[each.request_id] = len(bench.epochs) + 1
    bench.requests[each.request_id] = each
    reserve = reserve_for(bench.attempt(each.request_id), each, 0, OTHER, 100.0, reserve=Reserving.LATE)
    bench.says(replace(reserve, **fields))
    return bench


def claim(bench: Bench, name: str, *, computed: bool = True) -> None:
    bench.says(Claim(bench.attempt(name), computed), OTHER)


def test_a_promise_holds_no_page_and_a_claim_takes_them():
    bench = promised(Bench(SMALL), request("a", 6))
    assert bench.said(Reserved) == [Reserved(bench.attempt("a"), (), 0, 4)] and bench.free_pages == 5
    claim(bench, "a")
    (granted,) = bench.said(Granted)
    assert len(granted.pages) == 2 and bench.free_pages == 3
    claim(bench, "a")
    assert bench.said(Granted) == [granted, granted], "the answer may have been lost"


def test_claims_are_granted_in_the_order_of_requests_when_pages_come_back():
    bench = Bench(replace(SMALL, num_pages=7))
    for name, length in (("a", 12), ("b", 16), ("c", 4)):
        promised(bench, request(name, length, arrival_s=float(ord(name))))
        claim(bench, name)
    assert [each.attempt.request_id for each in bench.said(Granted)] == ["a"], "nobody overtakes the second"
    bench.abort("a")
    assert [each.attempt.request_id for each in bench.said(Granted)] == ["a", "b", "c"]


def test_behind_a_claim_that_waits_nothing_is_reserved_and_the_router_knows():
    bench = Bench(SMALL)
    for name in "ab":
        promised(bench, request(name, 12))
        claim(bench, name)
    assert bench.said(View)[-1].free_pages == bench.said(View)[-1].free_slots == 0
    assert not bench.reserve(request("c", 4)) and "0 slots and 0 pages" in bench.said(Refused)[0].detail
    bench.abort("a")
    assert bench.reserve(request("d", 4)), "the claim has its pages now"


def test_a_claim_that_waited_for_long_enough_goes_back_to_the_line():
    bench = Bench(SMALL)
    for name in "ab":
        promised(bench, request(name, 12))
        claim(bench, name)
    bench.fire("claim/2/b")
    (back,) = bench.said(Preempted)
    assert back.attempt == bench.attempt("b") and back.output == () and "no room in 3 s" in back.detail
    assert bench.attempt("b") not in bench.worker.decode_side.sequences
    claim(bench, "b")
    assert [each.attempt for each in bench.said(Abort)] == [bench.attempt("b")], "its place is gone"


def test_before_the_prompt_is_computed_a_claim_has_all_the_time_that_its_lease_gives():
    bench = Bench(SMALL)
    for name in "ab":
        promised(bench, request(name, 12))
        claim(bench, name, computed=False)
    assert "claim/2/b" not in bench.timers and "destination/2/b" in bench.timers
    claim(bench, "b")
    assert bench.timers["claim/2/b"] == 3.0


def test_a_source_that_says_nothing_loses_the_promise_and_one_that_renews_keeps_it():
    bench = promised(Bench(SMALL), request("a", 6), lease_s=2.0)
    bench.now_s = 1.5
    bench.says(Renew(bench.attempt("a")), OTHER)
    bench.fire("destination/1/a")
    assert bench.worker.decode_side.sequences, "put off"
    bench.fire("destination/1/a")
    assert not bench.worker.decode_side.sequences and bench.said(Abort)


@pytest.mark.parametrize("mode", [TransferMode.WHOLE, TransferMode.CHUNK])
@pytest.mark.parametrize("reserve", [Reserving.LATE, Reserving.CALENDAR])
def test_nothing_is_shipped_before_there_are_pages(mode: TransferMode, reserve: Reserving):
    bench = Bench(replace(PREFILL, transfer=mode))
    each = request("a", 40)
    bench.epochs["a"] = 1
    bench.start(each, decode_pages=(), decode_page_size=4, reserve=reserve)
    bench.read_all()
    assert not bench.made(ShipKV) and not bench.said(Commit) and not bench.shipped
    assert bench.said(Claim)[-1] == Claim(bench.attempt("a"), True)
    assert all(not each.computed for each in bench.said(Claim)[:-1])
    assert bool(bench.said(Claim)[:-1]) == (reserve is Reserving.CALENDAR), "asked for while it is computed"
    bench.fire("renew/1/a")
    assert bench.said(Claim)[-2:] == [Claim(bench.attempt("a"), True)] * 2, "lest it was lost"
    bench.says(Granted(bench.attempt("a"), tuple(range(1, 11)), 2), OTHER)
    assert bench.said(Commit) and bench.joined("a")[: 4 * 8] == each.prompt[8:], "what is there already stays here"
    bench.ack("a")
    assert bench.free_pages + bench.worker.shared.cache.evictable_pages == 64


def test_a_grant_for_what_is_over_is_answered_and_one_of_a_stranger_is_not_heeded():
    bench = Bench(PREFILL)
    bench.start(request("a", 4), decode_pages=(), decode_page_size=4, reserve=Reserving.LATE)
    bench.read_all()
    bench.says(Granted(bench.attempt("a"), (1,)), PREFILL.worker)
    assert not bench.said(Commit)
    bench.abort("a")
    bench.says(Granted(bench.attempt("a"), (1,)), OTHER)
    assert bench.said(Abort)[-1] == Abort(bench.attempt("a"), "no such prompt")


# ------------------------------------------------------------------ a whole cluster

LITTLE: dict[str, Any] = {"num_pages": 10, "reserve_tokens": 1, "num_slots": 4}


def cluster(reserve: Reserving, faults: Faults | None = None, **sizes: Any) -> World:
    prefill, decode = pair(**{"claim_timeout_s": 20.0, **sizes})
    return World([replace(prefill, num_pages=64), decode], RouterConfig(reserve=reserve), faults=faults)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("timeout_s", [0.0, 20.0])
@pytest.mark.parametrize("reserve", Reserving)
def test_where_pages_are_short_everybody_gets_the_same_tokens(reserve: Reserving, timeout_s: float, caches: bool):
    world = cluster(reserve, **LITTLE, claim_timeout_s=timeout_s, prefix_caching=caches)
    run_all(world, [request(name, 9, max_tokens=20) for name in "abcdef"])
    assert not [each for each in sent(world, Abort) if "no such" in each.detail]


def test_who_was_sent_back_asks_for_pages_before_it_is_computed_again():
    world = cluster(Reserving.LATE, **LITTLE, claim_timeout_s=1e-4)
    run_all(world, [request(name, 9, max_tokens=20) for name in "abcdef"])
    back = [each.attempt.request_id for each in sent(world, Preempted) if "no room" in each.detail]
    assert back and len(set(back)) == len(back), "nobody is sent back twice"
    assert max(each.epoch for each in [a.attempt for a in sent(world, Ack)]) > 6


@pytest.mark.parametrize("reserve", [Reserving.LATE, Reserving.CALENDAR])
@pytest.mark.parametrize("seed", range(3))
def test_lost_words_of_claims_cost_time_and_no_request(reserve: Reserving, seed: int):
    world = cluster(reserve, Faults(seed=seed, lose_message=0.02, double_message=0.05, jitter_s=1e-3), **LITTLE)
    requests = [request(name, 9, max_tokens=12) for name in "abcd"]
    for each in requests:
        world.submit(each)
    world.run()
    check_ended(world, requests)
    assert sum(str(reasons(world, each)[0]) == "length" for each in requests) >= 3


def test_a_prompt_is_computed_while_the_pages_that_it_will_need_are_anothers():
    """Early it waits in line until they are free; late its first token is out long before."""
    first_s = {}
    for reserve in (Reserving.EARLY, Reserving.LATE):
        world = cluster(reserve, num_pages=10, reserve_tokens=40)
        run_all(world, [request(name, 9, max_tokens=24) for name in "ab"])
        told = [at_s for at_s, _, effect in world.effects if getattr(effect, "request_id", "") == "b"]
        first_s[reserve] = min(told)
        assert world.output(request("b").request_id) == definition(request("b", 9, max_tokens=24))
    assert first_s[Reserving.LATE] < 0.5 * first_s[Reserving.EARLY]
