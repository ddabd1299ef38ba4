"""Runs steps: the rows of one microbatch, packed chunks, or both, through every layer group, then samples.

A step is dispatched group by group. `attention.py` describes which pages its rows and chunks read and write.
`decode.py` and `prefill.py` sample. A step with KV waits may pause between two groups.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from jax import Array

from jdisagg.core.events import StepDone
from jdisagg.core.hardware import KINDS, Collective, Work
from jdisagg.core.request import Attempt
from jdisagg.core.schedule import End, Events, Start, Turns
from jdisagg.core.steps import DecodeRows, Gate, KVTransfer, PrefillChunks, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.decode import Decoder, MicrobatchState, PendingSamples
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.hlo import HloProgram, InstructionInfo, arrays, bytes_of, chains, collective_of
from jdisagg.engine.layer_group import Chunks, LayerGroup, MixedResults
from jdisagg.engine.multi_step import MultiStep, PendingMultiStep, PendingPipelinedMultiStep, PipelinedMultiStep
from jdisagg.engine.prefill import PackedChunks, PendingChunks, PrefillRunner, pack
from jdisagg.engine.spec.draft_layers import DraftLayers
from jdisagg.engine.spec.drafting import DraftingDecoder
from jdisagg.engine.spec.eagle import EagleDecoder, EagleLayerGroup
from jdisagg.engine.spec.forced import JumpForwardDecoder
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.parallel.submesh import StageMesh

# Steps that wait between two stages for KV in transfer.
#
# A step is dispatched stage by stage. A step with KV waits (gates) runs as far as its KV has arrived. The rest is
# dispatched by the call that inserts the last awaited chunk, or by the call that cancels the waits. Steps of other
# microbatches may overtake it: they share only the KV pools with it, and no page.

T = TypeVar("T")
StagedStep = Generator[int, None, T]  # yields each stage's number before dispatching it; returns the step's result


def dispatched(stages: StagedStep[T]) -> T:
    """Dispatches all stages of a step without KV waits and returns its result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


class HeldStep:
    """A step with KV waits; see `executor.PendingStep`."""

    def __init__(self, gates: Sequence[Gate], stages: StagedStep[PendingStep]) -> None:
        self._gates = {gate.stage: (gate.attempt, set(gate.parts)) for gate in gates}
        self._stages = stages
        self._stage = next(stages)  # the next stage to dispatch
        self._result: Future[PendingStep] = Future()

    def waits_for(self, attempt: Attempt) -> bool:
        return any(whose == attempt for whose, _ in self._gates.values())

    def inserted(self, part: int) -> None:
        for _, parts in self._gates.values():
            parts.discard(part)

    def open(self) -> None:
        self._gates.clear()

    def advance(self) -> bool:
        """Dispatches the stages whose KV has arrived; returns True if that was the last stage."""
        while self._stage not in self._gates or not self._gates[self._stage][1]:
            try:
                self._stage = next(self._stages)
            except StopIteration as end:
                self._result.set_result(end.value)
                return True
        return False

    def fail(self, error: Exception) -> None:
        self._result.set_exception(error)

    @property
    def done(self) -> bool:
        return self._result.done()

    def read(self) -> StepDone:
        return self._result.result().read()


class GatedSteps:
    """The steps of one executor that wait for KV."""

    def __init__(self) -> None:
        self._held: list[HeldStep] = []

    def run(self, gates: Sequence[Gate], stages: StagedStep[PendingStep]) -> PendingStep:
        """Dispatches the stages that may run. An error of a stage is raised here, or by `read` if the stage ran
        later."""
        if not gates:
            return dispatched(stages)
        held = HeldStep(gates, stages)
        if not held.advance():
            self._held.append(held)
        return held

    def inserted(self, transfer: KVTransfer) -> None:
        """Records that the transfer's chunk is in its pages, and dispatches the steps that waited for it."""
        for held in self._of(transfer.attempt):
            held.inserted(transfer.part)
            self._pump(held)

    def open(self, attempt: Attempt) -> None:
        for held in self._of(attempt):
            held.open()
            self._pump(held)

    def _of(self, attempt: Attempt) -> list[HeldStep]:
        return [held for held in self._held if held.waits_for(attempt)]

    def _pump(self, held: HeldStep) -> None:
        try:
            over = held.advance()
        except Exception as error:
            held.fail(error)
            over = True
        if over:
            self._held.remove(held)


@dataclass(frozen=True)
class DispatchedStep:
    """A dispatched step; see `executor.PendingStep`."""

    step_id: int
    rows: PendingSamples | None
    chunks: PendingChunks | None
    counts: tuple[tuple[ExpertLoad, list[Array]], ...] = ()  # tokens per expert, of the programs up to this step

    def read(self) -> StepDone:
        decode = self.rows.read() if self.rows else ()
        first, prompt, pooled = self.chunks.read() if self.chunks else ((), (), ())
        for load, taken in self.counts:
            load.read(taken)
        guessed = self.rows.guessed() if self.rows else ()
        return StepDone(self.step_id, decode, first, prompt, pooled, guessed)


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of a step: the plan and the microbatch."""

    plan: DecodeRows
    batch: MicrobatchState


@dataclass(frozen=True)
class PromptBatch:
    """The chunks of a step: the plan, the packed arrays, and their copies on each submesh."""

    plan: PrefillChunks
    packed: PackedChunks
    on: dict[StageMesh, Chunks]


class Runner:
    """Runs the steps of one worker: owns its slots and the state kept between the chunks of prompts."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
        adapters: AdapterSlots | None = None,
        draft: DraftLayers | None = None,
    ) -> None:
        """Makes the decoder and the prefiller of the role; draft: the draft model, if there is one."""
        self.layer_groups, self.config, self.adapters = layer_groups, config, adapters
        parts = layer_groups, config, vocab_size, grammars
        self.prefiller = PrefillRunner(*parts) if config.computes_prompts else None
        drafting = _drafting(*parts, draft) if config.role.decodes and config.draft_tokens else None
        self.drafts = drafting.drafts if drafting else None
        self.draft = draft
        forcing = JumpForwardDecoder(*parts) if config.role.decodes and config.forced_tokens and not drafting else None
        self.forced = forcing.forced if forcing else None
        self.decoder = drafting or forcing or (Decoder(*parts) if config.role.decodes else None)
        self.turns = MultiStep(layer_groups[0], config) if config.is_multi_step else None
        self.joint = PipelinedMultiStep(config.decode.n, config.stage_slots) if config.is_pipelined_multi_step else None
        self.gates = GatedSteps()

    @property
    def programs(self) -> dict[str, Any]:
        """Returns the programs of steps whose rows may sample several tokens, as fields of a `ProgramTable`."""
        return {"drafts": self.drafts, "forced": self.forced, "turns": self.turns}

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """Dispatches a step, see `executor.Executor.run`."""
        if plan.decode is not None and self.joint is not None:
            return self._run_pipelined(plan.step_id, plan.decode, self.joint)
        if plan.decode is not None and plan.decode.turns:
            return self._run_multi_step(plan)
        return self.gates.run(plan.decode.gates if plan.decode else (), self._stages(plan, group_done))

    def _run_multi_step(self, plan: StepPlan) -> PendingMultiStep:
        assert plan.prefill is None and plan.decode and not plan.decode.gates, "turns hold rows alone, wait at no gate"
        slots, _ = self._begin(plan.decode, None)
        assert slots is not None and self.turns is not None, f"{self.config.worker} takes single steps"
        pending = self.turns.run(plan.step_id, plan.decode, slots.batch)
        if isinstance(self.decoder, DraftingDecoder):
            self.decoder.took_turns(slots.batch, pending.drawn.tokens.addressable_data(0))
        return pending

    def _run_pipelined(self, step_id: int, rows: DecodeRows, joint: PipelinedMultiStep) -> PendingPipelinedMultiStep:
        drawn = list[PendingSamples]()
        for step in joint.of(rows):
            slots, _ = self._begin(step, None)
            assert slots is not None and self.decoder is not None, f"{self.config.worker} does not decode"
            if step.active:  # else the step only retires slots
                drawn.append(self.decoder.finish(slots.batch, step, self._logits(slots)))
        return PendingPipelinedMultiStep(step_id, rows, drawn, self._counts())

    def _logits(self, slots: DecodeBatch) -> Array:
        """Returns the logits of decode rows alone, on the device that samples."""
        x: Any = None
        for group in self.layer_groups:
            x = self.through(group, slots, None, x)
        return self.layer_groups[-1].submesh.first_copy(x)

    def _stages(self, plan: StepPlan, group_done: GroupDone | None) -> StagedStep[DispatchedStep]:
        """Dispatches the step layer group by layer group; the groups of a decode worker are its stages."""
        slots, prompts, x = *self._begin(plan.decode, plan.prefill), None
        for stage, group in enumerate(self.layer_groups):
            yield stage
            if x is not None and group_done is not None:
                group_done(group.layers.start)
            x = self.through(group, slots, prompts, x)
        return self._finish(plan, slots, prompts, x)

    def activations(self, rows: DecodeRows | None, chunks: PrefillChunks | None) -> Any:
        """Returns the last layer group's result for a step, without sampling."""
        slots, prompts, x = *self._begin(rows, chunks), None
        for group in self.layer_groups:
            x = self.through(group, slots, prompts, x)
        return x

    def _begin(
        self, rows: DecodeRows | None, chunks: PrefillChunks | None
    ) -> tuple[DecodeBatch | None, PromptBatch | None]:
        """Returns the step's rows and chunks with their host changes sent and their adapters loaded."""
        slots = self.slots(rows)
        if self.adapters is not None:
            sampling = slots.batch.batch_sampling(slots.plan.active).each if slots else []
            self.adapters.load([*sampling, *(chunk.sampling for chunk in (chunks.chunks if chunks else ()))])
            if slots is not None:
                slots.batch.find_adapters(self.adapters, slots.plan.active)
        return slots, self.prompts(chunks)

    def slots(self, rows: DecodeRows | None) -> DecodeBatch | None:
        if rows is None:
            return None
        assert self.decoder is not None, f"{self.config.worker} does not decode"
        return DecodeBatch(rows, self.decoder.begin(rows))

    def prompts(self, chunks: PrefillChunks | None) -> PromptBatch | None:
        if chunks is None:
            return None
        assert self.prefiller is not None, f"{self.config.worker} does not prefill"
        packed = pack(chunks, self.config, self.adapters)
        return PromptBatch(chunks, packed, self.prefiller.spread(packed))

    def through(
        self, group: LayerGroup, slots: DecodeBatch | None, prompts: PromptBatch | None, x: Array | None
    ) -> Any:
        """Runs one group: activations of the group before (None at the first) -> those after this one, or the last's
        results."""
        x = x if x is None else group.submesh.transfer(x)
        if slots is None:
            assert prompts is not None, "a step holds something"
            return group.prefill(prompts.on[group.submesh], x)
        assert self.decoder is not None
        run: Any = group  # a group with a draft head takes further inputs from its decoder
        inputs = self.decoder.inputs(group, slots.batch, slots.plan.table_pages)
        if prompts is None:
            return run.decode(*inputs, x)
        return run.mixed(*inputs, prompts.on[group.submesh], x)

    def _finish(self, plan: StepPlan, slots: DecodeBatch | None, prompts: PromptBatch | None, x: Any) -> DispatchedStep:
        out = x if isinstance(x, MixedResults) else MixedResults(x, None, x)
        rows = chunks = None
        if slots is not None:
            assert self.decoder is not None
            logits = self.layer_groups[-1].submesh.first_copy(out.decode_logits)
            rows = self.decoder.finish(slots.batch, slots.plan, logits)
        if prompts is not None:
            assert self.prefiller is not None
            logits = None if out.chunk_logits is None else out.chunk_logits.addressable_data(0)
            chunks = self.prefiller.finish(prompts.plan, prompts.packed, out.chunks, logits)
            if self.draft is not None and self.draft.kept:  # after sampling, so that no first token waits for it
                self.draft.read(prompts.packed, prompts.on.get(self.draft.submesh))
        return DispatchedStep(plan.step_id, rows, chunks, self._counts() if draws(rows, chunks) else ())

    def _counts(self) -> tuple[tuple[ExpertLoad, list[Array]], ...]:
        return tuple((group.load, group.load.taken()) for group in self.layer_groups if group.sparse)


def _drafting(
    layer_groups: Sequence[LayerGroup],
    config: WorkerConfig,
    vocab_size: int,
    grammars: CompiledGrammars | None,
    draft: DraftLayers | None,
) -> DraftingDecoder:
    parts = layer_groups, config, vocab_size, grammars
    return EagleDecoder(*parts) if isinstance(layer_groups[-1], EagleLayerGroup) else DraftingDecoder(*parts, draft)


def draws(rows: PendingSamples | None, chunks: PendingChunks | None) -> bool:
    """Returns True if the step samples tokens, so that reading it waits for its programs."""
    return rows is not None or (chunks is not None and chunks.tokens is not None)


# Reads the schedule of a compiled program from its text: the order of its products and collectives
# (`core/schedule.py`).
#
# A TPU collective may be spread as a chain over fusions that compute products meanwhile; the chain's first and last
# step are among them. A product counts the operands that it reads, sliced from their stacks, and its result. Other
# instructions count the bytes that they write. The cost of kernels is unknown and counts as zero, so that no transfer
# is taken to be hidden by them.

PRODUCTS = ("dot", "convolution")
NAMES_ONLY = frozenset(("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"))
FREE = NAMES_ONLY | {"custom-call", "iota", "partition-id"}
Event = Work | Start | End | Turns


def read_schedule(module: HloProgram) -> Events:
    """Returns the events of a compiled program; its text must be scheduled."""
    return tuple(_events(module, module.entry, depth=0))


def _events(module: HloProgram, name: str, *, depth: int) -> Iterator[Event]:
    body = module.computations.get(name, [])
    reader = _Reader(module, {each.name: each.shape for each in body}, depth)
    steps = [step for each in body for step in chains(module, each)]
    for each in body:
        if each.opcode == "while":
            assert each.body is not None, each.line
            yield Turns(tuple(_events(module, each.body, depth=depth + 1)))
        elif each.opcode == "conditional":
            for called in each.called[:1]:
                yield from _events(module, called, depth=depth)
        elif each.opcode.endswith("-done"):
            yield from (End(operand) for operand in each.operands if operand in reader.started)
        elif found := chains(module, each):
            yield from reader.step_of_chain(each, found[0], steps)
        else:
            yield from reader.whole(each)


@dataclass
class _Reader:
    """Reads the events of one computation."""

    module: HloProgram
    shapes: dict[str, str]
    depth: int
    started: set[str] = field(default_factory=set)

    def whole(self, each: InstructionInfo) -> Iterator[Event]:
        """Yields the events of an instruction that is not a step of a chain: its collectives and its work."""
        sent = list(_sent(self.module, each, depth=self.depth))
        names = [each.name if number == 0 else f"{each.name}/{number}" for number in range(len(sent))]
        yield from map(Start, names, sent)
        if sent and each.opcode.endswith("-start"):
            self.started.update(names)
            return
        if each.opcode not in FREE and not each.opcode.endswith("-start") and each.opcode not in KINDS:
            yield _work(self.module, each, self.shapes)
        yield from map(End, names)

    def step_of_chain(self, each: InstructionInfo, chain: str, left: list[str]) -> Iterator[Event]:
        """Yields the events of one step of a chain. `left`: one entry per chain for each of its steps not read yet."""
        if chain not in self.started:
            self.started.add(chain)
            yield Start(chain, next(_sent(self.module, each, depth=self.depth)))
        yield from _products(self.module, each, self.shapes)
        left.remove(chain)
        if chain not in left:
            yield End(chain)


def _sent(module: HloProgram, each: InstructionInfo, *, depth: int) -> Iterator[Collective]:
    """Yields the collectives of an instruction or of the computations that it runs."""
    own = collective_of(each, depth=depth)
    if own is not None:
        yield own
        return
    for called in each.called:
        for inner in module.computations.get(called, []):
            yield from _sent(module, inner, depth=depth)


def _work(module: HloProgram, each: InstructionInfo, shapes: dict[str, str]) -> Work:
    made = Work(weight_bytes=sum(bytes_of(*array) for array in arrays(each.shape)))
    return sum(_products(module, each, shapes), made)


def _products(module: HloProgram, each: InstructionInfo, shapes: dict[str, str]) -> Iterator[Work]:
    """Yields the products of an instruction or those fused into it, without their results."""
    if each.opcode in PRODUCTS:
        (_, left), (dtype, right) = (arrays(shapes[operand])[0] for operand in each.operands[:2])
        (_, result), *_ = arrays(each.shape)
        # The dimensions are rows, columns and the contracted one; each is in two of the three arrays.
        summed = round((prod(left) * prod(right) / max(prod(result), 1)) ** 0.5)
        yield Work(bytes_of(dtype, left) + bytes_of(dtype, right), 0.0, 2.0 * prod(result) * summed)
        return
    for called in each.called if each.opcode == "fusion" else ():
        inner = module.computations.get(called, [])
        within = {one.name: one.shape for one in inner}
        for one in inner:
            yield from _products(module, one, within)
