"""KV that is kept: what is computed, shipped and given back where prompts begin alike. Contents are the toy engine's:
it draws from what the pages really hold, so that a page with another's content gives another token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jdisagg.core.events import ShipKV
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import TransferMode, WorkerConfig
from jdisagg.policy.cache.prefix_cache import page_hashes
from tests.sim.cases import check_ended, check_outputs, colocated, definition, pair, request, run_all
from tests.sim.fault_injector import Faults
from tests.sim.world import World
from tests.steps import runs_prefill

BEGINNING = tuple(range(40, 64))  # six pages of four tokens
KEPT = {"prefix_caching": True, "transfer": TransferMode.WHOLE}
layouts = pytest.mark.parametrize("workers", [pair(**KEPT), colocated(**KEPT)], ids=["pair", "colocated"])


def asks(name: str, *more: int, arrival_s: float = 0.0, beginning: tuple[int, ...] = BEGINNING, **changes) -> Request:
    given = {"sampling": SamplingParams(max_tokens=6), "arrival_s": arrival_s, **changes}
    return Request(RequestId(name), (*beginning, *more), **given)


def computed(world: World, name: str) -> list[int]:
    """Prompt tokens of the request that chunks computed, by chunk."""
    plans = [effect.plan for _, _, effect in reversed(world.effects) if runs_prefill(effect)]
    return [len(chunk.tokens) for plan in plans[::-1] for chunk in plan.prefill.chunks if chunk.request_id == name]


def shipped_pages(world: World, name: str) -> int:
    """Pages whose bytes travelled to the decode worker."""
    parts = {effect.transfer for _, _, effect in world.effects if isinstance(effect, ShipKV)}
    parts |= {part for _, _, effect in world.effects if runs_prefill(effect) for part in effect.ships}
    return sum(
        page != NULL_PAGE for each in parts if each.attempt.request_id == name for page in each.destination_pages
    )


def cached_tokens(world: World, name: str) -> int:
    return world.finished[RequestId(name)][0].ledger.cached_tokens


@layouts
def test_a_prompt_that_begins_like_an_earlier_one_computes_only_its_end(workers):
    world = World(workers)
    run_all(world, [asks("a", 1, 2, 3), asks("b", 9, 8, arrival_s=1.0)])
    assert sum(computed(world, "a")) == 27 and sum(computed(world, "b")) == 2
    assert (cached_tokens(world, "a"), cached_tokens(world, "b")) == (0, 24)


@layouts
def test_the_very_same_prompt_still_computes_its_last_token(workers):
    world = World(workers)
    run_all(world, [asks("a"), asks("b", arrival_s=1.0)])
    assert sum(computed(world, "b")) == 4 and cached_tokens(world, "b") == 20
    assert world.output(RequestId("a")) == world.output(RequestId("b"))


def test_only_what_the_decode_worker_lacks_travels():
    world = World(pair(**KEPT))
    run_all(world, [asks("a", 1, 2, 3), asks("b", 9, 8, arrival_s=1.0)])
    assert shipped_pages(world, "a") == 7 and shipped_pages(world, "b") == 1


@pytest.mark.parametrize("mode", list(TransferMode))
def test_the_delta_leaves_in_every_mode_and_gives_the_same_tokens(mode):
    world = World(pair(prefix_caching=True, transfer=mode, layer_groups=((0, 2), (2, 4))))
    run_all(world, [asks(f"r{i}", *range(i), arrival_s=0.3 * i) for i in range(20)])
    assert cached_tokens(world, "r19") == 40 and shipped_pages(world, "r19") <= 2, "43 tokens, 42 of them as in r18"


ENDS = {**KEPT, "short_prompt_tokens": 8, "prefill_buckets": (8,), "mixed_steps": True}
AWARE = RouterConfig(routing=Routing.CACHE_AWARE)
DECODER = WorkerId("decode-0")


def pair_with_ends(**sizes) -> list[WorkerConfig]:
    prefill, decode = pair(**KEPT)
    return [prefill, replace(decode, **{**ENDS, **sizes})]


@pytest.mark.parametrize("mixed", [True, False])
def test_a_short_end_is_computed_by_the_decode_worker_that_holds_the_rest(mixed):
    world = World(pair_with_ends(mixed_steps=mixed), AWARE)
    ahead = [request(f"long{i}", 60, max_tokens=4, arrival_s=1.0) for i in range(2)]  # the prefill worker is busy
    run_all(world, [asks("a", 1, 2, 3), *ahead, asks("b", 1, 9, 8, arrival_s=1.0)])
    assert computed_by(world, "b") == {DECODER: 3} and cached_tokens(world, "b") == 24
    assert shipped_pages(world, "b") == 0


def test_short_ends_ride_with_the_rows_of_those_that_decode():
    world = World(pair_with_ends(), AWARE)
    running = request("runs", max_tokens=60, arrival_s=0.9)
    run_all(world, [asks("a", 1), running, *(request(f"long{i}", 60, arrival_s=1.0) for i in range(2))]
            + [asks(f"b{i}", i, 9, arrival_s=1.02) for i in range(2)])  # fmt: skip
    mixed = [each.plan for _, actor, each in world.effects if actor == DECODER and runs_prefill(each)]
    assert mixed and all(plan.mixed for plan in mixed)


def test_what_the_router_took_for_held_is_computed_there_all_the_same_chunk_by_chunk():
    world = World(pair_with_ends(), AWARE)
    told = asks("b", 1, 2)
    world.router.routes.directory.sent(world.router.peers[DECODER].config, page_hashes(told.prompt, 4, ""))
    run_all(world, [*(request(f"long{i}", 60) for i in range(2)), replace(told, arrival_s=0.001)])
    assert computed_by(world, "b") == {DECODER: 26} and computed(world, "b") == [8, 8, 8, 2]


@pytest.mark.parametrize("seed", range(20))
def test_whoever_computes_the_end_and_whatever_fails_the_tokens_are_the_same(seed):
    faults = Faults(seed, 0.002, 0.02, 0.02, lose_transfer=0.02, flip_bit=0.02, fail_plan=0.01)
    world = World(pair_with_ends(num_pages=24), AWARE, faults=faults)
    rng = random.Random(seed)
    requests = [asks(f"r{i}", *(rng.randrange(3) for _ in range(i % 5)), arrival_s=0.02 * i) for i in range(30)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, requests)


def computed_by(world: World, name: str) -> dict[WorkerId, int]:
    """Prompt tokens of the request that each worker computed."""
    found: dict[WorkerId, int] = {}
    for _, actor, effect in world.effects:
        if runs_prefill(effect):
            tokens = sum(len(each.tokens) for each in effect.plan.prefill.chunks if each.request_id == name)
            found[actor] = found.get(actor, 0) + tokens
    return {worker: tokens for worker, tokens in found.items() if tokens}


@layouts
def test_the_next_turn_of_a_conversation_finds_its_own_answer(workers):
    world = World(workers)
    first = asks("a", 1, 2, 3)
    answer = tuple(definition(first))
    again = asks("b", 1, 2, 3, *answer, 5, 6, arrival_s=1.0)
    run_all(world, [first, again])
    on_decode = shipped_pages(world, "b") if len(workers) == 2 else 0
    assert on_decode <= 2, "27 tokens of the prompt and 5 of the answer were there: 8 pages of 9"
    if len(workers) == 1:
        assert cached_tokens(world, "b") == 32


def test_another_salt_finds_nothing():
    world = World(pair(**KEPT))
    run_all(
        world, [asks("a", cache_salt="one"), asks("b", arrival_s=1.0, cache_salt="other"), asks("c", arrival_s=2.0)]
    )
    assert [cached_tokens(world, name) for name in "abc"] == [0, 0, 0] and shipped_pages(world, "b") == 6


@layouts
def test_without_prefix_caching_nothing_is_kept(workers):
    off = [replace(each, prefix_caching=False) for each in workers]
    world = World(off)
    run_all(world, [asks("a"), asks("b", arrival_s=1.0)])
    assert cached_tokens(world, "b") == 0
    assert all(worker.shared.pool.free_pages == worker.config.num_pages for worker in world.workers.values())


@layouts
def test_prompt_logprobs_come_for_every_token_though_its_beginning_is_held(workers):
    world = World(workers)
    scored = SamplingParams(max_tokens=4, prompt_logprobs=1)
    run_all(world, [asks("a", 1), asks("b", 1, arrival_s=1.0, sampling=scored)])
    assert len(world.scored[RequestId("b")]) == len(BEGINNING) and cached_tokens(world, "b") == 0


@layouts
@pytest.mark.parametrize(("pooling", "reuses"), [("last", True), ("mean", False)])
def test_the_last_state_of_a_prompt_needs_no_more_than_its_end_and_their_mean_needs_all(workers, pooling, reuses):
    world = World(workers)
    pooled = SamplingParams(max_tokens=1, pooling=pooling)
    run_all(world, [asks("a", 1), asks("b", 1, arrival_s=1.0, sampling=pooled)])
    assert (cached_tokens(world, "b") > 0) == reuses


def test_of_two_at_once_the_second_waits_for_what_the_first_computes():
    world = World(pair(**KEPT))
    run_all(world, [asks("a", 1), asks("b", 2, arrival_s=0.0001)])
    assert sum(computed(world, "a")) == 25 and sum(computed(world, "b")) == 1


@layouts
def test_a_reservation_takes_kept_pages_before_anybody_is_refused(workers):
    tight = [replace(each, num_pages=16) for each in workers]
    world = World(tight)
    run_all(world, [request(f"r{i}", 30, max_tokens=8, arrival_s=0.5 * i) for i in range(8)])
    assert all(worker.shared.available == 16 for worker in world.workers.values())


@layouts
def test_who_is_cancelled_while_another_reads_takes_nothing_from_it(workers):
    world = World(workers)
    requests = [
        asks("a", 1),
        *(asks(f"r{i}", i, arrival_s=0.5, sampling=SamplingParams(max_tokens=40)) for i in range(4)),
    ]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.cancel(RequestId("r0"), 0.52)
    world.cancel(RequestId("r2"), 0.53)
    world.run()
    check_ended(world, requests)


def test_a_lost_decode_worker_costs_time_and_no_token():
    world = World([*pair(**KEPT), replace(pair(**KEPT)[1], worker=WorkerId("decode-1"))])
    requests = [asks(f"r{i}", i, arrival_s=0.05 * i, sampling=SamplingParams(max_tokens=30)) for i in range(6)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.lose(WorkerId("decode-0"), 0.2)
    world.run()
    check_ended(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]


def test_pages_of_a_step_that_failed_are_kept_for_nobody():
    world = World(pair(**KEPT), faults=Faults(seed=3, fail_plan=0.3, fail_transfer=0.2))
    requests = [asks(f"r{i}", i % 3, arrival_s=0.02 * i, sampling=SamplingParams(max_tokens=12)) for i in range(30)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    reused = [finish.ledger.cached_tokens for ends in world.finished.values() for finish in ends]
    assert any(reused), "and yet what was good is read"
