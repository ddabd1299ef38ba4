"""The router's routes: what it remembers of prompts it sent, whose turn it is, and the decisions it tells."""

from typing import Any

import pytest

from jdisagg.core.events import Reject, Submit, WorkerLost
from jdisagg.core.messages import Refused, Reserved
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.decisions import Decision, Verdict
from jdisagg.policy.prefix_directory import PrefixDirectory
from jdisagg.policy.router import Router
from tests.policy.test_router import Talk
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
