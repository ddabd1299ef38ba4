"""Who takes a request, by each routing; and that a choice shows what it weighed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.choice import FAILED, CostForecast, FetchEstimate, Pair, RoutingRequest, WorkerSnapshot
from jdisagg.policy.routing import choose_pair

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
