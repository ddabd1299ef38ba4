"""`cache_aware` takes the pair with the least predicted cost, as if all pairs were tried, and names every term."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.labels import Labels
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Progress, Reserved
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.choice import CostForecast, Pair, RoutingRequest, total
from jdisagg.policy.routing import MISS_WEIGHT, after_first, choose_pair, until_first
from tests.policy.test_pair_selection import Told
from tests.policy.test_routing import look
from tests.sim.cases import request, worker

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
