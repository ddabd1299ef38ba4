"""A short reserve over real meshes: it preempts, and the tokens are those of a long one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.events import Effect, Event, Received
from jdisagg.core.messages import Preempted
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.core.router_config import RouterConfig
from jdisagg.engine.executor import Executor
from jdisagg.policy.router.router import Router
from tests.engine import stacks
from tests.serve.live_http import eventually
from tests.serve.test_broken_machines import Stack, answers, started

PAGES = 20  # of the decode worker: four of the longest of these sequences fill it
TOKENS = 24


class CountingRouter(Router):
    """Counts the preemptions that workers tell it of."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.preempted = 0

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        self.preempted += isinstance(event, Received) and isinstance(event.message, Preempted)
        return super().handle(event, now_s)


def stack_that_reserves(reserve_tokens: int) -> tuple[Stack, CountingRouter]:
    """Returns a prefill mesh of two shards and a decode mesh of two stages with few pages."""
    machines: list[Executor] = list(stacks.warm_pair(2, 2))
    prefill, decode = (machine.config for machine in machines)
    configs = [prefill, replace(decode, num_pages=PAGES, reserve_tokens=reserve_tokens)]
    router = CountingRouter(RouterConfig(), configs)
    return Stack(machines, router, configs), router


def asked(count: int) -> list[Request]:
    sampling = replace(stacks.GREEDY, max_tokens=TOKENS)
    return [
        Request(RequestId(f"r{i}"), tuple((7 * i + 3 * at) % 97 for at in range(5 + i)), sampling, float(i))
        for i in range(count)
    ]


@pytest.mark.slow
def test_a_short_reserve_preempts_draws_the_same_tokens_and_gives_every_page_back() -> None:
    requests = asked(12)
    long, long_router = stack_that_reserves(TOKENS)
    with started(long) as stack:
        right = answers(stack, requests)
        eventually(stack.idle)
    assert {(reason, len(tokens)) for reason, tokens in right} == {(FinishReason.LENGTH, TOKENS)}
    short, router = stack_that_reserves(1)
    with started(short) as stack:
        assert answers(stack, requests) == right
        eventually(stack.idle)
    assert long_router.preempted == 0 < router.preempted
