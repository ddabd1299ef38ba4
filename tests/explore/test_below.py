"""Every interleaving of pages that go down, come up, or are fetched from another worker, and what may go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.request import RequestId
from jdisagg.core.router_config import Routing
from jdisagg.core.tiers import InsertPages
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.policy.cache.fetch import Fetches
from tests.explore.scenes import ROUTER, Scene, colocated, request, scene, twins, worker
from tests.explore.search import Found, explore
from tests.explore.steps import follow
from tests.explore.story import tell
from tests.explore.test_explore import endings, whole
from tests.explore.world import Action, State, World

KEPT = {"prefix_caching": True, "transfer": TransferMode.WHOLE, "num_pages": 2}
IN_TURN = replace(ROUTER, routing=Routing.ROUND_ROBIN)
FIRST, SECOND = twins(2, 3)  # one full page that others may read
OTHER, AGAIN = request(3, 3), replace(SECOND, request_id=RequestId("r4"))
ONE = colocated(3, 1, requests=[FIRST, OTHER, AGAIN], dram_pages=8, **KEPT)
TWO = colocated(2, 2, requests=[FIRST, SECOND], peer_fetch=True, **KEPT).but(router=IN_TURN)
PREFILLERS = scene(
    [worker(name, Role.PREFILL, peer_fetch=True, **KEPT) for name in ("one", "two")]
    + [worker("decode", Role.DECODE, **{**KEPT, "num_pages": 4})],
    [FIRST, SECOND],
).but(router=IN_TURN)


class Warm(World):
    """Begins when these requests have come and gone, one after the other."""

    def __init__(self, scene: Scene, gone: int) -> None:
        super().__init__(scene)
        self.gone = gone

    def start(self) -> State:
        state = super().start()
        for number in range(self.gone):
            state = follow(self, state, Action("submit", number))
            while deliveries := [each for each in self.natural_actions(state) if each.kind == "deliver"]:
                state = follow(self, state, deliveries[0])
        return state


def sources(world: World) -> set[str]:
    """Where pages came from that were written to HBM."""
    found = [each for known in world._reactions.values() for each in known.effects if isinstance(each, InsertPages)]
    return {str(each.move.source) for each in found}


def from_here(scene: Scene, gone: int, source: str, **faults: int) -> Found:
    """All states behind the beginning; fails with the shortest story where a law is broken."""
    world = Warm(scene.but(**faults), gone)
    found = explore(world)
    assert not found.violation, tell(world, found)
    assert found.complete and found.ends > 0 and source in sources(world), found.line()
    print(found.line())
    return found


FAULTS = [
    ("cancel", {"abort"}),
    *((each, set()) for each in ("", "torn", "restart", "loss", "dup")),
    *(pytest.param(each, set(), marks=pytest.mark.slow) for each in ("late", "early")),
]


@pytest.mark.parametrize(("fault", "also"), FAULTS)
def test_a_page_that_lies_below_comes_up_whatever_happens_meanwhile(fault, also):
    assert endings(from_here(ONE, 2, "dram", **({fault: 1} if fault else {}))) == {"length"} | also


@pytest.mark.parametrize(("fault", "also"), [*FAULTS, ("lose", set())])
def test_a_fetch_from_another_worker_costs_no_request_and_no_page_whatever_happens(fault, also):
    found = from_here(TWO, 1, "peer", **({fault: 1} if fault else {}))
    assert endings(found) <= {"length", "error"} if fault == "lose" else endings(found) == {"length"} | also


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["torn", "loss", "restart"])
def test_a_prefill_worker_fetches_from_another_and_ships_what_came(fault):
    assert endings(from_here(PREFILLERS, 1, "peer", **{fault: 1})) == {"length"}


@pytest.mark.slow
def test_from_the_first_request_on_pages_go_down_and_come_up_in_any_order():
    assert endings(whole(ONE)) == {"length"}


def test_pages_that_come_late_would_be_written_over_anothers(monkeypatch):
    """Were a fetch that is over to insert what comes."""
    moved = Fetches.moved

    def always(self, event, now_s):
        over = event.move.owner not in self.under_way
        ready = moved(self, event, now_s)
        if over:
            self.out.put(InsertPages(event.move, event.good))
        return ready

    monkeypatch.setattr(Fetches, "moved", always)
    assert "a late write" in explore(Warm(ONE.but(early=1), 2)).violation
