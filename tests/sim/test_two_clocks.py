"""Two clocks, one scheduler: what a live run decided, the simulator decides on the live durations, effect for effect.

Live: real threads, a real clock, and machines whose answers come late, by chance, from as many threads as there are
lanes. Toys draw the tokens in most; one run is the embedded model's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jdisagg import devices
from jdisagg.commands import replay
from jdisagg.core.codec import encode
from jdisagg.core.errors import JournalError
from jdisagg.core.events import KVArrived, RunStep, ShipKV, StepDone, TimerFired
from jdisagg.core.journal import Header, Journal, Recorded, read_lines
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Stages, TransferMode, WorkerConfig
from jdisagg.engine.toy import VOCAB, ToyExecutor
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.assemble import build
from jdisagg.serve.deploy.deployment import resolve_deployment
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.service import Service
from jdisagg.sim.rerun import MeasuredRun, RerunCluster, between, measure, rerun
from tests.serve.scripted import FIXTURE
from tests.sim.cases import request, worker
from tests.steps import runs_prefill

MESHES = ["prefill:tp1,decode:pp2", "colocated:2xtp1"]
Journalled = tuple[Header, list[Recorded]]


@dataclass(frozen=True)
class Late:
    """An answer, or a shipment, that is some time on its way."""

    inner: Any
    late_s: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self) -> Any:
        time.sleep(self.late_s)
        return self.inner.read()

    def wait(self) -> None:
        time.sleep(self.late_s)


class LateToy(ToyExecutor):
    """A toy that answers up to 3 ms late."""

    faults = random.Random(5)

    def run(self, plan: Any, group_done: Any = None) -> Any:
        longest_s = 2e-3 if plan.decode else 3e-3
        return Late(super().run(plan, group_done), self.faults.uniform(0.0, longest_s))

    def ship(self, transfer: Any, destination: Any) -> Any:
        return Late(super().ship(transfer, destination), self.faults.uniform(0.0, 3e-3))

    def check(self, shipment: Any) -> Any:
        return super().check(shipment.inner)

    def insert(self, shipment: Any) -> None:
        super().insert(shipment.inner)


def configs_of(mesh: str) -> list[WorkerConfig]:
    """Pools that a few sequences fill: some are preempted."""
    sizes = {"num_pages": 40, "reserve_tokens": 4, "transfer": TransferMode.AUTO, "layer_groups": ((0, 1), (1, 2))}
    return [
        worker(place.worker, place.role, decode=Stages(place.pp), **sizes) for place in MeshSpec.parse(mesh).workers()
    ]


async def ask(service: Service, each: Request, wait_s: float, gives_up: bool) -> None:
    await asyncio.sleep(wait_s)
    stream = service.stream(replace(each, arrival_s=service.now_s()))
    async for update in stream:
        if gives_up and update.delta.sampled:
            await stream.aclose()  # type: ignore[attr-defined]
            return


async def ask_all(service: Service, requests: list[Request]) -> None:
    faults = random.Random(7)
    tasks = [ask(service, each, faults.uniform(0.0, 0.25), i % 7 == 3) for i, each in enumerate(requests)]
    await asyncio.gather(*tasks)


def stream(service: LocalService, requests: list[Request], lines: Callable[[], list[str]]) -> Journalled:
    service.start()
    try:
        asyncio.run(ask_all(service, requests))
    finally:
        service.stop()
    header, entries = read_lines(lines())
    return header, list(entries)


def live_toys(mesh: str, tmp_path: Path) -> Journalled:
    configs, lines, limits = configs_of(mesh), list[str](), RouterConfig(lease_s=0.1)  # renewed by timers
    journal = Journal(Header(limits, tuple(configs)), sink=lines.append)
    service = LocalService(
        Router(limits, configs),
        {config.worker: Worker(config) for config in configs},
        {config.worker: LateToy(config) for config in configs},
        model_name="toy",
        model_config=ModelConfig("llama", VOCAB, 8, 16, 1, 1, 1, 8, 128),
        max_model_len=128,
        tokenizer=Tokenizer(FIXTURE),
        observers=[journal.observe],
        journal=journal,
    )
    stops = {"stop_token_ids": (3, 50), "max_tokens": 40}
    requests = [request(f"r{i}", 5 + 3 * i % 40, **stops) for i in range(24)]
    return stream(service, requests, lambda: lines)


def live_embedded(mesh: str, tmp_path: Path) -> Journalled:
    sizes = {"max_model_len": 128, "prefill_buckets": "64", "table_buckets": "128", "max_num_batched_tokens": 64}
    settings = Settings(mesh=mesh, record_dir=str(tmp_path), page_size=16, **sizes)
    found = devices.prepare("cpu", MeshSpec.parse(mesh).num_devices)
    service = build(resolve_deployment(settings, "cpu", None), settings, found)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    requests = [Request(RequestId(f"r{i}"), tuple(range(300, 310 + 9 * i)), sampling) for i in range(8)]
    return stream(service, requests, lambda: next(tmp_path.glob("*.jsonl")).read_text().splitlines())


@pytest.fixture(scope="module", params=MESHES)
def toys(request, tmp_path_factory) -> Journalled:
    return live_toys(request.param, tmp_path_factory.mktemp("journal"))


def line_of(each: Recorded) -> str:
    fields = {"at_s": each.at_s, "actor": each.actor, "event": encode(each.event), "decided": each.decided}
    return json.dumps(fields)


def kinds(measured: MeasuredRun, kind: type) -> int:
    return sum(isinstance(effect, kind) for entry in measured.entries for effect in entry.effects)


def check_same(journal: Journalled) -> MeasuredRun:
    header, entries = journal
    measured = rerun(header, entries)
    assert len(measured.entries) == len(entries) and kinds(measured, RunStep)
    outside = {type(event).__name__ for _, _, event in measured.given}
    assert outside <= {"Submit", "Cancel", "WiresTimed"}, "every other event follows from an actor's own effect"
    return measured


def test_the_simulator_decides_what_the_live_run_decided(toys):
    measured = check_same(toys)
    events = [entry.event for entry in measured.entries]
    assert sum(isinstance(event, StepDone) for event in events) > 30
    assert any(isinstance(event, TimerFired) for event in events) or toys[0].workers[0].role == "colocated"
    assert any(isinstance(event, KVArrived) for event in events) == (toys[0].workers[0].role == "prefill")


@pytest.mark.slow
def test_so_it_is_with_the_embedded_model(tmp_path):
    check_same(live_embedded(MESHES[0], tmp_path))


def test_the_replay_takes_a_journal_through_the_simulator(toys, tmp_path, capsys):
    header, entries = toys
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([header.to_line(), *map(line_of, entries)]))
    assert replay.main(["replay", str(path), "--virtual"]) == 0
    assert f"{len(entries)} events, same decisions in virtual time" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"num_slots": 2}, {"steps_in_flight": 1}, {"num_pages": 39}])
def test_another_scheduler_is_found_out(toys, change):
    header, entries = toys
    measured = measure(header, entries)
    other = replace(header, workers=tuple(replace(each, **change) for each in header.workers))
    with pytest.raises(JournalError, match="event"):
        RerunCluster(other, measured).compare()


def test_a_plan_that_takes_longer_is_found_out(toys):
    measured = measure(*toys)
    key, answer = next(
        (key, each) for key, each in measured.steps.items() if isinstance(each.event, StepDone) and each.event.first
    )
    measured.steps[key] = answer._replace(took_s=answer.took_s + 5e-3)
    with pytest.raises(JournalError, match="event"):
        RerunCluster(toys[0], measured).compare()


def test_a_token_that_was_not_drawn_is_found_out(toys):
    measured = measure(*toys)
    key, answer = next(
        (key, each) for key, each in measured.steps.items() if isinstance(each.event, StepDone) and each.event.decode
    )
    assert isinstance(answer.event, StepDone)
    slots = [(slot, drawn and (replace(drawn[0], token=96 - drawn[0].token),)) for slot, drawn in answer.event.decode]
    measured.steps[key] = answer._replace(event=replace(answer.event, decode=tuple(slots)))
    with pytest.raises(JournalError, match="StepDone"):
        RerunCluster(toys[0], measured).compare()


def test_an_effect_that_differs_is_named(toys):
    measured = measure(*toys)
    entry = next(each for each in measured.entries if any(runs_prefill(effect) for effect in each.effects))
    entry.effects.insert(0, ShipKV(None))  # type: ignore[arg-type]
    with pytest.raises(JournalError, match=r"effect 1 live .*ShipKV"):
        RerunCluster(toys[0], measured).compare()


def test_a_journal_of_other_actors_is_refused(toys):
    header, entries = toys
    other = replace(header, workers=tuple(replace(each, num_slots=2) for each in header.workers))
    with pytest.raises(JournalError, match="not those on record"):
        measure(other, entries)
    with pytest.raises(JournalError, match="which the header does not have"):
        measure(header, [replace(entries[0], actor=WorkerId("decode-9"))])


@pytest.mark.parametrize("seed", range(3))
def test_durations_lead_from_instant_to_instant_to_the_last_bit(seed):
    faults = random.Random(seed)
    for _ in range(2000):
        began_s = faults.uniform(0.0, 10.0 ** faults.randint(-6, 6))
        ended_s = began_s + faults.uniform(0.0, 10.0 ** faults.randint(-9, 3))
        assert began_s + between(began_s, ended_s) == ended_s
