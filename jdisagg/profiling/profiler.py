"""All that a profile holds, case by case: a list of things to time, rounds over all of them, and medians."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from jdisagg.core.profile import PHASES, DecodeTime, Host, Pool, PrefillTime, Profile, ProgramTime, TransferTime
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import bucket
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router import Router
from jdisagg.policy.worker import Worker
from jdisagg.profiling import timing
from jdisagg.serve.build import router_config
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.local import LocalService

Key = tuple[object, ...]
Case = Callable[[], tuple[float, ...]]
OnProgress = Callable[[str, int, int], None]  # what is timed, samples so far, samples in all
LONE_TOKENS = 24
PREFILL, DECODE = PHASES


class Profiler:
    """A stack's machines, warm, and what is to be timed on them. Nothing else may use them meanwhile."""

    def __init__(self, deployment: Deployment, settings: Settings, machines: Mapping[WorkerId, MeshExecutor]) -> None:
        self.deployment, self.settings, self.machines = deployment, settings, dict(machines)
        self.firsts = {machine.config.role: machine for machine in reversed([*machines.values()])}
        self.cases: dict[Key, Case] = {}
        self.samples: dict[Key, list[tuple[float, ...]]] = {}
        for machine in self.firsts.values():
            self._add_programs(machine)
            self._add_prefill(machine)
            self._add_decode(machine)
        self._add_transfers()
        self._add_pairs()
        self._add_host()

    # ------------------------------------------------------------ what is timed

    def _add(self, key: Key, work: timing.Work) -> None:
        self.cases[key] = lambda: (work(),)

    def _add_programs(self, machine: MeshExecutor) -> None:
        for each in machine.table.steps():
            key = machine.config.role, "program", each.kind, each.stage, each.size
            self._add(key, lambda each=each: timing.time_program(machine, each))

    def _add_prefill(self, machine: MeshExecutor) -> None:
        if not machine.config.role.prefills:
            return
        role = machine.config.role
        for size in timing.chunk_sizes(machine.config):
            self._add((role, PREFILL, *size), lambda size=size: timing.time_chunk(machine, *size))
        self._add((role, "first draw"), lambda: timing.time_first_draw(machine))

    def _add_decode(self, machine: MeshExecutor) -> None:
        if not machine.config.role.decodes:
            return
        role, stages = machine.config.role, machine.config.num_microbatches
        sizes, ring = timing.step_sizes(machine.config), machine.config.ring_stages > 1
        for size, turns in itertools.product(sizes, timing.turns_of(machine.config)):
            key = role, "step", *size, turns
            self._add(key, lambda size=size, turns=turns: timing.time_steps(machine, *size, turns=turns))
        for size in () if ring else sizes:
            self.cases[role, "stages", *size] = lambda size=size: timing.time_stages(machine, *size)
        middle = sizes[len(sizes) // 2]
        self._add((role, "admission"), lambda: timing.time_admission(machine, *middle))
        if stages > 1:
            self._add((role, "alone"), lambda: timing.time_steps(machine, *middle))
            self._add((role, "together"), lambda: timing.time_steps(machine, *middle, stages))

    def _add_transfers(self) -> None:
        ends = [next((m for m in self.machines.values() if m.config.role == role), None) for role in PHASES]
        source, destination = ends
        if source is None or destination is None:
            return
        modes: list[tuple[str, tuple[int, int] | None]] = [("chunk", None)]
        if len(source.config.layer_groups) > 1:
            modes.append(("layer", source.config.layer_groups[0]))
        sizes = source.group_to(destination.config).buckets()
        for (mode, layers), wire, pages in itertools.product(modes, source.config.wires, sizes):
            if pages <= min(source.config.num_pages, destination.config.num_pages):
                self.cases["transfer", mode, wire, pages] = lambda layers=layers, wire=wire, pages=pages: (
                    timing.time_transfer(source, destination, pages, layers, wire)
                )

    def _add_pairs(self) -> None:
        for (mine, yours), (one, other) in timing.pairs([*self.machines.values()]).items():
            foreground, background = timing.usual_work(one, mine), timing.usual_work(other, yours)
            self._add(("pair", mine, yours, "alone"), foreground)
            self._add(
                ("pair", mine, yours, "beside"),
                lambda foreground=foreground, background=background: timing.time_beside(foreground, background),
            )

    def _add_host(self) -> None:
        prefiller = next(machine for machine in self.machines.values() if machine.config.role.prefills)
        decoder = next(machine for machine in self.machines.values() if machine.config.role.decodes)
        tokens = min(prefiller.config.prefill_buckets[0], self.deployment.max_model_len - 2 * LONE_TOKENS)
        self._add(("host", "chunk"), lambda: timing.time_chunk(prefiller, tokens, 0))
        turns = decoder.config.decode_turns
        self._add(("host", "step"), lambda: timing.time_steps(decoder, 1, tokens, turns=turns))
        self.cases["host", "request"] = lambda: self._lone_request(tokens)

    def _lone_request(self, tokens: int) -> tuple[float, ...]:
        """Seconds of a request that is alone in the whole stack: its prefill, each token after, its reservation."""
        deployment, limits = self.deployment, router_config(self.settings)
        service = LocalService(
            Router(limits, deployment.workers),
            {config.worker: Worker(config) for config in deployment.workers},
            self.machines,
            model_name=deployment.model_name,
            model_config=deployment.model,
            max_model_len=deployment.max_model_len,
            tokenizer=Tokenizer(deployment.model_folder),
        )
        service.start()
        try:
            parts = asyncio.run(_parts_of_one(service, tokens))
        finally:
            service.stop()
        return parts["prefill"] / 1e9, parts["decode"] / 1e9 / (LONE_TOKENS - 2), parts["reserve_wait"] / 1e9

    # ------------------------------------------------------------ rounds

    def run(self, rounds: int, on_progress: OnProgress = lambda label, done, total: None) -> None:
        """Times every case once a round; one time before the very first is not counted. May be called again."""
        uncounted = 0 if self.samples else 1
        queue = [*itertools.product(range(rounds + uncounted), self.cases.items())]
        for done, (number, (key, case)) in enumerate(queue):
            on_progress(" ".join(map(str, key)), done, len(queue))
            sample = case()
            if number >= uncounted:
                self.samples.setdefault(key, []).append(sample)
        on_progress("done", len(queue), len(queue))

    def seconds(self, *key: object, index: int = 0) -> float:
        """The median of a case's samples."""
        return statistics.median(sample[index] for sample in self.samples[key])

    # ------------------------------------------------------------ the table

    def profile(self, machine: str) -> Profile:
        deployment = self.deployment
        return Profile(
            machine=machine,
            platform=next(iter(self.machines.values())).layer_groups[0].submesh.devices[0].platform,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            mesh=str(deployment.mesh),
            model=deployment.model_name,
            dtype=deployment.dtype,
            page_size=deployment.kv.page_size,
            num_layers=deployment.model.num_layers,
            kv_bytes_per_token=deployment.kv.bytes_per_page // deployment.kv.page_size,
            repeats=min(map(len, self.samples.values())),
            pools=tuple(self._pool(each) for each in self.firsts.values()),
            transfers=self._transfers(),
            host=self._host(),
            slowdown=self._slowdown(),
        )

    def _pool(self, machine: MeshExecutor) -> Pool:
        config, place = machine.config, self.deployment.place(machine.config.worker)
        pool = Pool(config, place.tp, place.pp, programs=self._programs(machine))
        if machine.config.role.prefills:
            chunks = tuple(
                PrefillTime(bucket(size[0], config.prefill_buckets), *size, self.seconds(config.role, PREFILL, *size))
                for size in timing.chunk_sizes(config)
            )
            pool = replace(pool, prefill=chunks, first_draw_s=self.seconds(config.role, "first draw"))
        if machine.config.role.decodes:
            sizes = itertools.product(timing.step_sizes(config), timing.turns_of(machine.config))
            times = tuple(self._step(machine, *size, turns) for size, turns in sizes)
            draws = [max(0.0, each.seconds - sum(each.stages)) for each in times if each.stages]
            draw_s = statistics.median(draws) if draws else 0.0
            admit_s = max(0.0, self.seconds(config.role, "admission"))
            pool = replace(pool, decode=times, draw_s=draw_s, admit_s=admit_s)
        return pool

    def _programs(self, machine: MeshExecutor) -> tuple[ProgramTime, ...]:
        role, table = machine.config.role, machine.table.steps()
        places = [(each.kind, each.stage, each.size) for each in table]
        return tuple(ProgramTime(*place, self.seconds(role, "program", *place)) for place in places)

    def _step(self, machine: MeshExecutor, batch: int, context: int, turns: int) -> DecodeTime:
        role, size = machine.config.role, (batch, context)
        groups = range(0 if machine.config.ring_stages > 1 else len(machine.layer_groups))
        stages = tuple(self.seconds(role, "stages", *size, index=index) for index in groups)
        width, seconds = timing.table_pages(machine.config, context), self.seconds(role, "step", *size, turns)
        return DecodeTime(width, batch, context + timing.tokens_of(turns) // 2, seconds, stages, turns)

    def _transfers(self) -> tuple[TransferTime, ...]:
        found = []
        for key, samples in self.samples.items():
            if key[0] == "transfer":
                mode, wire, pages = str(key[1]), str(key[2]), int(str(key[3]))
                ship_s, insert_s = (self.seconds(*key, index=index) for index in (1, 2))
                found.append(TransferTime(mode, wire, pages, int(samples[0][0]), ship_s, insert_s))
        return tuple(found)

    def _slowdown(self) -> dict[str, dict[str, float]]:
        """Of one phase by another device at the other phase; of steps by turns, between the stages where there are."""
        found: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
        for key in self.samples:
            if key[0] == "pair" and key[3] == "beside":
                mine, yours = str(key[1]), str(key[2])
                found[mine][yours] = max(0.0, self.seconds(*key) / self.seconds(*key[:3], "alone") - 1.0)
        for role, machine in self.firsts.items():
            if (role, "together") in self.samples:
                ratio = self.seconds(role, "together") / self.seconds(role, "alone")
                found[DECODE][DECODE] = max(0.0, (ratio - 1.0) / (machine.config.num_microbatches - 1))
        return {phase: row for phase, row in found.items() if row}

    def _host(self) -> Host:
        prefill_s, token_s, reserve_s = (self.seconds("host", "request", index=index) for index in range(3))
        turns = next(each.config.decode_turns for each in self.machines.values() if each.config.role.decodes)
        return Host(
            prefill_s=max(0.0, prefill_s - self.seconds("host", "chunk")),
            decode_s=max(0.0, token_s * turns - self.seconds("host", "step")),
            message_s=reserve_s / 2,
        )


async def _parts_of_one(service: LocalService, tokens: int) -> dict[str, int]:
    """Nanoseconds of each part of its ledger."""
    sampling = SamplingParams(max_tokens=LONE_TOKENS, temperature=0.0)
    request = Request(RequestId("lone"), (timing.TOKEN,) * tokens, sampling, arrival_s=service.now_s())
    finish = None
    async for delta in service.stream(request):
        finish = delta.finish or finish
    assert finish is not None, "a stream ends by a finish"
    return finish.ledger.parts_ns()
