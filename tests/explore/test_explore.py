"""Every interleaving of the real actors in small worlds, and what may go wrong in them."""

from __future__ import annotations

import pytest

from jdisagg.core.worker_config import TransferMode
from tests.explore.scenes import Scene, disaggregated
from tests.explore.search import Found, explore
from tests.explore.story import tell
from tests.explore.world import World

ONE = disaggregated(1)  # two chunks, two layer groups: KV leaves in four parts
ONE_WHOLE = disaggregated(1, transfer=TransferMode.WHOLE)


def whole(scene: Scene) -> Found:
    """All states of a scene; fails with the shortest story where a law is broken."""
    world = World(scene)
    found = explore(world)
    assert not found.violation, tell(world, found)
    assert found.complete and found.ends > 0, found.line()
    print(found.line())
    return found


def endings(found: Found) -> set[str]:
    return {status for outcome in found.outcomes for status in outcome}


def test_messages_may_overtake_each_other_as_they_like():
    found = whole(ONE_WHOLE.but(any_order=True))
    assert found.states > 10_000 and endings(found) == {"length"}


@pytest.mark.parametrize("fault", ["loss", "dup", "late", "early", "restart", "flip", "burst", "fail"])
def test_one_fault_of_any_kind_costs_no_request(fault):
    found = whole(ONE.but(**{fault: 1}))
    assert endings(found) == {"length"}


def test_a_cancel_at_any_moment_gives_everything_back():
    assert endings(whole(ONE.but(cancel=1))) == {"length", "abort"}


def test_a_worker_lost_for_good_ends_its_request_with_a_word():
    assert endings(whole(ONE.but(lose=1))) == {"length", "error", "rejected"}


def test_a_router_that_starts_again_meets_the_remains_of_its_earlier_life():
    found = whole(ONE.but(reboot=1, again=1))
    assert endings(found) == {"length", "cut"}
