"""When decode pages are taken, over real meshes: whatever --reserve says, everybody gets the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.events import Effect, Event, Send
from jdisagg.core.messages import Reserve
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.core.router_config import Reserving, RouterConfig
from jdisagg.engine.executor import Executor
from jdisagg.policy.router.router import Router
from tests.engine import stacks
from tests.serve.live_http import eventually
from tests.serve.test_broken_machines import Stack, answers, started

PAGES = 20  # of the decode worker: four of the longest of these sequences fill it
TOKENS = 24


class Noting(Router):
    """Keeps in mind when it told workers to take pages."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told = set[Reserving]()

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        sent = (each.message for each in effects if isinstance(each, Send))
        self.told |= {message.reserve for message in sent if isinstance(message, Reserve)}
        return effects


def stack_that_reserves(reserve: Reserving) -> tuple[Stack, Noting]:
    """A prefill mesh of two shards, a decode mesh of two stages with little room."""
    machines: list[Executor] = list(stacks.warm_pair(2, 2))
    prefill, decode = (machine.config for machine in machines)
    configs = [prefill, replace(decode, num_pages=PAGES)]
    router = Noting(RouterConfig(reserve=reserve), configs)
    return Stack(machines, router, configs), router


def asked(count: int) -> list[Request]:
    sampling = replace(stacks.GREEDY, max_tokens=TOKENS)
    return [
        Request(RequestId(f"r{i}"), tuple((7 * i + 3 * at) % 97 for at in range(5 + i)), sampling, float(i))
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [Reserving.CALENDAR, Reserving.LATE])
def test_the_tokens_are_those_of_pages_taken_beforehand_and_every_page_comes_back(reserve: Reserving) -> None:
    requests = asked(12)
    early, _ = stack_that_reserves(Reserving.EARLY)
    with started(early) as stack:
        right = answers(stack, requests)
        eventually(stack.idle)
    assert {(reason, len(tokens)) for reason, tokens in right} == {(FinishReason.LENGTH, TOKENS)}
    late, router = stack_that_reserves(reserve)
    with started(late) as stack:
        assert answers(stack, requests) == right
        eventually(stack.idle)
    assert router.told == {reserve}
