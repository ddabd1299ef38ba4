"""Sequences that have to stop and are to go on: what they have is put below, and fetched from there, not computed."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.events import ROUTER, ChangeRole, EmitTokens
from jdisagg.core.messages import Preempted
from jdisagg.core.request import Request, RequestId, WorkerId
from jdisagg.core.tiers import MovePages, Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.prefix_cache import page_hashes, unpacked
from tests.policy.tier_yard import TierYard
from tests.sim.cases import check_outputs, colocated, definition, pair, request, run_all, sent, worker
from tests.sim.costs import Costs
from tests.sim.world import World
from tests.steps import runs_prefill

KEPT: dict[str, Any] = {"prefix_caching": True, "num_pages": 16, "reserve_tokens": 4}
DRAINED = WorkerId("decode-0")


def three(**sampling: Any) -> list[Request]:
    return [request(name, 20, max_tokens=40, arrival_s=0.001 * at, **sampling) for at, name in enumerate("abc")]


def names_moved(world: World, destination: Tier) -> set[int]:
    moves = [effect.move for _, _, effect in world.effects if isinstance(effect, MovePages)]
    return {name for move in moves if move.destination is destination for name in unpacked(move.names)}


def computed(world: World) -> int:
    return sum(effect.plan.prefill.num_tokens for _, _, effect in world.effects if runs_prefill(effect))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("workers", [colocated, pair], ids=["colocated", "pair"])
def test_who_has_to_yield_is_parked_whole_and_goes_on_with_the_same_tokens(workers: Any, sampling: dict[str, Any]):
    world, requests = World(workers(**KEPT, dram_pages=128)), three(**sampling)
    run_all(world, requests)
    gave_way = sent(world, Preempted)
    assert gave_way and world.yard.moved[Tier.DRAM, Tier.HBM]
    for each in gave_way:
        whole = next(one for one in requests if one.request_id == each.attempt.request_id)
        fed = (*whole.prompt, *definition(whole))[: len(whole.prompt) + len(each.output) - 1]
        assert set(page_hashes(fed, 4, "")) <= names_moved(world, Tier.DRAM), "every full page of it"


def test_a_parked_sequence_is_read_back_where_it_would_have_been_computed_again():
    without, parked = World(colocated(**KEPT)), World(colocated(**KEPT, dram_pages=128))
    for world in (without, parked):
        run_all(world, three())
        assert sent(world, Preempted)
    assert computed(parked) < 0.7 * computed(without)


def cluster(**sizes: Any) -> list[WorkerConfig]:
    sizes = {**KEPT, "num_pages": 64, **sizes}
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
    return [worker(name, role, **sizes) for name, role in roles.items()]


def drained(yard: TierYard | None = None, drain_s: float = 0.2, **sizes: Any) -> World:
    """Long answers, of which some are on a worker that is to leave in the midst of them. Prompts are dear."""
    world = World(cluster(**sizes), yard=yard, costs=Costs(prefill_token_s=2e-3))
    requests = [request(name, 12, max_tokens=90) for name in "abcd"]
    for each in requests:
        world.submit(each)
    held = world.workers[DRAINED].decode_side.sequences
    while not any(len(each.output) >= 30 for each in held.values()):
        world.step()
    world._at(world.now_s, ROUTER, ChangeRole(DRAINED, 1, None, drain_s))
    world.run()
    check_outputs(world, requests)
    assert all(world.output(each.request_id) == definition(each) for each in requests)
    assert world.workers[DRAINED].shared.available == 64
    return world


def whole_s() -> float:
    world = World(cluster(), costs=Costs(prefill_token_s=2e-3))
    run_all(world, [request(name, 12, max_tokens=90) for name in "abcd"])
    return max(at_s for at_s, _, effect in world.effects if isinstance(effect, EmitTokens))


def test_streams_of_a_worker_that_leaves_go_on_from_the_pool():
    """What they had is fetched by the next worker; the last page, which was not full, is computed."""
    drain_s = 0.1 * whole_s()
    without, pooled = drained(drain_s=drain_s), drained(drain_s=drain_s, shared_pool=True)
    assert pooled.yard.moved[Tier.HBM, Tier.POOL] and pooled.yard.moved[Tier.POOL, Tier.HBM]
    assert computed(pooled) < computed(without)


@pytest.mark.parametrize("fault", ["dead", "lying", "hung"])
def test_a_pool_that_fails_costs_a_worker_that_leaves_no_stream(fault: str):
    yard = TierYard()
    getattr(yard, fault).add(Tier.POOL)
    world = drained(yard, drain_s=0.1 * whole_s(), shared_pool=True)
    assert names_moved(world, Tier.POOL) and set("abcd") <= set(world.finished)


def test_where_nothing_lies_below_nothing_is_parked():
    world = drained(drain_s=0.1 * whole_s())
    assert not names_moved(world, Tier.POOL) and RequestId("a") in world.finished
