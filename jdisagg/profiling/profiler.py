"""Profiles a deployment: times every program and transfer in rounds, and reports medians."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jdisagg.core.profile import PHASES, DecodeTime, Host, Pool, PrefillTime, Profile, ProgramTime, TransferTime
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import Admission, DecodeRows, KVTransfer, PrefillChunk, PrefillChunks, StepPlan
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.prefill import pack
from jdisagg.engine.programs import null_batch, run_null
from jdisagg.engine.runner import Runner
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.assemble import assemble, router_config
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.driver.local_service import LocalService

# Times of warm programs: each executor alone, two at once, and the overhead of the host.
#
# Everything runs a worker's plans on real pages. A *case* is one measurement. All cases are timed once per round, so
# that other load on the machine affects all alike.

GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)
TURNS = 8  # steps of one sample
TOKEN = 5
NOBODY = RequestId("timing")
step_ids = count(1)


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def pages_for(config: WorkerConfig, tokens: int, row: int = 0) -> tuple[int, ...]:
    """Returns the pages of a sequence; different ones for each row as far as the pool has them."""
    needed = config.pages_for(tokens)
    return tuple((row * needed + index) % config.num_pages + 1 for index in range(needed))


# Single programs.
def time_program(machine: MeshExecutor, declared: DeclaredProgram) -> float:
    """Times one call over null pages, from dispatch to result."""
    owner, batch = machine.owner(declared), jax.block_until_ready(null_batch(declared))
    return seconds(lambda: jax.block_until_ready(run_null(owner, declared, batch)))


# Prefill chunks.
def chunk_sizes(config: WorkerConfig) -> list[tuple[int, int]]:
    """Returns (tokens, context): the smallest and largest of each bucket, with no, half and maximal context."""
    sizes, smallest = [], 1
    for largest in config.prefill_buckets:
        for tokens in sorted({min(smallest, config.max_model_len), min(largest, config.max_model_len)}):
            max_context = config.max_model_len - tokens
            sizes += [(tokens, context) for context in sorted({0, max_context // 2, max_context})]
        smallest = largest + 1
    return sizes


def one_chunk(config: WorkerConfig, tokens: int, context: int) -> PrefillChunks:
    pages = pages_for(config, context + tokens)
    chunk = PrefillChunk(NOBODY, (TOKEN,) * tokens, context, pages, True, GREEDY)
    return PrefillChunks((chunk,), bucket(tokens, config.prefill_buckets), config.table_buckets[-1])


def time_chunk(machine: MeshExecutor, tokens: int, context: int) -> float:
    plan = StepPlan(next(step_ids), prefill=one_chunk(machine.config, tokens, context))
    return seconds(lambda: machine.run(plan).read())


def time_first_draw(machine: MeshExecutor) -> float:
    """Times the sampling of the first token from given logits."""
    runner = machine.runner
    assert isinstance(runner, Runner) and runner.prefiller is not None, f"{machine.config.worker} does not prefill"
    prefiller, chunks = runner.prefiller, one_chunk(machine.config, 1, 0)
    activations = runner.activations(None, chunks)
    logits = jax.block_until_ready(prefiller.head(activations, pack(chunks, machine.config)))
    return seconds(lambda: jax.block_until_ready(prefiller.draw(chunks, logits)))


# Decode steps.
def step_sizes(config: WorkerConfig) -> list[tuple[int, int]]:
    """Returns (batch, context): one slot, half and all of a microbatch, with contexts from a page to the longest."""
    slots, longest = config.slots_per_microbatch, config.max_model_len - room_of(config)
    batches = sorted({1, max(1, slots // 2), slots})
    contexts = sorted({max(1, min(size, longest)) for size in (config.page_size, longest // 4, longest // 2, longest)})
    return [(batch, context) for batch in batches for context in contexts]


def turns_of(config: WorkerConfig) -> list[int]:
    """Returns the smallest and largest number of steps per dispatch of a ring."""
    return sorted({1, config.decode.steps_per_dispatch})


def room_of(config: WorkerConfig) -> int:
    """Returns the tokens that a fixture's sequences may generate."""
    return 2 * max(TURNS, tokens_of(config.decode.steps_per_dispatch))


def tokens_of(turns: int) -> int:
    """Returns the tokens of each row in one sample with so many steps per dispatch."""
    return turns * steps_of(turns)


def steps_of(turns: int) -> int:
    return max(2, TURNS // turns)


def table_pages(config: WorkerConfig, context: int) -> int:
    return bucket(config.pages_for(context + room_of(config)), config.table_buckets)


class DecodeSession:
    """Sequences in the first slots of some microbatches, and the decode steps over them."""

    def __init__(self, machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1) -> None:
        """Creates the fixture. `turns`: tokens of each row per step, for a ring."""
        self.machine, self.batch, self.context = machine, batch, context
        self.widths = (turns,) * batch if turns > 1 else ()
        self.config, self.microbatches = machine.config, range(microbatches)
        self.width = table_pages(machine.config, context)

    def slots(self, microbatch: int) -> tuple[int, ...]:
        first = microbatch * self.config.slots_per_microbatch
        return tuple(range(first, first + self.batch))

    def take(self) -> float:
        """Admits every sequence; returns the seconds of that step, the maximum over microbatches."""
        longest = self.context + room_of(self.config)
        found = []
        for microbatch in self.microbatches:
            admit = tuple(
                Admission(slot, NOBODY, TOKEN, self.context, pages_for(self.config, longest, slot), GREEDY, 1)
                for slot in self.slots(microbatch)
            )
            plan = StepPlan(next(step_ids), DecodeRows(microbatch, self.slots(microbatch), self.width, admit))
            found.append(seconds(lambda plan=plan: self.machine.run(plan).read()))
        return max(found)

    def leave(self) -> None:
        for microbatch in self.microbatches:
            plan = StepPlan(next(step_ids), DecodeRows(microbatch, (), self.width, retire=self.slots(microbatch)))
            self.machine.run(plan).read()

    def step(self, microbatch: int = 0) -> Callable[[], object]:
        """Dispatches one step; the returned function waits for its tokens."""
        rows = DecodeRows(
            microbatch, self.slots(microbatch), self.width, widths=self.widths, turns=len(self.widths) > 0
        )
        return self.machine.run(StepPlan(next(step_ids), rows)).read

    def lone_step(self) -> float:
        """Times one step from dispatch to tokens with nothing else in flight."""
        began_s = time.perf_counter()
        self.step()()
        return time.perf_counter() - began_s

    def period(self, steps: int = TURNS) -> float:
        """Returns seconds per step of one microbatch, with `steps_in_flight` steps dispatched before the first is
        read."""
        ahead = self.config.steps_in_flight * len(self.microbatches)
        waiting = deque[Callable[[], object]]()

        def run_steps() -> None:
            for number in range(steps * len(self.microbatches)):
                waiting.append(self.step(number % len(self.microbatches)))
                if len(waiting) >= ahead:
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()

        return seconds(run_steps) / steps


@contextmanager
def decode_fixture(
    machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1
) -> Iterator[DecodeSession]:
    fixture = DecodeSession(machine, batch, context, microbatches, turns)
    fixture.take()
    try:
        yield fixture
    finally:
        fixture.leave()


def time_steps(machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1) -> float:
    """Times steps of so many microbatches at once, from step to step."""
    with decode_fixture(machine, batch, context, microbatches, turns) as fixture:
        return fixture.period(steps_of(turns))


def time_admission(machine: MeshExecutor, batch: int, context: int) -> float:
    """Returns the extra seconds of a step that admits sequences; may be negative on a machine with other load."""
    fixture = DecodeSession(machine, batch, context)
    joined_s = fixture.take()
    lone_s = fixture.lone_step()
    fixture.leave()
    return joined_s - lone_s


def time_stages(machine: MeshExecutor, batch: int, context: int) -> tuple[float, ...]:
    """Times each stage with nothing else in flight. Nothing is sampled, so the slots do not change."""
    decoder = machine.runner.decoder
    assert decoder is not None, f"{machine.config.worker} does not decode"
    with decode_fixture(machine, batch, context) as fixture:
        microbatch, x, found = decoder.microbatches[0], None, []
        for group in decoder.layer_groups:
            table, state = microbatch.table_on(group.submesh, fixture.width), group.submesh.spread(microbatch.state)
            moved = jax.block_until_ready((table, state, x if x is None else group.submesh.transfer(x)))
            began_s = time.perf_counter()
            x = jax.block_until_ready(group.decode(*moved))
            found.append(time.perf_counter() - began_s)
    return tuple(found)


# Transfers of KV.
def time_transfer(
    source: MeshExecutor, destination: MeshExecutor, pages: int, layers: tuple[int, int] | None, wire: str
) -> tuple[int, float, float]:
    """Returns (bytes, seconds until the KV has arrived, seconds to insert it into pages)."""
    group = source.group_to(destination.config)
    tokens = pages * group.source * source.config.page_size
    here, there = source.config.worker, destination.config.worker
    lists = pages_for(source.config, tokens), pages_for(destination.config, tokens)
    transfer = KVTransfer(Attempt(NOBODY, 1), here, there, *lists, tokens, layers=layers, wire=wire)
    began_s = time.perf_counter()
    shipment = source.ship(transfer, destination)
    shipment.wait_packed()
    shipment.wait()
    landed_s = time.perf_counter()
    verdict = destination.check(shipment)
    if verdict is not None:
        verdict()
    destination.insert(shipment)
    jax.block_until_ready([stage.pools for stage in destination.pages])
    return shipment.packed_bytes, landed_s - began_s, time.perf_counter() - landed_s


# Two executors at once.
Work = Callable[[], float]  # seconds of one sample


def usual_work(machine: MeshExecutor, phase: str) -> Work:
    """Returns typical work of a phase: whole chunks, or steps of half a microbatch at half the maximum length."""
    config = machine.config
    if phase == "prefill":
        return lambda: time_chunk(machine, min(config.prefill_buckets[0], config.max_model_len), 0)
    batch = max(1, config.slots_per_microbatch // 2)
    return lambda: time_steps(machine, batch, config.max_model_len // 2)


@contextmanager
def busy(work: Work) -> Iterator[None]:
    """Repeats `work` in another thread meanwhile."""
    stop = threading.Event()

    def repeat_work() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat_work, name="timing-beside")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def time_beside(foreground: Work, background: Work) -> float:
    with busy(background):
        return foreground()


def pairs(machines: Sequence[MeshExecutor]) -> dict[tuple[str, str], tuple[MeshExecutor, MeshExecutor]]:
    """Returns the first two executors for each (phase, concurrent phase)."""
    found: dict[tuple[str, str], tuple[MeshExecutor, MeshExecutor]] = {}
    for one in machines:
        for other in machines:
            if one is not other:
                for mine in phases(one):
                    for yours in phases(other):
                        found.setdefault((mine, yours), (one, other))
    return found


def phases(machine: MeshExecutor) -> list[str]:
    role = machine.config.role
    return [name for name, does in (("prefill", role.prefills), ("decode", role.decodes)) if does]


Key = tuple[object, ...]
Case = Callable[[], tuple[float, ...]]
OnProgress = Callable[[str, int, int], None]  # what is timed, samples so far, samples in all
LONE_TOKENS = 24
PREFILL, DECODE = PHASES


class ProfileRunner:
    """The warm executors of a deployment and the cases to time on them. Nothing else may use them meanwhile."""

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

    # Cases.
    def _add(self, key: Key, work: Work) -> None:
        self.cases[key] = lambda: (work(),)

    def _add_programs(self, machine: MeshExecutor) -> None:
        for each in machine.table.steps():
            key = machine.config.role, "program", each.kind, each.stage, each.size
            self._add(key, lambda each=each: time_program(machine, each))

    def _add_prefill(self, machine: MeshExecutor) -> None:
        if not machine.config.role.prefills:
            return
        role = machine.config.role
        for size in chunk_sizes(machine.config):
            self._add((role, PREFILL, *size), lambda size=size: time_chunk(machine, *size))
        self._add((role, "first draw"), lambda: time_first_draw(machine))

    def _add_decode(self, machine: MeshExecutor) -> None:
        if not machine.config.role.decodes:
            return
        role, stages = machine.config.role, machine.config.num_microbatches
        sizes, ring = step_sizes(machine.config), machine.config.is_ring
        for size, turns in itertools.product(sizes, turns_of(machine.config)):
            key = role, "step", *size, turns
            self._add(key, lambda size=size, turns=turns: time_steps(machine, *size, turns=turns))
        for size in () if ring else sizes:
            self.cases[role, "stages", *size] = lambda size=size: time_stages(machine, *size)
        middle = sizes[len(sizes) // 2]
        self._add((role, "admission"), lambda: time_admission(machine, *middle))
        if stages > 1:
            self._add((role, "alone"), lambda: time_steps(machine, *middle))
            self._add((role, "together"), lambda: time_steps(machine, *middle, stages))

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
                self.cases["transfer", mode, wire, pages] = lambda layers=layers, wire=wire, pages=pages: time_transfer(
                    source, destination, pages, layers, wire
                )

    def _add_pairs(self) -> None:
        for (mine, yours), (one, other) in pairs([*self.machines.values()]).items():
            foreground, background = usual_work(one, mine), usual_work(other, yours)
            self._add(("pair", mine, yours, "alone"), foreground)
            self._add(
                ("pair", mine, yours, "beside"),
                lambda foreground=foreground, background=background: time_beside(foreground, background),
            )

    def _add_host(self) -> None:
        prefiller = next(machine for machine in self.machines.values() if machine.config.role.prefills)
        decoder = next(machine for machine in self.machines.values() if machine.config.role.decodes)
        tokens = min(prefiller.config.prefill_buckets[0], self.deployment.max_model_len - 2 * LONE_TOKENS)
        self._add(("host", "chunk"), lambda: time_chunk(prefiller, tokens, 0))
        turns = decoder.config.decode.steps_per_dispatch
        self._add(("host", "step"), lambda: time_steps(decoder, 1, tokens, turns=turns))
        self.cases["host", "request"] = lambda: self._lone_request(tokens)

    def _lone_request(self, tokens: int) -> tuple[float, ...]:
        """Returns seconds of a request alone in the system: its prefill, each later token, its reservation."""
        deployment, limits = self.deployment, router_config(self.settings)
        tokenizer, router = Tokenizer(deployment.model_folder), Router(limits, deployment.workers)
        workers = {config.worker: Worker(config) for config in deployment.workers}
        service = assemble(deployment, self.settings, tokenizer, router, workers, self.machines)
        service.start()
        try:
            parts = asyncio.run(_parts_of_one(service, tokens))
        finally:
            service.stop()
        return parts["prefill"] / 1e9, parts["decode"] / 1e9 / (LONE_TOKENS - 2), parts["reserve_wait"] / 1e9

    # Rounds.
    def run(self, rounds: int, on_progress: OnProgress = lambda label, done, total: None) -> None:
        """Times every case once per round; before the very first round each is timed once without counting. Can be
        called again."""
        uncounted = 0 if self.samples else 1
        queue = [*itertools.product(range(rounds + uncounted), self.cases.items())]
        for done, (number, (key, case)) in enumerate(queue):
            on_progress(" ".join(map(str, key)), done, len(queue))
            sample = case()
            if number >= uncounted:
                self.samples.setdefault(key, []).append(sample)
        on_progress("done", len(queue), len(queue))

    def seconds(self, *key: object, index: int = 0) -> float:
        """Returns the median of a case's samples."""
        return statistics.median(sample[index] for sample in self.samples[key])

    # The profile.
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
                for size in chunk_sizes(config)
            )
            pool = replace(pool, prefill=chunks, first_draw_s=self.seconds(config.role, "first draw"))
        if machine.config.role.decodes:
            sizes = itertools.product(step_sizes(config), turns_of(machine.config))
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
        groups = range(0 if machine.config.is_ring else len(machine.layer_groups))
        stages = tuple(self.seconds(role, "stages", *size, index=index) for index in groups)
        width, seconds = table_pages(machine.config, context), self.seconds(role, "step", *size, turns)
        return DecodeTime(width, batch, context + tokens_of(turns) // 2, seconds, stages, turns)

    def _transfers(self) -> tuple[TransferTime, ...]:
        found = []
        for key, samples in self.samples.items():
            if key[0] == "transfer":
                mode, wire, pages = str(key[1]), str(key[2]), int(str(key[3]))
                ship_s, insert_s = (self.seconds(*key, index=index) for index in (1, 2))
                found.append(TransferTime(mode, wire, pages, int(samples[0][0]), ship_s, insert_s))
        return tuple(found)

    def _slowdown(self) -> dict[str, dict[str, float]]:
        """Returns the slowdown of a phase by the other phase on another device, and of decode steps by other
        microbatches."""
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
        turns = next(
            each.config.decode.steps_per_dispatch for each in self.machines.values() if each.config.role.decodes
        )
        return Host(
            prefill_s=max(0.0, prefill_s - self.seconds("host", "chunk")),
            decode_s=max(0.0, token_s * turns - self.seconds("host", "step")),
            message_s=reserve_s / 2,
        )


async def _parts_of_one(service: LocalService, tokens: int) -> dict[str, int]:
    """Returns the nanoseconds of each part of one request's ledger."""
    sampling = SamplingParams(max_tokens=LONE_TOKENS, temperature=0.0)
    request = Request(RequestId("lone"), (TOKEN,) * tokens, sampling, arrival_s=service.now_s())
    finish = None
    async for delta in service.stream(request):
        finish = delta.finish or finish
    assert finish is not None, "a stream ends by a finish"
    return finish.ledger.parts_ns()


# Terminal output.


def show_profile(console: Console, profile: Profile, path: str) -> None:
    """Prints the minimum and maximum of each kind of program, and the slowdowns."""
    table = Table("", "least", "most", title=f"{profile.model} on {profile.mesh}, milliseconds", title_justify="left")
    for pool in profile.pools:
        for kind in (pool.prefill, pool.decode):
            if kind:
                found = [each.seconds for each in kind]
                name = "a chunk" if kind is pool.prefill else "a step"
                table.add_row(
                    f"{pool.config.role}: {name}", *(f"{1e3 * each:.2f}" for each in (min(found), max(found)))
                )
    if profile.transfers:
        found = [each.seconds for each in profile.transfers]
        table.add_row("a part of KV", *(f"{1e3 * each:.2f}" for each in (min(found), max(found))))
    table.add_row(
        "the host: a step, a chunk", f"{1e3 * profile.host.decode_s:.2f}", f"{1e3 * profile.host.prefill_s:.2f}"
    )
    console.print(table)
    for phase, row in profile.slowdown.items():
        beside = ", ".join(f"{100 * share:.0f} % longer beside {other}" for other, share in row.items())
        console.print(f"{phase}: {beside}", highlight=False)
    console.print(f"{profile.machine}; {profile.repeats} samples a case; written to {path}", highlight=False)


# Description of the machine.


def describe_machine(device_kind: str) -> str:
    """Returns the processor's model name, the cores this process may use, and the kind of devices."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {device_kind} devices"
