"""Times of a run's own warmed programs: what one machine does alone, what two do to each other, what the host adds.

Everything runs the plans that a worker would make, on real pages. A *case* is one thing to time; all cases are timed
once a round, so that what else the machine does meanwhile falls on all alike. `jdisagg.profile` makes a table of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import jax

from jdisagg.core.request import Attempt, RequestId, SamplingParams
from jdisagg.core.steps import Admission, DecodeRows, KVTransfer, PrefillChunk, PrefillChunks, StepPlan
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.prefill import pack
from jdisagg.engine.runner import Runner
from jdisagg.engine.warmup import null_batch, run_null

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
    return sorted({1, config.decode_turns})


def room_of(config: WorkerConfig) -> int:
    """Tokens that a fixture's sequences may draw."""
    return 2 * max(TURNS, tokens_of(config.decode_turns))


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
