"""Workers by their operator's routes: what there is, draining, another role; and what cannot be, with why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.request import Request, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.mesh_executor import ReshapeTarget
from jdisagg.engine.toy import toy_output
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.deploy.pools import Pools, place_of
from jdisagg.serve.driver.role_change import Call
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import SlowToy, ToyStack, groups_of, toy_stack, worker_config
from tests.serve.test_broken_machines import requests

KEY = {"authorization": "Bearer the key of the operator"}
NAMES = ("prefill-0", "prefill-1", "decode-0")
CONFIGS = [worker_config(name, Role(name.partition("-")[0]), 64) for name in NAMES]
LAYOUT = KVLayout(2, 1, 8, 8, "float32")


class ToyReshaper:
    """Machines without weights; made when `go` is set."""

    def __init__(self) -> None:
        self.machines: dict[WorkerId, SlowToy] = {}
        self.go = threading.Event()
        self.go.set()

    def reshape(self, worker: WorkerId, config: WorkerConfig, call: Call) -> tuple[WorkerConfig, str]:
        assert self.go.wait(30)
        call(lambda: self.machines.update({worker: SlowToy(config)}))
        return config, ""


def shapes_of(config: WorkerConfig) -> WorkerShapes:
    able = {f"{role}:tp1": ReshapeTarget(replace(config, role=role), LAYOUT, (range(2),)) for role in Role}
    return WorkerShapes(1, able, {}, {role: f"{role}:tp1" for role in Role})


async def output_of(stack: ToyStack, request: Request) -> list[int]:
    updates = [update async for update in stack.service.stream(request)]
    return [sampled.token for update in updates for sampled in update.delta.sampled]


@dataclass
class Operated:
    stack: ToyStack
    url: str
    reshaper: ToyReshaper

    def get(self) -> dict[str, dict]:
        found = httpx.get(f"{self.url}/admin/workers", headers=KEY).json()["workers"]
        return {each["worker"]: each for each in found}

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(f"{self.url}/admin/workers/{path}", json=body, headers=KEY, timeout=30)

    def answers(self, count: int) -> None:
        asked = requests(count)

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*[output_of(self.stack, each) for each in asked])

        assert asyncio.run(all_of_them()) == [toy_output(each.prompt, each.sampling) for each in asked]


@pytest.fixture
def operated() -> Iterator[Operated]:
    reshaper = ToyReshaper()
    with toy_stack(configs=CONFIGS, reshaper=reshaper) as stack:
        machines = reshaper.machines = stack.machines

        def places() -> list:
            return [place_of(each.config, groups_of(each.config)) for each in machines.values()]

        able = {config.worker: shapes_of(config) for config in CONFIGS}
        stack.service.pools = Pools(stack.service.driver.post, places, lambda: able, dict)
        with serving(create_app(stack.service, FrontSettings(admin_key="the key of the operator"))) as url:
            yield Operated(stack, url, reshaper)


def test_a_worker_takes_another_role_by_a_route_and_the_next_requests_use_it(operated):
    answer = operated.post("prefill-1/role", {"role": "decode", "drain_s": 5})
    assert answer.status_code == 202
    assert answer.json() == {"worker": "prefill-1", "standing": "leaving", "role": "prefill", "becomes": "decode"}
    eventually(lambda: operated.get()["prefill-1"]["standing"] == "serving")
    assert operated.get()["prefill-1"]["role"] == "decode"
    operated.answers(6)
    metrics = operated.stack.metrics.render().decode()
    assert 'jdisagg_decode_runs_total{model_name="toy",worker="prefill-1"}' in metrics


def test_a_drained_worker_is_given_nothing_until_it_is_called_back(operated):
    assert operated.post("prefill-1/drain", {}).status_code == 202
    eventually(lambda: operated.get()["prefill-1"]["standing"] == "drained")
    operated.answers(4)
    assert operated.post("prefill-1/role", {"role": "prefill"}).status_code == 202
    eventually(lambda: operated.get()["prefill-1"]["standing"] == "serving")


REFUSED = [
    ("prefill-9/drain", {}, 404, "prefill-9"),
    ("decode-0/drain", {}, 409, "decode-0 is the last worker for decode"),
    ("decode-0/role", {"role": "prefill"}, 409, "decode-0 is the last worker for decode"),
    ("prefill-1/role", {"role": "router"}, 400, "role is 'router', must be one of prefill, decode, colocated"),
    ("prefill-1/role", {"role": "decode", "mesh": "pp2"}, 400, "mesh pp2 is of 2 devices, and the worker stands on 1"),
    ("prefill-1/role", {"role": "decode", "mesh": "2xtp1"}, 400, "must be one worker's"),
    ("prefill-1/role", {"role": "decode", "mesh": "x" * 99}, 400, "cannot read"),
    ("prefill-1/role", {"role": "decode", "drain_s": -1}, 400, "drain_s"),
    ("prefill-1/role", {"mesh": "tp1"}, 400, "role"),
]


@pytest.mark.parametrize(("path", "body", "status", "why"), REFUSED)
def test_what_cannot_be_is_refused_with_why_and_changes_nothing(operated, path, body, status, why):
    refused = operated.post(path, body)
    assert refused.status_code == status and why in refused.json()["error"]["message"]
    assert {each["standing"] for each in operated.get().values()} == {"serving"}


def test_the_routes_ask_for_the_admins_key(operated):
    assert httpx.get(f"{operated.url}/admin/workers").status_code == 401
    assert httpx.post(f"{operated.url}/admin/workers/prefill-0/drain", json={}).status_code == 401


def test_a_second_change_while_the_first_is_under_way_is_a_conflict(operated):
    operated.reshaper.go.clear()

    async def both() -> list[str]:
        pools = operated.stack.service.pools
        tries = [pools.change("prefill-1", "decode", "", 30.0) for _ in range(2)]
        return [type(each).__name__ for each in await asyncio.gather(*tries, return_exceptions=True)]

    assert sorted(asyncio.run(both())) == ["RoleConflict", "dict"]
    operated.reshaper.go.set()
    eventually(lambda: operated.get()["prefill-1"]["role"] == "decode")
