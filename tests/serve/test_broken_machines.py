"""Executors that raise, once or for ever, and a driver thread that dies: every request ends, and the front says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from jdisagg.core.errors import RequestError
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.executor import Executor, GroupDone
from jdisagg.engine.toy import ToyExecutor, ToyShipment, toy_output
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.driver.driver import Actor
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.service import Draining
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.health import LOST_AFTER
from tests.engine import stacks
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import worker_config
from tests.serve.scripted import FIXTURE

PARTS = ("prefill", "prefill read", "decode", "decode read", "ship", "ship wait", "bits", "check", "insert")


class Broken(Exception):
    """What a broken machine raises."""


class Late:
    """A result that raises when it is read."""

    def __init__(self, transfer: KVTransfer | None = None) -> None:
        self.transfer = transfer

    def read(self) -> Any:
        raise Broken("the result is lost")

    wait = wait_packed = read


class Breakable:
    """A machine that raises at the named parts of its work while their count lasts."""

    def __init__(self, machine: Executor) -> None:
        self.machine, self.config = machine, machine.config
        self.left: dict[str, int] = {}

    def _breaks(self, part: str) -> bool:
        self.left[part] = self.left.get(part, 0) - 1
        return self.left[part] >= 0

    def _try(self, part: str) -> None:
        if self._breaks(part):
            raise Broken(f"{part} is broken")

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> Any:
        phase = "prefill" if plan.decode is None else "decode"
        self._try(phase)
        pending = self.machine.run(plan, group_done)
        return Late() if self._breaks(f"{phase} read") else pending

    def ship(self, transfer: KVTransfer, destination: Breakable) -> Any:
        self._try("ship")
        shipment = self.machine.ship(transfer, destination.machine)
        if self._breaks("bits"):
            shipment = flipped(shipment)
        return Late(transfer) if self._breaks("ship wait") else shipment

    def check(self, shipment: Any) -> Any:
        self._try("check")
        return self.machine.check(shipment)

    def insert(self, shipment: Any) -> None:
        self._try("insert")
        self.machine.insert(shipment)

    def drop(self, shipment: Any) -> None:
        self.machine.drop(shipment)

    def open_gates(self, attempt: Attempt) -> None:
        self.machine.open_gates(attempt)


def flipped(shipment: Any) -> Any:
    """One bit of it changes on its way."""
    if isinstance(shipment, ToyShipment):
        return shipment.flipped()
    slices = shipment.landed[-1].slices
    bits = np.array(slices.values[0])
    bits.reshape(-1).view(np.uint8)[bits.nbytes // 3] ^= 1
    slices.values[0] = jax.device_put(bits, slices.values[0].sharding)
    return shipment


class Stack:
    def __init__(
        self, machines: list[Executor], router: Actor | None = None, configs: Sequence[WorkerConfig] = ()
    ) -> None:
        """configs: of the workers, where they use less than their machines have."""
        self.machines = {machine.config.worker: Breakable(machine) for machine in machines}
        configs = list(configs) or [machine.config for machine in machines]
        self.workers = {config.worker: Worker(config) for config in configs}
        self.service = LocalService(
            router or Router(RouterConfig(), configs),
            self.workers,
            self.machines,
            model_name="toy",
            model_config=stacks.CONFIG,
            max_model_len=configs[0].max_model_len,
            tokenizer=Tokenizer(FIXTURE),
        )

    def idle(self) -> bool:
        pages = [worker.shared for worker in self.workers.values()]
        return self.service.running == 0 and all(each.available == each.pool.num_pages for each in pages)


def toys(*roles: Role) -> list[Executor]:
    names = [f"{role}-{index}" for index, role in enumerate(roles)]
    return [ToyExecutor(worker_config(name, role, 64)) for name, role in zip(names, roles, strict=True)]


PAIR = (Role.PREFILL, Role.DECODE)


@contextmanager
def started(stack: Stack) -> Iterator[Stack]:
    stack.service.start()
    try:
        yield stack
    finally:
        stack.service.stop()


def requests(count: int, max_tokens: int = 12) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [Request(RequestId(f"r{i}"), tuple(range(3 + i, 12 + i)), sampling, float(i)) for i in range(count)]


async def answer(stack: Stack, request: Request) -> tuple[FinishReason, list[int]]:
    tokens: list[int] = []
    async for update in stack.service.stream(request):
        tokens.extend(each.token for each in update.delta.sampled)
        if update.finish is not None:
            return update.finish.reason, tokens
    raise AssertionError("the stream ended without a finish")


def answers(stack: Stack, asked: list[Request]) -> list[tuple[FinishReason, list[int]]]:
    async def everyone() -> list[tuple[FinishReason, list[int]]]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(answer(stack, each) for each in asked))

    return asyncio.run(everyone())


@pytest.mark.parametrize(
    ("roles", "part"), [(PAIR, part) for part in PARTS] + [((Role.COLOCATED,), part) for part in PARTS[:4]]
)
def test_one_failure_of_any_part_costs_time_and_no_token(roles: tuple[Role, ...], part: str) -> None:
    with started(Stack(toys(*roles))) as stack:
        for machine in stack.machines.values():
            machine.left[part] = 1
        asked = requests(6)
        right = [(FinishReason.LENGTH, toy_output(each.prompt, each.sampling)) for each in asked]
        assert answers(stack, asked) == right
        assert stack.service.ready
        eventually(stack.idle)


@pytest.mark.slow
def test_a_real_mesh_that_fails_a_step_or_has_a_bit_flipped_draws_the_same_tokens_again() -> None:
    asked = [Request(each.request_id, each.prompt, stacks.GREEDY, each.arrival_s) for each in requests(4)]
    with started(Stack(list(stacks.warm_pair(2, 2)))) as stack:
        right = answers(stack, asked)
        for part in ("prefill", "decode", "bits", "insert"):
            for machine in stack.machines.values():
                machine.left[part] = 1
            assert answers(stack, asked) == right
            assert any(machine.left[part] < 0 for machine in stack.machines.values()), f"{part} never broke"
        assert {reason for reason, _ in right} == {FinishReason.LENGTH}
        eventually(stack.idle)


@pytest.mark.parametrize("part", ["prefill", "prefill read", "decode", "decode read"])
def test_a_machine_that_never_works_ends_requests_with_errors_and_then_takes_none(part: str) -> None:
    with started(Stack(toys(*PAIR))) as stack, serving(create_app(stack.service)) as url:
        for machine in stack.machines.values():
            machine.left[part] = 10**9
        statuses = []
        while httpx.get(f"{url}/health").status_code == 200:
            response = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9}, timeout=10)
            statuses.append(response.status_code)
        assert set(statuses) == {500} and len(statuses) <= LOST_AFTER
        late = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9}, timeout=10)
        assert late.status_code == 503
        assert stack.service.driver.alive


def test_work_goes_on_where_one_of_two_machines_is_lost() -> None:
    with started(Stack(toys(Role.PREFILL, Role.DECODE, Role.DECODE))) as stack:
        stack.machines[WorkerId("decode-1")].left["decode"] = 10**9
        for _ in range(2 * LOST_AFTER):
            asked = requests(4)
            right = [(FinishReason.LENGTH, toy_output(each.prompt, each.sampling)) for each in asked]
            assert answers(stack, asked) == right
        assert stack.service.ready


class Dying:
    """A router that raises at the first event."""

    def handle(self, event: Any, now_s: float) -> list[Any]:
        raise Broken("a router that is broken")


def test_a_dead_driver_ends_requests_at_once_and_health_says_so() -> None:
    with started(Stack(toys(*PAIR), Dying())) as stack, serving(create_app(stack.service)) as url:
        body = {"prompt": [5, 6, 7], "max_tokens": 9}
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=10)
        assert (first.status_code, "broken" in first.text) == (500, True)
        states = [httpx.get(f"{url}/{name}").status_code for name in ("live", "health", "ready")]
        assert states == [503] * 3
        assert "a router that is broken" in asyncio.run(asyncio.wait_for(stack.service.died(), 5))
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=10).status_code == 503


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 2.5}, {"top_k": 2**31}, {"seed": None}, {"temperature": "1"}, {"logit_bias": ((1, None),)}]
)
def test_a_request_of_wrong_kinds_is_refused_by_name_before_anybody_works_on_it(wrong: dict[str, Any]) -> None:
    with started(Stack(toys(*PAIR))) as stack:
        (bad,), asked = requests(1), requests(3)
        with pytest.raises(RequestError, match=f"{next(iter(wrong))}.* is "):
            answers(stack, [replace(bad, sampling=replace(bad.sampling, **wrong))])
        assert answers(stack, asked) == [
            (FinishReason.LENGTH, toy_output(each.prompt, each.sampling)) for each in asked
        ]


def test_who_comes_while_the_driver_dies_is_not_left_waiting() -> None:
    with started(Stack(toys(*PAIR))) as stack:
        stack.service._died(Broken("told, and the thread has not ended yet"))
        with pytest.raises(Draining):
            answers(stack, requests(1))
        assert stack.service.running == 0
