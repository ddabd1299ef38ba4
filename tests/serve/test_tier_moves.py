"""Moves between tiers by the real driver and threads, over toy machines: what is counted, shown, and what breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from jdisagg.core.request import SamplingParams, WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role
from jdisagg.engine.toy import ToyShipment, toy_output
from tests.serve.live_http import eventually
from tests.serve.live_toy import KEY, PAGE_SIZE, SlowToy, ToyStack, toy_stack, watched, worker_config
from tests.serve.test_metrics import read

BOTH = WorkerId("colocated-0")
CONFIG = replace(worker_config(BOTH, Role.COLOCATED, 40), dram_pages=400)
UP, DOWN = (f"destination={to},source={of},worker={BOTH}" for to, of in (("hbm", "dram"), ("dram", "hbm")))
LENGTH = 20 * PAGE_SIZE  # three prompts are more than HBM holds


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * at) % 97 for at in range(LENGTH)]


def ask(url: str, number: int) -> list[int]:
    body = {"prompt": prompt(number), "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []


def expected(number: int) -> list[int]:
    return toy_output(tuple(prompt(number)), SamplingParams(max_tokens=3, temperature=0.0))


def shown(url: str, what: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/debug/cache", json={"prompt": what}, headers=KEY).json()
    return answer | {"worker": answer["workers"][0]}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ToyStack, str]]:
    """Prompts were asked for in turn, until some of one came back."""
    with toy_stack(configs=(CONFIG,)) as stack, watched(stack) as url:
        tiers = stack.workers[BOTH].tiers

        def came_back() -> bool:
            tiers.prices.lines.clear()  # a machine that was held up may have found it dear
            for number in range(3):
                assert ask(url, number) == expected(number)
            return read(stack.metrics).get(("jdisagg_tier_pages_moved_total", UP), 0) > 0

        eventually(came_back, 60)
        demotions = stack.workers[BOTH].tiers.demotions
        assert demotions is not None
        eventually(lambda: not demotions.under_way, 30)
        yield stack, url


def test_what_came_from_dram_is_counted_by_pages_bytes_and_seconds(served):
    stack, _ = served
    found = read(stack.metrics)
    pages = found["jdisagg_tier_pages_moved_total", UP]
    assert pages > 0 and found["jdisagg_tier_pages_moved_total", DOWN] > 0
    assert found["jdisagg_tier_bytes_total", UP] == pages * stack.machines[BOTH].record_bytes
    assert found["jdisagg_tier_move_seconds_sum", UP] > 0
    kept = len(stack.workers[BOTH].tiers.pools[Tier.DRAM].kept)
    assert found["jdisagg_tier_pages", f"tier=dram,use=cached,worker={BOTH}"] == kept


def test_debug_cache_says_who_holds_what_of_a_prompt_and_what_each_source_would_cost(served):
    _, url = served
    answer = shown(url, prompt(0))
    assert answer["prompt_tokens"] == LENGTH and len(answer["workers"]) == 1
    told = answer["worker"]
    assert (told["worker"], told["role"], told["page_size"]) == (BOTH, "colocated", PAGE_SIZE)
    assert told["held_tokens"]["dram"] + told["held_tokens"]["hbm"] >= LENGTH - PAGE_SIZE
    assert told["seconds"]["dram"] > 0 and told["seconds"]["computed"] > 0 and told["left_alone"] == []
    nothing = shown(url, [1, 2, 3] * PAGE_SIZE)["worker"]["held_tokens"]
    assert nothing == {"hbm": 0, "dram": 0}


def test_debug_cache_takes_text_and_refuses_what_is_no_prompt(served):
    _, url = served
    assert shown(url, "Hello there")["prompt_tokens"] > 0
    for body in ({}, {"prompt": []}, {"prompt": 7}, {"prompt": [-1]}):
        assert httpx.post(f"{url}/debug/cache", json=body, headers=KEY).status_code == 400
    assert httpx.post(f"{url}/debug/cache", json={"prompt": [1]}).status_code == 401


class Unwritable(SlowToy):
    """Its pages cannot be written by what comes from below."""

    def insert(self, shipment: ToyShipment) -> None:
        if shipment.transfer.attempt.request_id == "fetch":
            raise RuntimeError("the pages cannot be written")
        super().insert(shipment)


def test_a_machine_that_cannot_write_what_came_is_lost_and_tells_nobody_a_token():
    two = [replace(CONFIG, worker=WorkerId(f"colocated-{number}")) for number in range(2)]
    with toy_stack(configs=two, kind=Unwritable) as stack, watched(stack) as url:

        def both_have_tried() -> bool:
            for worker in stack.workers.values():
                worker.tiers.prices.lines.clear()  # a machine that was held up may have found it dear
            for number in range(8):
                assert ask(url, number) in (expected(number), [])
            return not stack.service.driver.able

        eventually(both_have_tried, 60)
        assert stack.service.driver.alive
