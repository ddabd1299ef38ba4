"""Machines for the tests, each made and warmed once a session, and a scheduler of the simplest kind to drive them.

One tiny model: 4 layers, 4 query and 2 KV heads, so that TP 4 holds each KV head twice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdisagg.core.events import StepDone
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.steps import Admission, History, KVTransfer, PrefillChunk, StepPlan, last_layer
from jdisagg.core.worker_config import Ring, Role, Stages, TransferMode, WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.spec.draft_layers import DraftModel
from jdisagg.kv.pools import PagesOfStage
from jdisagg.model.draft_head import HeadModel
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource, TensorSource
from jdisagg.parallel.submesh import Device
from jdisagg.policy.worker.kv_sender import KVChunk, cut_chunks
from tests.steps import decode_plan, prefill_plan

CONFIG = ModelConfig("llama", 97, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128)
SOURCE = RandomSource(CONFIG, seed=3)
PAGE_SIZE, LONGEST, SLOTS, CHUNK = 8, 96, 32, 128
WIDEST = LONGEST // PAGE_SIZE
NUM_PAGES = SLOTS * WIDEST
GREEDY = SamplingParams(temperature=0.0)
HALVES = (range(0, 2), range(2, 4))


def pages_by_layer(stage: PagesOfStage) -> list[np.ndarray]:
    """[pages, heads of all shards, ...] of each layer, the null page first. Copies: a view would stop donation."""
    pools = [np.array(pool) for pool in stage.pools]
    return [each for pool in pools for each in np.split(pool, len(stage.layers) // len(pools))]


def open_machine(
    role: Role,
    layers: Sequence[range],
    devices: Sequence[Device],
    config: ModelConfig = CONFIG,
    source: TensorSource = SOURCE,
    pp: int = 1,
    draft: DraftModel | HeadModel | None = None,
    tiled: bool = False,
    kv_dtype: str = "float32",
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> MeshExecutor:
    """A cold machine over `devices`; `tiled`: pages as TPUs hold them; `sizes` are fields of its WorkerConfig."""
    layout = KVLayout.of(config, PAGE_SIZE, kv_dtype, tiled=tiled)
    sizes = {"decode": Stages(pp), "prefill_buckets": (CHUNK,), "table_buckets": (WIDEST,), **sizes}
    name = WorkerId(f"{role}-{len(devices)}")
    worker = WorkerConfig(name, role, NUM_PAGES, PAGE_SIZE, LONGEST, SLOTS, **sizes)
    return MeshExecutor(worker, config, source, layout, layers, devices, dtype, draft=draft)


@cache
def prefill_machine(tp: int) -> MeshExecutor:
    machine = open_machine(Role.PREFILL, HALVES, jax.devices()[:tp])
    machine.warm()
    return machine


@cache
def decode_machine(pp: int, tp: int = 1) -> MeshExecutor:
    """On the last devices, so that it shares none with a prefill machine while both are small."""
    size = CONFIG.num_layers // pp
    layers = [range(start, start + size) for start in range(0, CONFIG.num_layers, size)]
    machine = open_machine(Role.DECODE, layers, jax.devices()[8 - pp * tp :], pp=pp)
    machine.warm()
    return machine


def open_ring(
    pp: int,
    tp: int = 1,
    config: ModelConfig = CONFIG,
    source: TensorSource = SOURCE,
    devices: Sequence[Device] = (),
    turns: int = 4,
    **sizes: Any,
) -> MeshExecutor:
    """A cold decode machine whose stages are a ring, on the last devices."""
    found = devices or jax.devices()[-pp * tp :]
    sizes = {"decode": Ring(pp, turns), **sizes}
    return open_machine(Role.DECODE, ring_cut(config, pp).runs, found, config, source, **sizes)


@cache
def colocated_machine(pp: int, tp: int) -> MeshExecutor:
    layers = HALVES if pp == 2 else (range(4),)
    machine = open_machine(Role.COLOCATED, layers, jax.devices()[: pp * tp], pp=pp)
    machine.warm(peers=[machine])
    return machine


@cache
def warm_pair(tp: int, pp: int, decode_tp: int = 1) -> tuple[MeshExecutor, MeshExecutor]:
    """A prefill and a decode machine with their shipments compiled."""
    source, destination = prefill_machine(tp), decode_machine(pp, decode_tp)
    source.warm(peers=[destination])
    return source, destination


def source_pages(index: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(1 + index * WIDEST + page for page in range(-(-num_tokens // PAGE_SIZE)))


def destination_pages(index: int, num_tokens: int) -> tuple[int, ...]:
    """Another order than the source's, so that a mix-up shows."""
    return tuple(NUM_PAGES - page + 1 for page in source_pages(index, num_tokens))


def prefill_plans(
    prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams], starts: Sequence[int] = ()
) -> list[StepPlan]:
    """All prompts packed one after another into chunks of at most CHUNK tokens and 8 sequences."""
    plans, chunks, room = [], [], CHUNK
    for index, prompt in enumerate(prompts):
        start = starts[index] if starts else 0
        while start < len(prompt):
            stop = min(len(prompt), start + room)
            chunks.append(prefill_chunk(index, prompt, start, stop, sampling[index]))
            room, start = room - (stop - start), stop
            if room == 0 or len(chunks) == 8:
                plans.append(prefill_plan(len(plans), tuple(chunks), CHUNK, WIDEST))
                chunks, room = [], CHUNK
    return [*plans, prefill_plan(len(plans), tuple(chunks), CHUNK, WIDEST)] if chunks else plans


def prefill_chunk(index: int, prompt: tuple[int, ...], start: int, stop: int, sampling: SamplingParams) -> PrefillChunk:
    last = stop == len(prompt)
    history = History(prompt) if last else History()
    pages = source_pages(index, stop)
    return PrefillChunk(RequestId(str(index)), prompt[start:stop], start, pages, last, sampling, history)


def run_prefill(machine: MeshExecutor, plans: Sequence[StepPlan]) -> list[StepDone]:
    """Dispatches all, then reads all."""
    return [pending.read() for pending in [machine.run(plan) for plan in plans]]


def first_tokens(done: Sequence[StepDone]) -> list[Sampled]:
    """In the order of the prompts."""
    return [sampled for _, sampled in sorted((pair for each in done for pair in each.first), key=lambda p: int(p[0]))]


def prefill_and_ship(
    source: MeshExecutor, destination: MeshExecutor, prompts: Sequence[tuple[int, ...]], mode: TransferMode
) -> list[Sampled]:
    """First tokens; KV leaves as `mode` says, between the programs, and is inserted last part first."""
    config = replace(source.config, layer_groups=tuple((run.start, run.stop) for run in HALVES))
    sent, shipments, pending = dict.fromkeys(range(len(prompts)), 0), [], []
    for plan in prefill_plans(prompts, [GREEDY] * len(prompts)):
        cut: list[KVTransfer] = []
        assert plan.prefill is not None
        for chunk in plan.prefill.chunks:
            index, end = int(chunk.request_id), chunk.start + len(chunk.tokens)
            for piece in cut_chunks(mode, config, sent[index], end, len(prompts[index])):
                cut.append(part_of(transfer(source, destination, index, len(prompts[index])), piece))
                sent[index] = piece.stop
        cut.sort(key=last_layer, reverse=True)

        def group_done(layers: float, cut: list[KVTransfer] = cut) -> None:
            while cut and last_layer(cut[-1]) <= layers:
                shipments.append(source.ship(cut.pop(), destination))

        pending.append(source.run(plan, group_done))
        group_done(math.inf)
    for shipment in reversed(shipments):
        shipment.wait()
        destination.insert(shipment)
    return first_tokens([each.read() for each in pending])


def part_of(whole: KVTransfer, piece: KVChunk) -> KVTransfer:
    pages = slice(piece.start, piece.stop)
    return replace(
        whole,
        source_pages=whole.source_pages[pages],
        destination_pages=whole.destination_pages[pages],
        layers=piece.layers,
    )


def ship_all(source: MeshExecutor, destination: MeshExecutor, lengths: Sequence[int]) -> None:
    """Every prompt's pages from the one to the other, one handoff a prompt."""
    shipments = [
        source.ship(transfer(source, destination, index, length), destination) for index, length in enumerate(lengths)
    ]
    for shipment in shipments:
        shipment.wait()
        destination.insert(shipment)


def transfer(source: MeshExecutor, destination: MeshExecutor, index: int, length: int) -> KVTransfer:
    return KVTransfer(
        attempt=Attempt(RequestId(str(index)), 0),
        source=source.config.worker,
        destination=destination.config.worker,
        source_pages=source_pages(index, length),
        destination_pages=destination_pages(index, length),
        num_tokens=length,
    )


@dataclass
class Steps:
    """Dispatches decode steps for sequences 0, 1, ... in slots 0, 1, ... and collects what is drawn.

    A ring takes as many turns a step as it may.
    """

    machine: MeshExecutor
    drawn: dict[int, list[Sampled | None]] = field(default_factory=dict)
    step_id: int = 0

    def admissions(
        self,
        prompts: Sequence[tuple[int, ...]],
        firsts: Sequence[Sampled],
        sampling: Sequence[SamplingParams],
        pages_of=destination_pages,
    ) -> list[Admission]:
        return [
            Admission(
                slot=index,
                request_id=RequestId(str(index)),
                token=first.token,
                position=len(prompt),
                pages=pages_of(index, LONGEST),
                sampling=sampling[index],
                num_output=1,
                history=History(prompt, (first.token,)),
            )
            for index, (prompt, first) in enumerate(zip(prompts, firsts, strict=True))
        ]

    def run(self, steps: int, admit: Sequence[Admission] = (), active: Sequence[int] = (), width: int = WIDEST) -> None:
        """`steps` of every microbatch that has an active slot, all dispatched before the first is read."""
        active = active or [admission.slot for admission in admit]
        size, pending, turns = (
            self.machine.config.slots_per_microbatch,
            [],
            self.machine.config.decode.steps_per_dispatch,
        )
        for step in range(-(-steps // turns)):
            most = min(turns, steps - step * turns)
            for batch in sorted({slot // size for slot in active}):
                slots = tuple(slot for slot in active if slot // size == batch)
                new = tuple(each for each in admit if step == 0 and each.slot // size == batch)
                widths = (most,) * len(slots) if turns > 1 else ()
                told = {"widths": widths, "turns": turns > 1}
                pending.append(self.machine.run(decode_plan(self.step_id, batch, slots, width, new, **told)))
                self.step_id += 1
        for each in pending:
            for slot, drawn in each.read().decode:
                self.drawn.setdefault(slot, []).extend(drawn or (None,))


def generate(
    source: MeshExecutor,
    destination: MeshExecutor,
    prompts: Sequence[tuple[int, ...]],
    steps: int,
    sampling: Sequence[SamplingParams] = (),
) -> list[list[Sampled | None]]:
    """Prefill, ship, decode, all prompts together: the drawn tokens of each, the first one from prefill."""
    sampling = sampling or [GREEDY] * len(prompts)
    firsts = first_tokens(run_prefill(source, prefill_plans(prompts, sampling)))
    pages_of = source_pages
    if destination is not source:
        ship_all(source, destination, [len(prompt) for prompt in prompts])
        pages_of = destination_pages
    loop = Steps(destination)
    loop.run(steps, loop.admissions(prompts, firsts, sampling, pages_of))
    return [[first, *loop.drawn[index]] for index, first in enumerate(firsts)]


def tokens_of(rows: Sequence[Sequence[Sampled | None]]) -> list[list[int]]:
    return [[each.token for each in row if each is not None] for row in rows]


def mixed_prompts(count: int = 32, seed: int = 0, longest: int = LONGEST - 16) -> list[tuple[int, ...]]:
    """`count` prompts of 1 to `longest` tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.permutation(np.linspace(1, longest, count).astype(int))
    return [tuple(generator.integers(0, CONFIG.vocab_size, length).tolist()) for length in lengths]


@cache
def full_forward():
    """tokens -> f32[len(tokens), V], by the network's own definition."""
    params = load_stage(SOURCE, StageSpec(CONFIG, range(4), Mesh(np.array(jax.devices()[:1]), ("tp",)), jnp.float32))
    program = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens))

    def run(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        padded = np.zeros((len(rows), LONGEST), np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        logits = np.asarray(program(params.leaves, padded))
        return [logits[index, : len(row)] for index, row in enumerate(rows)]

    return run


def greedy_continuation(prompts: Sequence[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """What greedy decoding gives by repeated full forwards."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(tokens):
        for row, logits in zip(rows, full_forward()(rows), strict=True):
            row.append(int(logits[-1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
