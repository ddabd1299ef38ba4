"""All that a profile holds, case by case: a list of things to time, rounds over all of them, and medians."""

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
from jdisagg.serve.deploy.assemble import router_config
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.driver.local_service import LocalService

# Times of a run's own warmed programs: what one machine does alone, what two do to each other, what the host
# adds.
#
# Everything runs the plans that a worker would make, on real pages. A *case* is one thing to time; all cases are
# timed once a round, so that what else the machine does meanwhile falls on all alike. `jdisagg profile` makes a
# table of it.

GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)
TURNS = 8  # steps of one sample
TOKEN = 5
NOBODY = RequestId("timing")
step_ids = count(1)


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def pages_for(config: WorkerConfig, tokens: int, row: int = 0) -> tuple[int, ...]:
    """Pages of a sequence, other ones for each row as far as the pool has them."""
    needed = config.pages_for(tokens)
    return tuple((row * needed + index) % config.num_pages + 1 for index in range(needed))


# ---------------------------------------------------------------------- programs, one by one


def time_program(machine: MeshExecutor, declared: DeclaredProgram) -> float:
    """Of one call over null pages, from its dispatch to its result."""
    owner, batch = machine.owner(declared), jax.block_until_ready(null_batch(declared))
    return seconds(lambda: jax.block_until_ready(run_null(owner, declared, batch)))


# ---------------------------------------------------------------------- prefill


def chunk_sizes(config: WorkerConfig) -> list[tuple[int, int]]:
    """(tokens, context): the least and the most of each bucket, at the head of a prompt and far behind it."""
    sizes, least = [], 1
    for most in config.prefill_buckets:
        for tokens in sorted({min(least, config.max_model_len), min(most, config.max_model_len)}):
            room = config.max_model_len - tokens
            sizes += [(tokens, context) for context in sorted({0, room // 2, room})]
        least = most + 1
    return sizes


def one_chunk(config: WorkerConfig, tokens: int, context: int) -> PrefillChunks:
    pages = pages_for(config, context + tokens)
    chunk = PrefillChunk(NOBODY, (TOKEN,) * tokens, context, pages, True, GREEDY)
    return PrefillChunks((chunk,), bucket(tokens, config.prefill_buckets), config.table_buckets[-1])


def time_chunk(machine: MeshExecutor, tokens: int, context: int) -> float:
    plan = StepPlan(next(step_ids), prefill=one_chunk(machine.config, tokens, context))
    return seconds(lambda: machine.run(plan).read())


def time_first_draw(machine: MeshExecutor) -> float:
    """Of logits that are there."""
    runner = machine.runner
    assert isinstance(runner, Runner) and runner.prefiller is not None, f"{machine.config.worker} does not prefill"
    prefiller, chunks = runner.prefiller, one_chunk(machine.config, 1, 0)
    activations = runner.activations(None, chunks)
    logits = jax.block_until_ready(prefiller.head(activations, pack(chunks, machine.config)))
    return seconds(lambda: jax.block_until_ready(prefiller.draw(chunks, logits)))


# ---------------------------------------------------------------------- decode


def step_sizes(config: WorkerConfig) -> list[tuple[int, int]]:
    """(batch, context): one slot, half and all of a microbatch, over contexts from a page to the longest."""
    slots, longest = config.slots_per_microbatch, config.max_model_len - room_of(config)
    batches = sorted({1, max(1, slots // 2), slots})
    contexts = sorted({max(1, min(size, longest)) for size in (config.page_size, longest // 4, longest // 2, longest)})
    return [(batch, context) for batch in batches for context in contexts]


def turns_of(config: WorkerConfig) -> list[int]:
    """Of a ring's dispatch, the least and the most."""
    return sorted({1, config.decode.steps_per_dispatch})


def room_of(config: WorkerConfig) -> int:
    """Tokens that a fixture's sequences may draw."""
    return 2 * max(TURNS, tokens_of(config.decode.steps_per_dispatch))


def tokens_of(turns: int) -> int:
    """That each row draws in one sample of steps of so many turns."""
    return turns * steps_of(turns)


def steps_of(turns: int) -> int:
    return max(2, TURNS // turns)


def table_pages(config: WorkerConfig, context: int) -> int:
    return bucket(config.pages_for(context + room_of(config)), config.table_buckets)


class DecodeFixture:
    """Sequences in the first slots of some microbatches, and the steps that they take."""

    def __init__(self, machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1) -> None:
        """turns: tokens of each row that a step draws, of a ring."""
        self.machine, self.batch, self.context = machine, batch, context
        self.widths = (turns,) * batch if turns > 1 else ()
        self.config, self.microbatches = machine.config, range(microbatches)
        self.width = table_pages(machine.config, context)

    def slots(self, microbatch: int) -> tuple[int, ...]:
        first = microbatch * self.config.slots_per_microbatch
        return tuple(range(first, first + self.batch))

    def take(self) -> float:
        """Seconds of a step that every sequence joins, the longest of the microbatches'."""
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
        """Dispatches one; the result waits for its tokens."""
        rows = DecodeRows(
            microbatch, self.slots(microbatch), self.width, widths=self.widths, turns=len(self.widths) > 0
        )
        return self.machine.run(StepPlan(next(step_ids), rows)).read

    def lone_step(self) -> float:
        """From its dispatch to its tokens, with nothing else under way."""
        began_s = time.perf_counter()
        self.step()()
        return time.perf_counter() - began_s

    def period(self, steps: int = TURNS) -> float:
        """Seconds from step to step of one microbatch, `steps_in_flight` of each dispatched before the first is
        read.
        """
        ahead = self.config.steps_in_flight * len(self.microbatches)
        waiting = deque[Callable[[], object]]()

        def go_round() -> None:
            for number in range(steps * len(self.microbatches)):
                waiting.append(self.step(number % len(self.microbatches)))
                if len(waiting) >= ahead:
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()

        return seconds(go_round) / steps


@contextmanager
def decode_fixture(
    machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1
) -> Iterator[DecodeFixture]:
    fixture = DecodeFixture(machine, batch, context, microbatches, turns)
    fixture.take()
    try:
        yield fixture
    finally:
        fixture.leave()


def time_steps(machine: MeshExecutor, batch: int, context: int, microbatches: int = 1, turns: int = 1) -> float:
    """From step to step, of that many microbatches at once."""
    with decode_fixture(machine, batch, context, microbatches, turns) as fixture:
        return fixture.period(steps_of(turns))


def time_admission(machine: MeshExecutor, batch: int, context: int) -> float:
    """What a step that sequences join takes beyond another one like it; may be below 0 on a machine with other work."""
    fixture = DecodeFixture(machine, batch, context)
    joined_s = fixture.take()
    lone_s = fixture.lone_step()
    fixture.leave()
    return joined_s - lone_s


def time_stages(machine: MeshExecutor, batch: int, context: int) -> tuple[float, ...]:
    """Of each stage with nothing before it under way; the step is not drawn, so that its slots stay where they are."""
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


# ---------------------------------------------------------------------- transfers


def time_transfer(
    source: MeshExecutor, destination: MeshExecutor, pages: int, layers: tuple[int, int] | None, wire: str
) -> tuple[int, float, float]:
    """(bytes, seconds until they have landed, seconds until they are in pages)."""
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


# ---------------------------------------------------------------------- two at once

Work = Callable[[], float]  # seconds of one sample


def usual_work(machine: MeshExecutor, phase: str) -> Work:
    """What a worker does all day: whole chunks, or steps of half a microbatch at half its length."""
    config = machine.config
    if phase == "prefill":
        return lambda: time_chunk(machine, min(config.prefill_buckets[0], config.max_model_len), 0)
    batch = max(1, config.slots_per_microbatch // 2)
    return lambda: time_steps(machine, batch, config.max_model_len // 2)


@contextmanager
def busy(work: Work) -> Iterator[None]:
    """Another thread does nothing else meanwhile."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=go_on, name="timing-beside")
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
    """By (phase, phase beside it), the first two machines that can."""
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
        turns = next(
            each.config.decode.steps_per_dispatch for each in self.machines.values() if each.config.role.decodes
        )
        return Host(
            prefill_s=max(0.0, prefill_s - self.seconds("host", "chunk")),
            decode_s=max(0.0, token_s * turns - self.seconds("host", "step")),
            message_s=reserve_s / 2,
        )


async def _parts_of_one(service: LocalService, tokens: int) -> dict[str, int]:
    """Nanoseconds of each part of its ledger."""
    sampling = SamplingParams(max_tokens=LONE_TOKENS, temperature=0.0)
    request = Request(RequestId("lone"), (TOKEN,) * tokens, sampling, arrival_s=service.now_s())
    finish = None
    async for delta in service.stream(request):
        finish = delta.finish or finish
    assert finish is not None, "a stream ends by a finish"
    return finish.ledger.parts_ns()


# A profile as a table for a terminal.


def show_profile(console: Console, profile: Profile, path: str) -> None:
    """The least and the most of each kind, and what the devices share."""
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


# What a profile was taken on, in one line.


def describe_machine(device_kind: str) -> str:
    """The processor as the kernel names it, the cores this process may use, and the devices' kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {device_kind} devices"
