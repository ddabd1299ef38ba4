"""The router's pair selection: what it remembers of prompts, turns, decisions, and samples of many workers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.events import Received, Reject, Send, Submit, WorkerJoined, WorkerLost
from jdisagg.core.labels import Labels
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import CacheHeld, Refused, Reserve, Reserved, View
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.directory import PrefixDirectory
from jdisagg.policy.cache.prefix_cache import packed, page_hashes
from jdisagg.policy.request_size import order_of
from jdisagg.policy.router.decisions import Decision, Verdict
from jdisagg.policy.router.estimates import PROMPT_TOKEN_S
from jdisagg.policy.router.pair_selection import KEEPERS, MANY, WEIGHED
from jdisagg.policy.router.request_state import RequestState
from jdisagg.policy.router.router import Router
from jdisagg.policy.router.routing import run_tokens
from tests.policy.router.test_router import Talk
from tests.sim.cases import pair, request, worker

POOLS = [
    worker(f"{role}-{index}", role, prefix_caching=True) for role in (Role.PREFILL, Role.DECODE) for index in range(2)
]


class Told(Talk):
    """A talk that keeps what was decided."""

    def __init__(self, workers: Any = None, **limits: Any) -> None:
        super().__init__(workers or POOLS, **limits)
        self.decisions: list[Decision] = []
        self.router = Router(RouterConfig(**limits), workers or POOLS, self.decisions.append)

    def pairs(self) -> list[tuple[WorkerId, WorkerId]]:
        pairs = [each.choice.taken for each in self.decisions if each.choice is not None and each.choice.taken]
        return [(pair.prefill, pair.decode) for pair in pairs]


def prompt_of(name: str, *tokens: int) -> Request:
    return Request(RequestId(name), tokens, SamplingParams(max_tokens=1))


def test_round_robin_takes_its_steps_over_requests():
    talk = Told(routing=Routing.ROUND_ROBIN)
    for index in range(4):
        talk.submit(request(f"r{index}"))
    assert [prefill for prefill, _ in talk.pairs()] == ["prefill-0", "prefill-1"] * 2


def test_a_prompt_goes_where_its_beginning_went_and_elsewhere_where_the_queue_there_is_longer():
    talk = Told(routing=Routing.CACHE_AWARE)
    start = tuple(range(8))
    talk.submit(prompt_of("a", *start, 20, 21))
    talk.submit(prompt_of("b", *range(30, 60)))
    assert [prefill for prefill, _ in talk.pairs()] == ["prefill-0", "prefill-1"]
    talk.submit(prompt_of("c", *start, 22, 23))
    assert talk.pairs()[-1][0] == "prefill-0"
    # 10 tokens wait there and one bucket of 8 is run, at 0.1 ms each; elsewhere 30 wait, and two buckets are run.
    assert (
        "prefill-0 costs 0.0018 (queue 0.001 + prefill 0.0008), next prefill-1 0.0046 (queue 0.003 + prefill 0.0016)"
        in (talk.decisions[-1].reason)
    )
    talk.submit(prompt_of("d", *range(30, 34), *range(60, 92)))
    assert talk.pairs()[-1][0] == "prefill-0", "4 tokens held there do not outweigh 10 more that wait"


def test_a_lost_workers_prompts_are_forgotten():
    talk = Told(routing=Routing.CACHE_AWARE)
    talk.submit(prompt_of("a", *range(9)))
    talk.take(WorkerLost(WorkerId("prefill-0")))
    assert talk.router.routes.directory.cached_tokens(POOLS[0], talk.router.rows[RequestId("a")].page_names(4)) == 0


def test_a_directory_holds_no_more_than_the_workers_pool_would():
    directory, small = PrefixDirectory(), worker("prefill-0", Role.PREFILL, num_pages=3, prefix_caching=True)
    directory.follow(small)
    directory.sent(small, (1, 2, 3))
    directory.sent(small, (1, 7))
    assert directory.cached_tokens(small, (1, 2, 3)) == 2 * small.page_size
    assert directory.cached_tokens(small, (1, 7)) == 2 * small.page_size
    assert directory.cached_tokens(worker("prefill-1", Role.PREFILL), (1, 7)) == 0


def test_names_are_worked_out_only_where_the_routing_asks_for_them():
    talk = Told(pair())
    talk.submit(prompt_of("a", *range(9)))
    assert not talk.router.rows[RequestId("a")].names and not talk.router.routes.directory.cached_tokens(POOLS[0], (1,))


def test_every_decision_is_told_once_with_its_reason():
    talk = Told([worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE)], queue_limit=1)
    talk.submit(request("a"))
    talk.says(WorkerId("decode-0"), Refused(Attempt(RequestId("a"), 1), "full"))
    for name in ("b", "c"):
        talk.submit(request(name))
    rejects = [effect for effect in talk.effects if isinstance(effect, Reject)]
    assert [each.request_id for each in rejects] == ["b", "c"]
    verdicts = [(each.request_id, each.verdict) for each in talk.decisions]
    assert verdicts == [
        ("a", Verdict.TAKEN), ("a", Verdict.WAITS), ("b", Verdict.REJECTED), ("c", Verdict.REJECTED)
    ]  # fmt: skip
    assert talk.decisions[1].reason == "least_loaded: no worker has room for its output"
    assert talk.decisions[2].reason == "1 requests wait already, the limit is 1"


def test_a_prompt_that_fits_nobody_is_a_decision_with_the_sizes_in_it():
    talk = Told()
    talk.submit(request("a", 500))
    assert [each.verdict for each in talk.decisions] == [Verdict.NEVER]
    assert "508 tokens fit no pair" in talk.decisions[0].reason


def test_a_second_attempt_is_a_decision_that_names_who_failed():
    talk = Told([POOLS[0], *POOLS[2:]])
    talk.submit(request("a"))
    talk.fire("row/a")  # nobody answers
    assert talk.pairs() == [("prefill-0", "decode-0"), ("prefill-0", "decode-1")]
    talk.says(WorkerId("decode-1"), Reserved(Attempt(RequestId("a"), 2), (1, 2, 3, 4)))
    shown = talk.decisions[1].to_json()
    assert shown["candidates"]["decode"][1]["last_resort"] == "failed this request before"
    assert shown["taken"] == {"prefill": "prefill-0", "decode": "decode-1"} and shown["decision"] == "taken"


@pytest.mark.parametrize("routing", Routing)
def test_every_routing_serves(routing):
    talk = Told(routing=routing)
    talk.take(Submit(request("a")))
    assert len(talk.pairs()) == 1 and talk.decisions[0].to_json()["routing"] == routing


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
    full = router.routes._choice(router.peers.values(), row, 0.0, False)
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
