"""The table of programs is all that a worker runs: machines that were never warmed serve a mixed load, and what that
makes them compile is the table, no more and no less. Then what is made of the table: warm-up, and chips elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, Stages, TransferMode, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.programs import abstract_table
from jdisagg.model.sources import RandomSource
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.driver.local_service import LocalService
from tests.engine.evens import Evens
from tests.engine.stacks import CONFIG, GREEDY, HALVES
from tests.serve.scripted import FIXTURE

MODEL = replace(CONFIG, max_position=256)
LONGEST, PAGE_SIZE = 200, 2
PATIENT = RouterConfig(  # they compile as they go
    handoff_timeout_s=300.0, lease_s=300.0, stall_timeout_s=300.0, routing=Routing.CACHE_AWARE, short_token_weight=0.0
)
DEADLINE_S = 300.0

Asked = tuple[int, SamplingParams]  # tokens of the prompt
SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
SHORT = replace(GREEDY, max_tokens=3)
ALONE: list[Asked] = [
    (5, SHORT),
    (5, SCORED),
    (133, SCORED),  # 66 pages: every size of a shipment; its last chunk is a small one
    (40, SHORT),
    (5, SamplingParams(max_tokens=4, seed=3)),
    (5, SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=0.5, logprobs=2)),
    (5, SamplingParams(max_tokens=4, temperature=0.0, grammar="even", synchronous=True)),
]
LONG: Asked = (9, replace(GREEDY, max_tokens=180))  # through every width of a page table; the others come meanwhile
BESIDE: list[Asked] = [(5, SHORT), (60, SHORT), (5, SHORT), (60, SHORT)]
AGAIN: Asked = (25, SHORT)  # always the same prompt


def cold(role: Role, num_devices: int, first: int = 0, **sizes: Any) -> MeshExecutor:
    """A machine of two layer groups: two stages of a decoding worker."""
    pp = 2 if role.decodes else 1
    config = WorkerConfig(
        WorkerId(f"{role}-0"),
        role,
        num_pages=400,
        page_size=PAGE_SIZE,
        max_model_len=LONGEST,
        num_slots=4 * pp,
        decode=Stages(pp),
        prefill_buckets=(16, 64),
        table_buckets=(16, LONGEST // PAGE_SIZE),
        max_chunk_seqs=4,
        transfer=TransferMode.WHOLE,
        layer_groups=tuple((run.start, run.stop) for run in HALVES),
    )
    layout = KVLayout(MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_dim, PAGE_SIZE)
    devices, source = jax.devices()[first : first + num_devices], RandomSource(MODEL, seed=3)
    return MeshExecutor(
        replace(config, **sizes), MODEL, source, layout, HALVES, devices, jnp.float32, grammars=Evens(97)
    )


def declared_of(machines: list[MeshExecutor]) -> dict[WorkerId, list[DeclaredProgram]]:
    """By worker, of workers that ship to each other where they are a pair."""
    found = {machine.config.worker: machine.table.steps() for machine in machines}
    if len(machines) == 2:
        source, destination = machines
        found[source.config.worker] += source.table.departures(destination.table.shapes)
        found[destination.config.worker] += destination.table.arrivals(source.table.shapes)
    return found


def named(machine: MeshExecutor, declared: list[DeclaredProgram]) -> tuple[set, set]:
    """(declared, compiled): each program by what the table calls its function, where it runs, and its shapes."""
    kinds = {id(each.program): (each.kind, each.stage) for each in declared}
    ours = {(*kinds[id(each.program)], each.key[1]) for each in declared}
    compiled = {
        (*kinds.get(id(program), ("undeclared", -1)), signature)
        for program in machine.table.owned
        for signature in program.traced
    }
    return ours, compiled


class Load:
    """Requests to cold machines."""

    def __init__(self, machines: list[MeshExecutor]) -> None:
        configs = [machine.config for machine in machines]
        self.count = 0
        self.service = LocalService(
            Router(PATIENT, configs),
            {config.worker: Worker(config) for config in configs},
            {machine.config.worker: machine for machine in machines},
            model_name="tiny",
            model_config=MODEL,
            max_model_len=LONGEST,
            tokenizer=Tokenizer(FIXTURE),
        )

    async def ask(self, asked: Asked, began: asyncio.Event | None = None) -> None:
        self.count += 1
        first = 0 if asked is AGAIN else self.count * 31
        prompt = tuple((first + place) % MODEL.vocab_size for place in range(asked[0]))
        request = Request(RequestId(str(self.count)), prompt, asked[1], arrival_s=self.service.now_s())
        async for update in self.service.stream(request):
            if began is not None:
                began.set()
            if update.finish is not None:
                assert update.finish.reason == "length", update.finish

    async def once(self) -> None:
        """Each alone, then some beside one that takes long."""
        for asked in (AGAIN, *ALONE, AGAIN):
            await self.ask(asked)
        began = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ask(LONG, began))
            await began.wait()
            for asked in (*BESIDE, AGAIN):
                await self.ask(asked)


KEEPS = {"prefix_caching": True}
ENDS = {"short_prompt_tokens": 16, "prefill_buckets": (16,), "mixed_steps": True}
STACKS = {
    "prefill and decode": lambda: [cold(Role.PREFILL, 2), cold(Role.DECODE, 2, first=4)],
    "decode with ends": lambda: [cold(Role.PREFILL, 2, **KEEPS), cold(Role.DECODE, 2, first=4, **KEEPS, **ENDS)],
    "colocated, mixed": lambda: [cold(Role.COLOCATED, 2, mixed_steps=True)],
    "colocated, alternating": lambda: [cold(Role.COLOCATED, 2, mixed_steps=False)],
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_served_load_compiles_just_what_the_table_declares(stack: str):
    machines = STACKS[stack]()
    declared, load = declared_of(machines), Load(machines)

    def missing() -> list[tuple]:
        pairs = [named(machine, declared[machine.config.worker]) for machine in machines]
        return [each[:2] for ours, compiled in pairs for each in ours - compiled]

    deadline_s = time.monotonic() + DEADLINE_S
    load.service.start()
    try:
        asyncio.run(load.once())
        while missing() and time.monotonic() < deadline_s:  # who rides with whom is a matter of time
            asyncio.run(load.once())
    finally:
        load.service.stop()
    assert not missing(), "declared, and nobody runs them"
    for machine in machines:
        ours, compiled = named(machine, declared[machine.config.worker])
        assert not [each[:2] for each in compiled - ours], "run, and nobody declares them"
        assert machine.num_compiled == len(ours), "a program was compiled for two placements"


def test_warm_up_runs_the_table_once_and_what_else_is_compiled_counts_as_a_recompile():
    pair = [cold(Role.PREFILL, 1), cold(Role.DECODE, 2, first=1)]
    labels: list[str] = []
    pair[0].warm(lambda label, done, total: labels.append(label), peers=[pair[1]])
    pair[1].warm()
    for machine, declared in zip(pair, declared_of(pair).values(), strict=True):
        ours, compiled = named(machine, declared)
        assert ours == compiled and machine.num_compiled == len(ours) and machine.recompiles() == 0
    assert labels[-1] == "ready" and labels[0] == "prefill of 16 tokens, stage 0"
    assert "decode-0 insert of 64 pages, stage 1" in labels
    again: list[str] = []
    pair[0].warm(lambda label, done, total: again.append(label), peers=[pair[1]])
    assert again == ["ready"]
    group = pair[0].layer_groups[-1]
    group.head(jnp.zeros((24, MODEL.hidden_size)), np.zeros(4, np.int32))
    assert pair[0].recompiles() == 1, "a shape that is not in the table"


def test_a_table_counts_the_padding_that_its_pages_and_weights_hold():
    """Three KV heads on two shards are two places each."""
    model = replace(MODEL, num_heads=9, num_kv_heads=3, intermediate_size=65)
    config = WorkerConfig(WorkerId("prefill-0"), Role.PREFILL, 400, PAGE_SIZE, LONGEST, 4, Stages(), (16,), (16,))
    layout = KVLayout(model.num_layers, 3, model.head_dim, PAGE_SIZE)
    table = abstract_table(config, model, layout, HALVES, jax.devices()[:2], jnp.float32)
    assert sum(table.pool_bytes(stage) for stage in (0, 1)) == 401 * layout.held_page_bytes(2) // 2
    assert 2 * table.pool_bytes(0) == 401 * layout.bytes_per_page * 2 // 3
    matrices = 4 * 2 * model.layer_params(2)
    norms = 4 * 4 * model.hidden_size
    assert table.weight_bytes(0) == 4 * model.embedding_params + matrices + norms


@pytest.mark.parametrize(
    ("role", "sizes"),
    [
        (Role.PREFILL, {}),
        (Role.DECODE, {}),
        (Role.DECODE, {**ENDS, "forced_tokens": 6}),
        (Role.COLOCATED, {"mixed_steps": True}),
    ],
)
def test_a_table_of_shapes_declares_what_a_machine_declares(role: Role, sizes: dict[str, Any]):
    """What `jdisagg aot` compiles for a chip is what a worker there would warm, placements included."""
    machine = cold(role, 2, **sizes)
    table = abstract_table(machine.config, MODEL, machine.table.layout, HALVES, jax.devices()[:2], machine.table.dtype)
    there = abstract_table(machine.config, MODEL, table.layout, HALVES, jax.devices()[4:6], table.dtype)

    def facts(declared: list[DeclaredProgram]) -> list[tuple]:
        placed = [str([leaf.sharding for leaf in jax.tree.leaves(each.batch)]) for each in declared]
        return [
            (each.label, each.key[1], place, each.donated_bytes, each.collectives)
            for each, place in zip(declared, placed, strict=True)
        ]

    assert facts(table.steps()) == facts(machine.table.steps())
    if role.prefills:
        assert facts(table.departures(there.shapes)) == facts(machine.table.departures(there.shapes))
    if role.decodes:
        assert facts(table.arrivals(there.shapes)) == facts(machine.table.arrivals(there.shapes))
