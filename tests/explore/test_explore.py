"""Every interleaving of the real actors in small worlds, and what may go wrong in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.worker_config import Role, Stages, TransferMode
from tests.explore.invariants import check_end
from tests.explore.scenes import Scene, colocated, disaggregated, request
from tests.explore.search import Found, explore
from tests.explore.steps import follow
from tests.explore.story import tell
from tests.explore.world import Action, World

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "fault"),
    [
        *((ONE, fault) for fault in ("loss", "dup", "restart", "flip", "burst", "fail")),
        *((ONE_WHOLE, fault) for fault in ("late", "early")),
        *(pytest.param(ONE, fault, marks=pytest.mark.hostile) for fault in ("late", "early")),
    ],
)
def test_one_fault_of_any_kind_costs_no_request(scene, fault):
    found = whole(scene.but(**{fault: 1}))
    assert endings(found) == {"length"}


def test_a_cancel_at_any_moment_gives_everything_back():
    assert endings(whole(ONE.but(cancel=1))) == {"length", "abort"}


@pytest.mark.parametrize("beside", [{}, {"restart": 1}], ids=["alone", "beside a restart"])
def test_a_text_that_ends_an_answer_does_so_at_any_moment_in_the_routers_queue_too(beside: dict[str, int]):
    assert endings(whole(ONE.but(stop=1, **beside))) == {"length", "stop"}


def test_a_worker_lost_for_good_ends_its_request_with_a_word():
    assert endings(whole(ONE.but(lose=1))) == {"length", "error", "rejected"}


def test_a_lost_worker_may_come_back_while_requests_old_and_new_wait():
    scene = colocated(1, 1)
    found = whole(replace(scene, router=replace(scene.router, workers_return=True)).but(lose=1, back=1))
    assert endings(found) == {"length", "timeout"}


@pytest.mark.parametrize("scene", [ONE_WHOLE, pytest.param(ONE, marks=pytest.mark.hostile)], ids=["whole", "in parts"])
@pytest.mark.slow
def test_workers_that_lose_their_router_join_the_next_one_empty(scene):
    found = whole(scene.but(leave=1, again=1))
    assert endings(found) == {"length", "cut", "rejected"}


def test_a_router_that_starts_again_meets_the_remains_of_its_earlier_life():
    found = whole(ONE.but(reboot=1, again=1))
    assert endings(found) == {"length", "cut"}


def becoming(scene: Scene, role: Role) -> Scene:
    """The first worker may become this; a phase without a worker is waited for."""
    target = replace(scene.workers[0], role=role)
    return replace(scene, changes=(target,), router=replace(scene.router, workers_return=True)).but(change=1)


CHANGING = becoming(colocated(1, 2, transfer=TransferMode.WHOLE), Role.DECODE)  # the other one can do all there is


def test_a_worker_that_is_asked_becomes_what_it_is_to_be():
    """As the scenes below have it happen at any moment: the first action of all, and then what comes of itself."""
    world = World(CHANGING)
    state = follow(world, world.start(), Action("change"))
    while actions := list(world.natural_actions(state)):
        state = follow(world, state, actions[0])
    check_end(world, state)
    assert world.config_of(1, state.actors[1]).role is Role.DECODE
    assert [client.status for client in state.clients] == ["length"]


def test_a_change_of_role_at_any_moment_costs_no_request():
    assert endings(whole(CHANGING)) == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["loss", "cancel"])
def test_a_change_of_role_goes_through_a_fault(fault):
    found = endings(whole(CHANGING.but(**{fault: 1})))
    assert {"length"} <= found <= {"length", "abort", "timeout"}


@pytest.mark.slow
def test_a_router_that_dies_while_a_worker_changes_its_role_finds_it_as_what_it_has_become():
    found = whole(CHANGING.but(leave=1, again=1))
    assert endings(found) == {"length", "cut"}


@pytest.mark.parametrize(
    ("transfer", "states"),
    [(TransferMode.WHOLE, 5_000), pytest.param(None, 20_000, marks=pytest.mark.hostile)],
    ids=["whole", "in parts"],
)
@pytest.mark.slow
def test_two_requests_fight_for_three_pages(transfer, states):
    found = whole(disaggregated(2, **({"transfer": transfer} if transfer else {})))
    assert found.states > states and endings(found) == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param("loss", marks=pytest.mark.hostile), "restart"])
def test_two_workers_that_do_both_share_two_requests_through_a_fault(fault):
    assert endings(whole(colocated(2, 2).but(**{fault: 1}))) == {"length"}


@pytest.mark.parametrize(
    ("fault", "also"),
    [pytest.param("loss", set(), marks=pytest.mark.slow), ("fail", {"error"}), ("cancel", {"abort"})],
)
def test_one_worker_that_does_both_serves_two_requests_through_a_fault(fault, also):
    assert endings(whole(colocated(2, 1, num_pages=4, num_slots=2).but(**{fault: 1}))) == {"length"} | also


@pytest.mark.parametrize("scene", [ONE_WHOLE, pytest.param(ONE, marks=pytest.mark.hostile)], ids=["whole", "in parts"])
@pytest.mark.slow
def test_a_lease_outlasts_a_prompt_that_takes_long_as_long_as_its_source_lives(scene):
    found = whole(scene.but(slow=True))
    assert "length" in endings(found)


MIXED = {"mixed_steps": True, "num_pages": 6, "num_slots": 2}


@pytest.mark.parametrize(
    ("fault", "also"),
    [pytest.param("loss", set(), marks=pytest.mark.slow), ("cancel", {"abort"}), ("fail", {"error"})],
)
def test_rows_and_chunks_of_one_step_go_through_a_fault(fault, also):
    assert endings(whole(colocated(2, 1, **MIXED).but(**{fault: 1}))) == {"length"} | also


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3, pytest.param(4, marks=pytest.mark.hostile)])
@pytest.mark.parametrize(("fault", "also"), [("fail", {"error"}), ("cancel", {"abort"})])
def test_rows_as_wide_as_a_draft_go_through_a_fault(fault, also, longest):
    requests = [request(1, max_tokens=longest), request(2, max_tokens=longest - 1)]
    scene = colocated(2, 1, requests=requests, draft_tokens=1, **MIXED)
    assert endings(whole(scene.but(**{fault: 1}))) == {"length"} | also


@pytest.mark.slow
def test_rows_that_are_wide_only_where_it_pays_answer_all():
    requests = [request(1, max_tokens=4), request(2, max_tokens=3)]
    scene = colocated(2, 1, requests=requests, draft_tokens=1, draft_auto=True, **MIXED)
    assert endings(whole(scene)) == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3, pytest.param(4, marks=pytest.mark.hostile)])
def test_a_row_whose_tokens_are_read_one_by_one_goes_through_a_fault(longest):
    requests = [request(1, max_tokens=longest, synchronous=True), request(2, max_tokens=longest - 1)]
    assert endings(whole(colocated(2, 1, requests=requests, **MIXED).but(fail=1))) == {"length", "error"}


HELD = request(1, 2, max_tokens=6, synchronous=True, grammar="any")
DRAFTS = {"requests": [HELD], "draft_tokens": 2, "num_pages": 4}


@pytest.mark.parametrize(
    ("scene", "fault", "also"),
    [
        (disaggregated(**DRAFTS), "cancel", {"abort"}),
        pytest.param(disaggregated(**DRAFTS), "fail", set(), marks=pytest.mark.slow),
        (disaggregated(**DRAFTS), "restart", set()),
        (colocated(1, 2, **DRAFTS), "lose", set()),
        (colocated(1, 2, **DRAFTS), "leave", {"cut", "rejected"}),
    ],
    ids=["cancel", "fail", "restart", "lose", "leave"],
)
def test_a_grammar_knows_of_every_token_that_drafts_drew_whatever_happens(scene, fault, also):
    """Of two workers that each can do all, one may be gone: then the other begins with what the client has."""
    assert endings(whole(scene.but(**{fault: 1}))) == {"length"} | also


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "also"), [("fail", set()), ("cancel", {"abort"}), ("loss", set())])
def test_turns_of_a_ring_go_through_a_fault(fault, also):
    """Each step of the decode worker draws up to two tokens a row, and the page of the second is granted with it."""
    scene = disaggregated(requests=[request(1, max_tokens=4)], transfer=TransferMode.WHOLE, num_pages=4)
    prefill, decode = scene.workers
    found = whole(replace(scene, workers=(prefill, replace(decode, decode=Stages(1, 2)))).but(**{fault: 1}))
    assert endings(found) == {"length"} | also


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "also"), [("cancel", {"abort"}), ("fail", {"error"})])
def test_turns_of_one_stage_go_through_a_fault_beside_prompts(fault, also):
    scene = colocated(2, 1, requests=[request(1, max_tokens=4), request(2)], decode=Stages(1, 2), num_pages=4)
    assert endings(whole(scene.but(**{fault: 1}))) == {"length"} | also


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "also"), [("cancel", {"abort"}), ("fail", {"error"})])
def test_turns_and_drafts_in_turns_go_through_a_fault(fault, also):
    sizes = {"decode": Stages(1, 2), "draft_tokens": 1, "draft_auto": True, "num_pages": 4}
    scene = colocated(2, 1, requests=[request(1, max_tokens=4), request(2)], **sizes)
    assert endings(whole(scene.but(**{fault: 1}))) == {"length"} | also
