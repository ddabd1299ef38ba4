"""Of very many workers a few are weighed for each request: work is spread nearly as well, and room is always found."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.events import Received, Reject, Send, Submit, WorkerJoined, WorkerLost
from jdisagg.core.labels import Labels
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import CacheHeld, Reserve, View
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.decisions import Decision
from jdisagg.policy.fallback import run_tokens
from jdisagg.policy.forecasts import PROMPT_TOKEN_S
from jdisagg.policy.planning import order_of
from jdisagg.policy.prefix_cache import packed, page_hashes
from jdisagg.policy.request_state import RequestState
from jdisagg.policy.router import Router
from jdisagg.policy.sample import KEEPERS, MANY, WEIGHED
from tests.sim.cases import request, worker


def crowd(prefills: int, decodes: int) -> list[WorkerConfig]:
    sizes = {"num_pages": 4096, "num_slots": 64}
    counts = ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    return [worker(f"{role}-{number}", role, **sizes) for role, count in counts for number in range(count)]


def decodes_of(router: Router, requests: int, first: int = 0) -> list[WorkerId]:
    """Whom it asked for reservations."""
    asked = list[WorkerId]()
    for number in range(first, first + requests):
        effects = router.handle(Submit(request(f"r{number}", 6, max_tokens=4)), 0.0)
        assert not any(isinstance(each, Reject) for each in effects)
        asked += [each.to for each in effects if isinstance(each, Send) and isinstance(each.message, Reserve)]
    return asked


@pytest.mark.parametrize("workers", [MANY, 2 * MANY + 1])
def test_work_is_spread_evenly_though_only_a_few_are_weighed(workers):
    router = Router(RouterConfig(queue_limit=1 << 20), crowd(workers, workers))
    asked = decodes_of(router, 10 * workers)
    counts = [asked.count(WorkerId(f"decode-{number}")) for number in range(workers)]
    assert len(asked) == 10 * workers and min(counts) >= 8 and max(counts) <= 12
    prefills = [len(router.peers[WorkerId(f"prefill-{number}")].prefill_work) for number in range(workers)]
    assert min(prefills) >= 8 and max(prefills) <= 12


def test_the_one_worker_with_room_is_found_among_many():
    router = Router(RouterConfig(queue_limit=1 << 20), crowd(MANY, 3 * MANY))
    for number in range(3 * MANY):
        if number != 77:
            router.peers[WorkerId(f"decode-{number}")].hear(View(0, 0, 0, 0))
    assert decodes_of(router, 20) == [WorkerId("decode-77")] * 20


def test_a_pool_of_few_beside_one_of_many_is_weighed_as_a_whole():
    router = Router(RouterConfig(queue_limit=1 << 20), crowd(3, 2 * MANY))
    decodes_of(router, 30)
    assert {len(peer.prefill_work) for peer in router.peers.values() if peer.config.role.prefills} == {10}


def test_who_joins_and_who_is_lost_is_known_at_once():
    router = Router(RouterConfig(queue_limit=1 << 20, workers_return=True), crowd(MANY, MANY))
    joined = worker("decode-new", Role.DECODE, num_pages=4096, num_slots=64)
    router.handle(WorkerJoined(joined), 0.0)
    router.handle(WorkerLost(WorkerId("decode-0")), 0.0)
    asked = decodes_of(router, 20 * MANY)
    assert WorkerId("decode-new") in asked and WorkerId("decode-0") not in asked
    for number in range(1, MANY):
        router.handle(WorkerLost(WorkerId(f"decode-{number}")), 0.0)
    router.handle(WorkerLost(WorkerId("decode-new")), 0.0)
    assert decodes_of(router, 3, first=20 * MANY) == [], "without a decode worker they wait"


def test_round_robin_weighs_all():
    router = Router(RouterConfig(queue_limit=1 << 20, routing=Routing.ROUND_ROBIN), crowd(MANY, MANY))
    assert router.routes.sample.next_few() is None
    assert len(decodes_of(router, 5)) == 5


def keeping(count: int) -> Router:
    """A router that asks what its many workers keep."""
    workers = [replace(each, prefix_caching=True) for each in crowd(count, count)]
    return Router(RouterConfig(queue_limit=1 << 20, routing=Routing.CACHE_AWARE), workers)


def told(router: Router, worker: str, prompt: tuple[int, ...]) -> None:
    """The worker says that it keeps the full pages of this prompt, and nothing else."""
    names = page_hashes(prompt, 4)
    router.handle(Received(WorkerId(worker), CacheHeld(1, packed(names))), 0.0)


def test_who_keeps_a_prompts_beginning_is_found_among_many():
    router, long = keeping(2 * MANY), request("long", 40)
    told(router, "prefill-77", long.prompt[:36])
    told(router, "prefill-5", long.prompt[:8])
    told(router, "decode-100", long.prompt[:36])
    router.handle(Submit(long), 0.0)
    row = router.rows[long.request_id]
    assert row.prefill == "prefill-77"


@given(st.integers(0, 2**32))
def test_of_many_nobody_is_taken_who_costs_more_than_the_least_loaded_that_was_weighed_or_a_keeper(seed):
    """And where weighing all takes a keeper, so does weighing a few."""
    draw, decisions = random.Random(seed), list[Decision]()
    workers = [replace(each, prefix_caching=True) for each in crowd(MANY, MANY)]
    config = RouterConfig(queue_limit=1 << 20, routing=Routing.CACHE_AWARE)
    router, asked = Router(config, workers, decisions.append), request("asked", 40)
    for keeper in draw.sample(range(MANY), draw.randrange(KEEPERS)):
        told(router, f"prefill-{keeper}", asked.prompt[: 4 * draw.randrange(11)])
    for peer in router.peers.values():
        peer.prompt_tokens = float(draw.randrange(30))
    row = RequestState(asked, order_of(asked), Ledger(), math.inf)
    full = router.routes._choice(router.peers.values(), row, 0.0, (False, None))
    sampled = router.routes.sample.next_few()
    assert sampled is not None
    router.routes.sample._next -= WEIGHED
    router.handle(Submit(asked), 0.0)
    taken, best = decisions[-1].choice, full.prefills[0]
    assert taken is not None and taken.taken is not None
    queued = min(peer.prompt_tokens for peer in sampled if peer.config.role is Role.PREFILL)
    run = run_tokens(40, workers[0].prefill_buckets)
    assert taken.prefills[0].cost <= PROMPT_TOKEN_S * (queued + run) + 1e-12
    if router.routes.directory.cached_tokens(router.peers[best.worker].config, row.page_names(4)):
        assert taken.taken.prefill == best.worker


def test_of_many_workers_in_racks_each_prefill_worker_is_weighed_with_a_decode_worker_of_its_rack():
    racks = [
        replace(each, labels=Labels(rack=f"r{number % 40}")) for number, each in enumerate(crowd(2 * MANY, 2 * MANY))
    ]
    router = Router(RouterConfig(queue_limit=1 << 20, routing=Routing.CACHE_AWARE), racks)
    for number in range(60):
        router.handle(Submit(request(f"r{number}", 40)), 0.0)
    pairs = [(row.prefill, row.decode) for row in router.rows.values()]
    rack_of = {each.worker: each.labels.rack for each in racks}
    assert all(prefill and decode and rack_of[prefill] == rack_of[decode] for prefill, decode in pairs)


def test_no_more_than_a_few_of_each_role_are_weighed():
    router = Router(RouterConfig(), crowd(2 * MANY, MANY))
    for _ in range(3 * MANY):
        few = router.routes.sample.next_few()
        assert few is not None and len(few) == 2 * WEIGHED == len({each.config.worker for each in few})


def test_a_small_house_is_weighed_as_ever():
    assert Router(RouterConfig(), crowd(MANY - 1, MANY - 1)).routes.sample.next_few() is None
