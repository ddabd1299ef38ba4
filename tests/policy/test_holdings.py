"""What the router knows of where pages lie, tier by tier; who may lend to whom, and what fetching would save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.messages import CacheChanged, CacheHeld, Holder, Priced
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.holdings import Holdings
from jdisagg.policy.prefix_cache import packed
from jdisagg.policy.router.decisions import Decision
from jdisagg.policy.router.routing import FetchEstimate, RoutingRequest, WorkerSnapshot, choose_pair
from tests.policy.test_lending import LENT, both
from tests.policy.test_tiers import ask
from tests.sim.cases import check_outputs, worker
from tests.sim.world import World

NAMES = (1, 2, 3, 4, 5, 6)


def config(name: str, **sizes: Any) -> WorkerConfig:
    return worker(name, Role.COLOCATED, **{**LENT, "dram_pages": 16, **sizes})


ME, OTHER, THIRD = config("me"), config("other"), config("third")


def known(**held: dict[Tier, tuple[int, ...]]) -> Holdings:
    """Of workers by their names; a worker of other sizes follows by `follow`."""
    holdings = Holdings()
    for each in (ME, OTHER, THIRD):
        holdings.follow(each)
        for tier, names in held.get(each.worker, {}).items():
            holdings.hear(each, CacheHeld(0, packed(names), tier=tier))
    return holdings


def test_who_holds_more_of_a_prompt_in_any_tier_may_lend_it():
    holdings = known(
        me={Tier.HBM: (1,)}, other={Tier.HBM: (1, 2), Tier.DRAM: (3, 4)}, third={Tier.HBM: (1, 2, 3, 4, 5, 6)}
    )
    assert holdings.holders(ME, NAMES) == (Holder(THIRD.worker, 0, 6), Holder(OTHER.worker, 0, 4))
    assert holdings.holders(THIRD, NAMES) == ()


def test_who_has_lost_the_beginning_lends_what_is_behind_it():
    holdings = known(me={Tier.HBM: (1, 2)}, other={Tier.DRAM: (2, 3, 4)})
    assert holdings.holders(ME, NAMES) == (Holder(OTHER.worker, 1, 4),)


def test_each_tier_is_followed_by_its_own_numbers():
    holdings = known(other={Tier.HBM: (1, 2), Tier.DRAM: ()})
    holdings.hear(OTHER, CacheChanged(1, 3, packed((3,)), tier=Tier.DRAM))
    holdings.hear(OTHER, CacheChanged(1, 1, b"", packed((2,))))
    assert holdings.holders(ME, NAMES) == (Holder(OTHER.worker, 0, 1),)
    assert holdings.by_tier[Tier.DRAM].told(OTHER.worker) == {3}


@pytest.mark.parametrize("unlike", [{"page_size": 8}, {"tier_wire": "int8"}, {"peer_fetch": False}])
def test_who_keeps_other_records_lends_nothing(unlike):
    holdings, strange = known(), replace(OTHER, worker=WorkerId("strange"), **unlike)
    holdings.follow(strange)
    holdings.hear(strange, CacheHeld(0, packed(NAMES)))
    assert holdings.holders(ME, NAMES) == ()


def test_who_is_gone_lends_nothing():
    holdings = known(other={Tier.HBM: NAMES})
    holdings.forget(OTHER.worker)
    assert holdings.holders(ME, NAMES) == ()


def priced(**lines: float) -> Priced:
    """Seconds a page; a second more at all from another worker."""
    return Priced(tuple((source, float(source == "other"), each) for source, each in lines.items()))


def test_the_source_that_saves_most_is_weighed():
    holdings = known(me={Tier.HBM: (1,), Tier.DRAM: (2, 3)}, other={Tier.HBM: NAMES})
    holdings.hear_prices(ME.worker, priced(computed=1.0, dram=0.1, other=0.2))
    assert holdings.reach(ME, NAMES, 1) == ("other", 24, pytest.approx(0.4))
    holdings.hear_prices(ME.worker, priced(computed=1.0, dram=0.1, other=0.9))
    assert holdings.reach(ME, NAMES, 1) == ("dram", 12, pytest.approx(0.1))
    assert holdings.reach(ME, NAMES, 6) is None


@pytest.mark.parametrize("lines", [{}, {"dram": 0.1}, {"computed": 0.05, "dram": 0.1}])
def test_what_is_not_known_to_save_anything_is_not_weighed(lines):
    holdings = known(me={Tier.DRAM: NAMES})
    holdings.hear_prices(ME.worker, priced(**lines))
    assert holdings.reach(ME, NAMES, 0) is None


def test_a_decision_weighs_what_could_be_fetched_and_names_its_source():
    near = WorkerSnapshot(WorkerId("near"), Role.COLOCATED, 10.0, 0, True, reach=FetchEstimate("dram", 80, 0.1))
    far = WorkerSnapshot(WorkerId("far"), Role.COLOCATED, 5.0, 0, True)
    choice = choose_pair([near, far], RoutingRequest(prompt_tokens=100), Routing.CACHE_AWARE)
    assert choice.taken is not None and choice.taken.prefill == "near"
    assert ("fetch from dram", pytest.approx(8.0)) in choice.colocated[0].parts
    assert "fetch from dram 8" in choice.reason


def test_what_is_cheaper_to_compute_is_not_said_to_be_fetched():
    look = WorkerSnapshot(
        WorkerId("near"), Role.COLOCATED, 0.0, 0, True, cached_tokens=80, reach=FetchEstimate("dram", 80, 0.5)
    )
    choice = choose_pair([look], RoutingRequest(prompt_tokens=100), Routing.CACHE_AWARE)
    assert choice.colocated[0].parts == (("queue", 0.0), ("prefill", 20.0), ("decode", 0.0))


def test_workers_tell_what_pages_cost_them_and_the_router_reckons_with_it():
    decisions = list[Decision]()
    world = World(both(num_pages=16, dram_pages=200), RouterConfig(routing=Routing.CACHE_AWARE))
    world.router.routes.note = decisions.append
    requests = [ask(f"r{number}", number % 3, 1.5 * number) for number in range(12)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, requests)
    told = world.router.routes.kept.prices
    assert {"computed", "dram"} <= {source for lines in told.values() for source in lines}
    assert any("fetch from" in each.choice.reason for each in decisions if each.choice is not None)
