"""Pairs by each routing: `cache_aware` finds the cheapest pair and names each term; fallback to one worker."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.commands.replay import replay
from jdisagg.core.events import WorkerLost
from jdisagg.core.journal import Header, Journal, read_lines
from jdisagg.core.labels import Labels
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Progress, Refused, Reserved
from jdisagg.core.request import Attempt, FinishReason, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.router.estimates import FORGET_S, Pace, RecentMeans
from jdisagg.policy.router.routing import (
    FAILED,
    MISS_WEIGHT,
    CostForecast,
    FetchEstimate,
    Pair,
    PathEstimate,
    RoutingRequest,
    WorkerSnapshot,
    after_first,
    benefit_of,
    choose_pair,
    run_tokens,
    total,
    until_first,
)
from tests.policy.router.test_pair_selection import Told
from tests.sim.cases import check_ended, request, worker
from tests.sim.world import World

looks = st.lists(
    st.builds(
        WorkerSnapshot,
        st.integers(0, 9).map(lambda n: WorkerId(f"w{n}")),
        st.sampled_from(Role),
        st.floats(0, 100),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
        st.integers(0, 50),
        st.just(0),
    ),
    unique_by=lambda look: look.worker,
)
routed_requests = st.builds(RoutingRequest, st.text(max_size=3), st.just(50), st.integers(0, 9), st.integers(0, 3))


def look(name, role, work=0.0, *, served=0, room=True, avoided=False, cached=0, short=0):
    return WorkerSnapshot(WorkerId(name), role, work, served, room, avoided, cached, short)


def taken(*given, routed=None, routing=Routing.LEAST_LOADED):
    pair = choose_pair(given, routed, routing).taken
    return pair and (pair.prefill, pair.decode)


def pool(role, count, work=0.0):
    return [look(f"{role}-{index}", role, work) for index in range(count)]


def test_the_least_outstanding_work_is_taken():
    p0, p1 = look("p0", Role.PREFILL, 5), look("p1", Role.PREFILL, 3)
    d0, d1 = look("d0", Role.DECODE, 1), look("d1", Role.DECODE, 2)
    assert taken(p0, p1, d0, d1) == ("p1", "d0")


@pytest.mark.parametrize("routing", Routing)
def test_a_worker_that_failed_the_request_is_taken_only_where_there_is_no_other(routing):
    p0, p1 = look("p0", Role.PREFILL, 0, avoided=True), look("p1", Role.PREFILL, 9)
    d0 = look("d0", Role.DECODE)
    assert taken(p0, p1, d0, routing=routing) == ("p1", "d0")
    assert taken(p0, d0, routing=routing) == ("p0", "d0")


def test_idle_workers_take_steps():
    assert taken(look("p0", Role.PREFILL, served=2), look("p1", Role.PREFILL, served=1), look("d", Role.DECODE)) == (
        "p1",
        "d",
    )


def test_a_colocated_worker_pairs_only_with_itself():
    choice = choose_pair([look("c0", Role.COLOCATED, 2), look("c1", Role.COLOCATED, 1), look("d0", Role.DECODE)])
    assert [each.worker for each in choice.colocated] == ["c1", "c0"]
    assert choice.taken is not None and (choice.taken.prefill, choice.taken.decode) == ("c1", "c1")


def test_a_colocated_worker_beside_pools_takes_what_they_have_no_room_for():
    p0, c0 = look("p0", Role.PREFILL, 3), look("c0", Role.COLOCATED)
    assert taken(p0, look("d0", Role.DECODE, 3), c0) == ("p0", "d0")
    assert taken(p0, look("d0", Role.DECODE, 3, room=False), c0) == ("c0", "c0")


@pytest.mark.parametrize("routing", Routing)
def test_no_room_means_no_pair_and_says_for_what(routing):
    choice = choose_pair([look("p0", Role.PREFILL), look("d0", Role.DECODE, room=False)], None, routing)
    assert choice.taken is None and choice.reason == f"{routing}: no worker has room for its output"


def test_round_robin_goes_round_both_pools():
    given = [*pool(Role.PREFILL, 2), *pool(Role.DECODE, 3, work=9.0)]
    pairs = [taken(*given, routed=RoutingRequest(number=n), routing=Routing.ROUND_ROBIN) for n in range(6)]
    assert len(set(pairs)) == 6 and pairs[:2] == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]


def test_lots_are_drawn_alike_by_the_same_seed_and_evenly_over_requests():
    given = [*pool(Role.PREFILL, 4), *pool(Role.DECODE, 1)]
    drawn = [taken(*given, routed=RoutingRequest(f"r{n}"), routing=Routing.RANDOM) for n in range(400)]
    again = [taken(*given, routed=RoutingRequest(f"r{n}"), routing=Routing.RANDOM) for n in range(400)]
    other = [taken(*given, routed=RoutingRequest(f"r{n}", seed=1), routing=Routing.RANDOM) for n in range(400)]
    assert drawn == again != other
    assert min(Counter(drawn).values()) > 60


def test_a_held_prefix_is_worth_a_queue_up_to_its_length():
    holder, idle, d0 = look("p0", Role.PREFILL, 400, cached=500), look("p1", Role.PREFILL), look("d0", Role.DECODE)
    aware = {"routed": RoutingRequest(prompt_tokens=600), "routing": Routing.CACHE_AWARE}
    assert taken(holder, idle, d0, **aware) == ("p0", "d0")  # 400 + 100 against 600
    assert taken(look("p0", Role.PREFILL, 501, cached=500), idle, d0, **aware) == ("p1", "d0")
    assert taken(holder, idle, d0) == ("p1", "d0")


def test_of_workers_of_equal_cost_the_one_with_more_of_the_prefix_is_taken():
    """A chunk costs as much half full: 244 tokens take as long as the 228 that a worker with one page computes."""
    forecast = CostForecast(prefill=lambda look, tokens: -(-tokens // 64) * 64.0)
    holder, idle = look("p1", Role.PREFILL, served=9, cached=16), look("p0", Role.PREFILL)
    routed = RoutingRequest(prompt_tokens=244, forecast=forecast)
    assert taken(holder, idle, look("d0", Role.DECODE), routed=routed, routing=Routing.CACHE_AWARE) == ("p1", "d0")
    assert taken(holder, idle, look("d0", Role.DECODE)) == ("p0", "d0"), "least_loaded does not look at prefixes"


def conversation(prompt_tokens=600):
    """The next turn of one: a token shipped costs 0.1, one computed by a decode worker 2."""
    forecast = CostForecast(
        prefill=lambda look, tokens: tokens * (2.0 if look.role is Role.DECODE else 1.0),
        transfer=lambda source, destination, tokens: 0.1 * tokens,
        least_transfer=lambda destination, tokens: 0.1 * tokens,
        decode=lambda look: 0.0 if look.short_prompt_tokens else look.work,
    )
    return RoutingRequest(prompt_tokens=prompt_tokens, forecast=forecast)


def test_the_decode_worker_that_holds_the_conversation_is_worth_what_need_not_be_shipped():
    p0, holder, idle = look("p0", Role.PREFILL), look("d0", Role.DECODE, 40, cached=500), look("d1", Role.DECODE)
    aware = {"routed": conversation(), "routing": Routing.CACHE_AWARE}
    assert taken(p0, holder, idle, **aware) == ("p0", "d0")  # 40 + 10 against 60
    assert taken(p0, look("d0", Role.DECODE, 51, cached=500), idle, **aware) == ("p0", "d1")


def test_a_short_end_is_computed_where_the_rest_lies_if_that_costs_less_than_the_pair():
    p0, holder = look("p0", Role.PREFILL, 50, cached=500), look("d0", Role.DECODE, 7, cached=560, short=64)
    found = choose_pair([p0, holder], conversation(), Routing.CACHE_AWARE)
    assert found.taken == Pair(holder.worker, holder.worker) and found.by_itself  # 7 + 80 against 150 + 4
    assert found.reason == (
        "cache_aware: d0 costs 87 (queue 7 + prefill 80 + decode 0); by itself d0 costs 87, p0 and d0 154"
    )
    rested = choose_pair([look("p0", Role.PREFILL, cached=560), holder], conversation(), Routing.CACHE_AWARE)
    assert rested.taken == Pair(WorkerId("p0"), holder.worker) and rested.reason.endswith("p0 and d0 44")


def test_an_end_over_the_limit_or_with_nothing_before_it_is_never_computed_among_rows():
    p0 = look("p0", Role.PREFILL, 9999)
    for d0, tokens in ((look("d0", Role.DECODE, cached=500, short=64), 565), (look("d0", Role.DECODE, short=64), 64)):
        assert taken(p0, d0, routed=conversation(tokens), routing=Routing.CACHE_AWARE) == ("p0", "d0")
    held = look("d0", Role.DECODE, cached=500, short=64)
    assert taken(p0, held, routed=conversation(564), routing=Routing.CACHE_AWARE) == ("d0", "d0")


def test_a_decode_worker_that_holds_the_rest_serves_where_no_prefill_worker_is_left():
    d0 = look("d0", Role.DECODE, cached=560, short=64)
    assert taken(d0, routed=conversation(), routing=Routing.CACHE_AWARE) == ("d0", "d0")
    avoided = look("d0", Role.DECODE, cached=560, short=64, avoided=True)
    pool = look("p0", Role.PREFILL, 999), look("d1", Role.DECODE, 999)
    assert taken(avoided, *pool, routed=conversation(), routing=Routing.CACHE_AWARE) == ("p0", "d1")


def test_a_prefix_is_fetched_where_that_costs_less_than_waiting_and_than_computing():
    holder, d0 = look("p0", Role.PREFILL, 400, cached=500), look("d0", Role.DECODE)
    cheap, dear = (look("p1", Role.PREFILL)._replace(reach=FetchEstimate("p0", 500, s)) for s in (0.1, 2.0))
    found = choose_pair([holder, cheap, d0], RoutingRequest(prompt_tokens=600), Routing.CACHE_AWARE)
    assert found.taken is not None and found.taken.prefill == "p1"
    assert dict(found.prefills[0].parts) == {"queue": 0, "prefill": 100, "fetch from p0": 50}
    aware = {"routed": RoutingRequest(prompt_tokens=600), "routing": Routing.CACHE_AWARE}
    assert taken(holder, dear, d0, **aware) == ("p0", "d0")


def test_the_reason_names_the_runner_up_and_what_each_costs():
    given = [look("p0", Role.PREFILL, 5), look("p1", Role.PREFILL, 3, cached=20), look("d0", Role.DECODE, 1)]
    reason = choose_pair(given, RoutingRequest(prompt_tokens=30), Routing.CACHE_AWARE).reason
    assert reason == (
        "cache_aware: p1 costs 13 (queue 3 + prefill 10), next p0 35 (queue 5 + prefill 30);"
        " d0 costs 1 (transfer 0 + decode 1)"
    )


@given(looks, routed_requests, st.sampled_from(Routing))
def test_a_choice_shows_its_candidates_best_first_and_takes_the_best(given, routed, routing):
    choice = choose_pair(given, routed, routing)
    by_name = {each.worker: each for each in given}
    for kind, phase in ((choice.prefills, Role.PREFILL), (choice.decodes, Role.DECODE)):
        assert list(kind) == sorted(kind, key=lambda each: each.score)
        assert all(by_name[each.worker].role is phase and by_name[each.worker].has_room for each in kind)
        assert all((each.rank == FAILED) is by_name[each.worker].avoided for each in kind)
    assert choice.reason
    if choice.prefills and choice.decodes:
        assert choice.taken == Pair(choice.prefills[0].worker, choice.decodes[0].worker)
    elif choice.colocated:
        assert choice.taken == Pair(choice.colocated[0].worker, choice.colocated[0].worker)
    else:
        assert choice.taken is None


costs = st.floats(0, 10)


def aware(prefills, decodes, colocated, routed):
    return choose_pair([*prefills, *decodes, *colocated], routed, Routing.CACHE_AWARE)


@given(
    st.lists(st.tuples(costs, st.booleans(), st.integers(0, 1)), min_size=1, max_size=5),
    st.lists(st.tuples(costs, st.booleans(), st.integers(0, 1)), min_size=1, max_size=5),
    st.lists(costs, min_size=25, max_size=25),
    st.sampled_from([math.inf, 5.0]),
)
def test_no_other_pair_costs_less(prefills, decodes, links, asked_s):
    """Where none failed the request before, the best of all; those that did come after all others."""
    firsts = [
        look(f"p{i}", Role.PREFILL, work, room=room, avoided=bool(a)) for i, (work, room, a) in enumerate(prefills)
    ]
    seconds = [
        look(f"d{i}", Role.DECODE, work, room=room, avoided=bool(a)) for i, (work, room, a) in enumerate(decodes)
    ]
    least = min(links)
    routed = RoutingRequest(
        prompt_tokens=1,
        forecast=CostForecast(
            transfer=lambda p, d, tokens: links[5 * int(p[1:]) + int(d[1:])],
            least_transfer=lambda d, tokens: least,
            ttft_s=asked_s,
            later_s=asked_s,
        ),
    )
    choice = aware(firsts, seconds, [], routed)
    able = [[each for each in kind if each.has_room] for kind in (firsts, seconds)]
    able = [[each for each in kind if each.avoided == min(e.avoided for e in kind)] for kind in able if kind]
    if len(able) < 2:
        assert choice.taken is None
        return
    tried = {
        Pair(p.worker, d.worker): total(until_first(p, routed)) + total(after_first(d, routed, p))
        for p, d in product(*able)
    }
    assert choice.taken is not None and tried[choice.taken] == pytest.approx(min(tried.values()))
    assert choice.prefills[0].worker == choice.taken.prefill and choice.decodes[0].worker == choice.taken.decode


def test_a_slow_link_outweighs_a_short_queue():
    forecast = CostForecast(
        transfer=lambda p, d, tokens: 0.1 if p[-1] == d[-1] else 8.0, least_transfer=lambda d, n: 0.1
    )
    given_ = (
        [look("p0", Role.PREFILL, 1), look("p1", Role.PREFILL, 3)],
        [look("d0", Role.DECODE, 9), look("d1", Role.DECODE)],
    )
    choice = aware(*given_, [], RoutingRequest(prompt_tokens=1, forecast=forecast))
    assert choice.taken == Pair(WorkerId("p1"), WorkerId("d1"))
    assert "p1 costs 4 (queue 3 + prefill 1), next p0 2 (queue 1 + prefill 1)" in choice.reason
    assert "d1 costs 0.1 (transfer 0.1 + decode 0)" in choice.reason


def test_what_would_be_late_weighs_more_and_is_named():
    forecast = CostForecast(later_s=2.0)
    choice = aware(
        [look("p", Role.PREFILL)], [look("d", Role.DECODE, 3)], [], RoutingRequest(prompt_tokens=1, forecast=forecast)
    )
    assert dict(choice.decodes[0].parts) == {"transfer": 0.0, "decode": 3.0, "late": MISS_WEIGHT * 1.0}


def test_a_request_with_an_objective_goes_where_it_is_kept():
    """The pair with the shorter queue decodes a little too slowly for it."""
    firsts = [look("p", Role.PREFILL, 1), look("q", Role.PREFILL, 1.2)]
    seconds, links = [look("d", Role.DECODE, 2)], {"p": 0.5, "q": 0.4}
    forecast = CostForecast(transfer=lambda p, d, n: links[p], least_transfer=lambda d, n: 0.4)
    for later_s, taken in ((math.inf, "p"), (2.4, "q")):
        routed = RoutingRequest(prompt_tokens=1, forecast=replace(forecast, later_s=later_s))
        assert aware(firsts, seconds, [], routed).taken == Pair(WorkerId(taken), WorkerId("d"))


def test_a_decode_worker_that_holds_the_prompt_may_take_it_alone_and_says_why():
    pools = [look("p", Role.PREFILL, 5)], [look("d", Role.DECODE, 1, cached=9, short=4)]
    choice = aware(*pools, [], RoutingRequest(prompt_tokens=10))
    assert choice.taken == Pair(WorkerId("d"), WorkerId("d")) and "by itself d costs" in choice.why


RACKS = [
    worker(f"{role}-{index}", role, labels=Labels(host=f"{role}{index}", rack=f"r{index}"), kv_token_bytes=1 << 20)
    for role in (Role.PREFILL, Role.DECODE)
    for index in range(2)
]


def told(**limits) -> Told:
    return Told(RACKS, routing=Routing.CACHE_AWARE, **limits)


def test_pairs_keep_to_their_rack_and_the_record_names_each_term():
    talk = told()
    talk.submit(request("a"))
    prefill, decode = talk.pairs()[0]
    assert prefill[-1] == decode[-1]
    shown = talk.decisions[0].to_json()
    assert set(shown["candidates"]["prefill"][0]["parts"]) == {"queue", "prefill"}
    assert set(shown["candidates"]["decode"][0]["parts"]) == {"transfer", "decode"}
    assert shown["candidates"]["decode"][1]["parts"]["transfer"] > shown["candidates"]["decode"][0]["parts"]["transfer"]


def ship(talk: Told, name: str, wire_s: float) -> None:
    """The request's KV arrives after so long."""
    row = talk.router.rows[RequestId(name)]
    attempt = Attempt(RequestId(name), row.epoch)
    assert row.decode is not None
    talk.says(row.decode, Reserved(attempt, (1, 2)))
    talk.says(row.decode, Progress(attempt, Mark.COMMITTED, talk.now_s, wire_s))


def test_what_a_transfer_took_is_learnt_of_its_pair():
    talk = told()
    talk.submit(request("a", 100))
    row = talk.router.rows[RequestId("a")]
    assert row.prefill is not None and row.decode is not None
    source, destination = (talk.router.peers[each].config for each in (row.prefill, row.decode))
    before = talk.router.routes.forecasts.links.byte_s(source, destination)
    ship(talk, "a", wire_s=10.0)
    links = talk.router.routes.forecasts.links
    assert links.byte_s(source, destination) == pytest.approx(10.0 / (100 << 20)) and before < 1e-9


def test_a_request_late_by_prediction_is_late_in_the_record():
    talk = told()
    talk.submit(replace(request("a", 100), ttft_s=1e-4))
    shown = talk.decisions[0].to_json()["candidates"]["prefill"][0]
    assert shown["parts"]["late"] > 0 and "late" in talk.decisions[0].reason


def test_a_worker_of_both_roles_takes_what_the_pools_have_no_room_for():
    both = [look("slow", Role.COLOCATED, 3), look("quick", Role.COLOCATED, 1)]
    choice = aware([look("p", Role.PREFILL)], [look("d", Role.DECODE, room=False)], both, RoutingRequest())
    assert choice.taken == Pair(WorkerId("quick"), WorkerId("quick"))
    assert [each.worker for each in choice.colocated] == ["quick", "slow"]
    assert choice.reason.startswith("cache_aware: quick costs")


def test_where_nobody_has_room_nobody_is_taken():
    choice = aware([look("p", Role.PREFILL)], [look("d", Role.DECODE, room=False)], [], RoutingRequest())
    assert choice.taken is None
    assert choice.reason == "cache_aware: no worker has room for its output"


def test_of_equal_pairs_the_one_that_served_less_is_taken():
    firsts = [look("p0", Role.PREFILL, served=2), look("p1", Role.PREFILL, served=1)]
    seconds = [look("d0", Role.DECODE, served=3), look("d1", Role.DECODE, served=0)]
    assert aware(firsts, seconds, [], RoutingRequest()).taken == Pair(WorkerId("p1"), WorkerId("d1"))


def test_kv_that_is_there_already_is_neither_computed_nor_shipped():
    forecast = CostForecast(transfer=lambda p, d, tokens: 1.0 * tokens)
    routed = RoutingRequest(prompt_tokens=10, forecast=forecast)
    firsts = [look("p0", Role.PREFILL), look("p1", Role.PREFILL, cached=9)]
    seconds = [look("d0", Role.DECODE), look("d1", Role.DECODE, cached=8)]
    choice = aware(firsts, seconds, [], routed)
    assert choice.taken == Pair(WorkerId("p1"), WorkerId("d1"))
    assert dict(choice.prefills[0].parts) == {"queue": 0.0, "prefill": 1.0}
    assert dict(choice.decodes[0].parts) == {"transfer": 2.0, "decode": 0.0}


P, D, C = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("colocated-0")
MIXED = [worker(P, Role.PREFILL), worker(D, Role.DECODE), worker(C, Role.COLOCATED)]

IDLE = PathEstimate(run_tokens=100, queue_tokens=0, prompt_token_s=1e-3, output_token_s=1e-2)
APART = PathEstimate(run_tokens=100, queue_tokens=0, prompt_token_s=1e-3, output_token_s=1e-2, transfer_token_s=1e-4)


def but(path: PathEstimate, **changes: Any) -> PathEstimate:
    fields = {name: getattr(path, name) for name in PathEstimate.__dataclass_fields__}
    return PathEstimate(**(fields | changes))


@pytest.mark.parametrize(
    ("apart", "together", "prompt_tokens", "output_tokens", "benefit_s"),
    [
        (APART, IDLE, 100, 10, -0.010),  # idle: only the transfer counts
        (IDLE, IDLE, 100, 10, 0.0),  # and where it is hidden, nothing
        (APART, but(IDLE, disturbed=4), 100, 10, 0.390),  # four who decode would each wait for the prompt
        (APART, but(IDLE, queue_tokens=50), 100, 10, 0.040),
        (but(APART, queue_tokens=50), IDLE, 100, 10, -0.060),
        (but(APART, disturbed=0), but(IDLE, prompt_token_s=2e-3), 100, 10, 0.090),  # the colocated mesh is slower
        (APART, but(IDLE, output_token_s=1.2e-2), 100, 10, 0.010),
        (APART, but(IDLE, output_token_s=1.2e-2), 100, 2, -0.006),  # short answers care less
        (but(APART, transfer_token_s=5e-3), but(IDLE, disturbed=4), 100, 10, -0.1),  # a slow link
    ],
)
def test_the_gain_of_disaggregating(apart, together, prompt_tokens, output_tokens, benefit_s):
    assert benefit_of(apart, together, prompt_tokens, output_tokens).benefit_s == pytest.approx(benefit_s)


def test_the_reason_names_the_parts_that_differ():
    benefit = benefit_of(APART, but(IDLE, disturbed=1), 100, 10)
    assert benefit.reason == (
        "disaggregating gains 90 ms: transfer 10 ms against 0 ms, delay of others 0 ms against 100 ms"
    )
    assert benefit_of(IDLE, IDLE, 100, 1).reason == "disaggregating gains 0 ms: nothing differs"


def test_a_prompt_is_run_in_whole_programs():
    assert [run_tokens(tokens, (16, 64)) for tokens in (1, 16, 17, 64, 65, 129)] == [16, 16, 64, 64, 80, 144]


def test_a_figure_follows_the_latest_and_is_forgotten():
    figures = RecentMeans()
    assert figures.guess("a", 0.0) is None
    figures.learn("a", 1.0, 0.0)
    figures.learn("a", 2.0, 1.0)
    assert figures.of("a", 1.0) == pytest.approx(1.2) == figures.guess("b", 1.0)
    assert figures.of("a", 1.0 + FORGET_S) is None is figures.guess("b", 1.0 + FORGET_S)


def ledger_of(**at_s: float) -> Ledger:
    ledger = Ledger()
    for name, instant_s in at_s.items():
        ledger.mark(Mark(name), instant_s)
    return ledger


WHOLE = {"arrived": 0.0, "prefill_started": 1.0, "first_token": 3.0, "committed": 3.5, "first_step": 3.5, "ended": 8.5}


def test_pace_is_learnt_of_whole_lives_only():
    pace = Pace()
    pace.learn(ledger_of(**WHOLE), P, D, (10, 16, 6), 9.0)
    assert pace.prompt.of(P, 9.0) == pytest.approx(2 / 16) and pace.output.of(D, 9.0) == pytest.approx(1.0)
    assert pace.transfer.of(f"{P} {D}", 9.0) == pytest.approx(0.05) and pace.expected_tokens(100, 9.0) == 6
    pace.learn(ledger_of(arrived=0.0, requeued=1.0, ended=50.0), P, D, (10, 16, 6), 50.0)
    assert pace.prompt.of(P, 50.0) == pytest.approx(2 / 16)
    pace.forget(P)
    assert pace.prompt.of(P, 50.0) is None is pace.transfer.usual(50.0) and pace.output.of(D, 50.0) is not None


# ------------------------------------------------------------------ the router's use of it


def serve(talk: Told, name: str, *, wire_s: float) -> str:
    """Runs one request through its attempt, each part as long as it is said to be; returns who prefilled it."""
    each = request(name, 10, max_tokens=1)
    talk.submit(each)
    pair = talk.pairs()[-1]
    epoch = len(talk.pairs())
    talk.says(pair[1], Reserved(Attempt(each.request_id, epoch), (1, 2, 3)))
    row = talk.router.rows[each.request_id]
    for mark, part_s in ((Mark.PREFILL_STARTED, 0.0), (Mark.FIRST_TOKEN, 0.1), (Mark.COMMITTED, wire_s)):
        talk.now_s += part_s
        row.mark(mark, talk.now_s)
    row.output.append(5)
    talk.router.requests.finish(row, FinishReason.LENGTH, "", talk.now_s)
    return pair[0]


def known(talk: Told) -> None:
    """Output figures, which answers of one token do not give."""
    talk.router.routes.pace.output.learn(D, 0.01, talk.now_s)


def test_the_router_stays_with_the_pools_until_it_knows_and_then_goes_where_it_is_faster():
    talk = Told(MIXED)
    assert serve(talk, "a", wire_s=0.5) == P
    assert "too little is known yet" in talk.decisions[-1].reason
    known(talk)
    assert serve(talk, "b", wire_s=0.0) == C
    assert "disaggregating loses 500 ms: transfer 500 ms against 0 ms" in talk.decisions[-1].reason
    assert talk.decisions[-1].to_json()["taken"] == {"prefill": C, "decode": C}


def test_whoever_failed_the_request_comes_second_whatever_is_predicted():
    talk = Told(MIXED)
    talk.submit(request("a"))
    talk.fire("row/a")  # nobody answers: the decode worker is to be avoided
    assert talk.pairs() == [(P, D), (C, C)] and "failed this request before" in talk.decisions[-1].reason


def test_who_has_no_room_is_not_weighed_and_that_is_told():
    talk = Told(MIXED)
    talk.submit(request("a"))
    talk.says(D, Refused(Attempt(RequestId("a"), 1), "full"))
    assert talk.pairs() == [(P, D), (C, C)]
    assert talk.decisions[1].reason.endswith("the pools have no room")


def test_where_the_transfer_is_hidden_the_pools_are_kept():
    talk = Told(MIXED)
    serve(talk, "a", wire_s=0.0)
    known(talk)
    assert serve(talk, "b", wire_s=0.0) == P and "disaggregating gains 0 ms" in talk.decisions[-1].reason


def test_off_means_the_pools_as_long_as_there_are_any():
    talk = Told(MIXED, colocated_fallback=False)
    serve(talk, "a", wire_s=0.5)
    known(talk)
    assert serve(talk, "b", wire_s=0.5) == P
    assert "candidates" in (shown := talk.decisions[-1].to_json()) and "colocated" not in shown["candidates"]
    talk.take(WorkerLost(P))
    talk.submit(request("c"))
    assert talk.pairs()[-1] == (C, C)


def test_figures_are_only_kept_where_there_is_a_choice():
    talk = Told(MIXED[:2])
    serve(talk, "a", wire_s=0.5)
    assert talk.router.routes.pace == Pace()


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("routing", Routing)
def test_a_mixed_cluster_serves_what_any_cluster_serves_and_decides_alike_again(routing, fallback):
    config, lines = RouterConfig(routing=routing, colocated_fallback=fallback), []
    journal = Journal(Header(config, tuple(MIXED)), sink=lines.append)
    world = World(MIXED, config, journal=journal)
    requests = [request(f"r{index % 5}/{index}", 4 + index, arrival_s=0.01 * index) for index in range(12)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    journal.close()
    assert replay(*read_lines(lines)) == journal.num_recorded
