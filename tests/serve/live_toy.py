"""The real router, workers and live driver over toy machines: a stack that answers in microseconds, without JAX."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from jdisagg.core.events import StepDone
from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.steps import StepPlan
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.toy import ToyExecutor
from jdisagg.kv.tiers.stores import DramStore
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.pools import place_of
from jdisagg.serve.driver.driver import Observer
from jdisagg.serve.driver.kv_moves import WorkerStores
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.role_change import Reshaper
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.cluster_view import holders_of
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState, Records, transfer_stats_of
from tests.serve.live_http import serving
from tests.serve.scripted import FIXTURE

MAX_LEN, PAGE_SIZE, PAGE_BYTES = 256, 8, 1000
KEY = {"authorization": "Bearer k"}  # of `watched`


@dataclass(frozen=True)
class Paused:
    """A pending step that takes `pause_s` to read."""

    step: PendingStep
    pause_s: float

    def read(self) -> StepDone:
        time.sleep(self.pause_s)
        return self.step.read()


class SlowToy(ToyExecutor):
    """A toy whose decode steps take `pause_s` seconds, and whose chunks take `chunk_s`."""

    pause_s, chunk_s = 0.0, 0.0

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        step = super().run(plan, group_done)
        took_s = (self.pause_s if plan.decode else 0.0) + (self.chunk_s if plan.prefill else 0.0)
        return Paused(step, took_s) if took_s else step


def worker_config(name: str, role: Role, num_pages: int) -> WorkerConfig:
    return WorkerConfig(WorkerId(name), role, num_pages, PAGE_SIZE, MAX_LEN, num_slots=8, prefix_caching=True)


def groups_of(config: WorkerConfig) -> list[StageShape]:
    return [StageShape(range(*layers), 1, config.page_size) for layers in config.layer_groups or ((0, 2),)]


def stores_of(machine: ToyExecutor) -> WorkerStores:
    dram = DramStore(machine.config.dram_pages, machine.record_bytes)
    return WorkerStores(machine.record_bytes, {Tier.DRAM: dram})


@dataclass
class ToyStack:
    service: LocalService
    metrics: Metrics
    workers: dict[WorkerId, Worker]
    machines: dict[WorkerId, SlowToy]

    def idle(self) -> bool:
        """No request is running and every page is back."""
        pages = [worker.shared for worker in self.workers.values()]
        return self.service.running == 0 and all(each.available == each.pool.num_pages for each in pages)


@contextmanager
def toy_stack(
    decode_pages: int = 256,
    queue_limit: int = 64,
    queue_timeout_s: float = 60.0,
    configs: Sequence[WorkerConfig] = (),
    kind: type[SlowToy] = SlowToy,
    routing: Routing = Routing.LEAST_LOADED,
    observers: Sequence[Observer] = (),
    reshaper: Reshaper | None = None,
) -> Iterator[ToyStack]:
    """These workers, or one that prefills and one that decodes, started; stopped at the end."""
    configs = configs or (
        worker_config("prefill-0", Role.PREFILL, 256),
        worker_config("decode-0", Role.DECODE, decode_pages),
    )
    max_len = configs[0].max_model_len
    tokenizer = Tokenizer(FIXTURE)
    metrics = Metrics("toy", configs, PAGE_BYTES, recompiles=lambda: 0.0, compat=("vllm", "jetstream"))
    records = Records(keep=40)
    workers = {config.worker: Worker(config) for config in configs}
    machines = {config.worker: kind(config) for config in configs}
    metrics.watch_pools(workers)
    places = [place_of(config, groups_of(config)) for config in configs]
    debug = DebugState(records, lambda: transfer_stats_of(workers), lambda: places, partial(holders_of, workers))
    service = LocalService(
        Router(
            RouterConfig(queue_limit=queue_limit, queue_timeout_s=queue_timeout_s, routing=routing),
            configs,
            records.note,
        ),
        workers,
        machines,
        model_name="toy",
        model_config=ModelConfig("llama", tokenizer.vocab_size, 8, 16, 1, 1, 1, 8, max_len),
        max_model_len=max_len,
        tokenizer=tokenizer,
        observers=[metrics.observe, records.observe, *observers],
        metrics=metrics,
        debug_state=debug,
        reshaper=reshaper,
        stores={name: stores_of(machine) for name, machine in machines.items() if machine.config.has_tiers},
    )
    service.start()
    try:
        yield ToyStack(service, metrics, workers, machines)
    finally:
        service.stop()


@contextmanager
def watched(stack: ToyStack) -> Iterator[str]:
    """The URL of an HTTP front that has /debug, and asks for the key in `KEY`."""
    settings = FrontSettings(api_key="k")
    with serving(create_app(stack.service, settings, stack.metrics, stack.service.debug_state)) as url:
        yield url
