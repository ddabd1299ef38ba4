"""Runs steps: the rows of one microbatch, packed chunks, or both, through every layer group, and draws what follows.

A step is dispatched group by group. What its rows and chunks read and write is in `attention.py`, what is drawn in
`decode.py` and `prefill.py`; one with gates waits between two groups (`gates.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array

from jdisagg.core.events import StepDone
from jdisagg.core.steps import DecodeRows, PrefillChunks, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.decode import Decoder, Drawing, Microbatch
from jdisagg.engine.draft_layers import DraftLayers
from jdisagg.engine.drafting import DraftingDecoder
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.forced import ForcingDecoder
from jdisagg.engine.gates import Gates, StagedStep
from jdisagg.engine.headed_decode import HeadedDecoder
from jdisagg.engine.headed_group import HeadedGroup
from jdisagg.engine.layer_group import Chunks, LayerGroup, MixedOut
from jdisagg.engine.multi_step import MultiStep
from jdisagg.engine.multi_step_rows import PendingMultiStep
from jdisagg.engine.pipelined_multi_step import PendingPipelinedMultiStep, PipelinedMultiStep
from jdisagg.engine.prefill import Packed, PendingChunks, Prefiller, pack
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.parallel.submesh import Submesh


@dataclass(frozen=True)
class Pending:
    """A step on its way; see `executor.PendingStep`."""

    step_id: int
    rows: Drawing | None
    chunks: PendingChunks | None
    counts: tuple[tuple[ExpertLoad, list[Array]], ...] = ()  # of experts, by the programs up to this step

    def read(self) -> StepDone:
        decode = self.rows.read() if self.rows else ()
        first, prompt, pooled = self.chunks.read() if self.chunks else ((), (), ())
        for load, taken in self.counts:
            load.read(taken)
        guessed = self.rows.guessed() if self.rows else ()
        return StepDone(self.step_id, decode, first, prompt, pooled, guessed)


@dataclass(frozen=True)
class Slots:
    """A step's decode rows: the plan, and the microbatch that it steps."""

    plan: DecodeRows
    batch: Microbatch


@dataclass(frozen=True)
class Prompts:
    """A step's chunks: the plan, packed, and where the layer groups find it."""

    plan: PrefillChunks
    packed: Packed
    on: dict[Submesh, Chunks]


class Runner:
    """One worker's layer groups, its slots, and what it keeps of prompts between chunks."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: Grammars | None = None,
        adapters: AdapterSlots | None = None,
        draft: DraftLayers | None = None,
    ) -> None:
        """draft: of the model that guesses, where there is one."""
        self.layer_groups, self.config, self.adapters = layer_groups, config, adapters
        parts = layer_groups, config, vocab_size, grammars
        self.prefiller = Prefiller(*parts) if config.computes_prompts else None
        drafting = _drafting(*parts, draft) if config.role.decodes and config.draft_tokens else None
        self.drafts = drafting.drafts if drafting else None
        self.draft = draft
        forcing = ForcingDecoder(*parts) if config.role.decodes and config.forced_tokens and not drafting else None
        self.forced = forcing.forced if forcing else None
        self.decoder = drafting or forcing or (Decoder(*parts) if config.role.decodes else None)
        self.turns = MultiStep(layer_groups[0], config) if config.is_multi_step else None
        self.joint = PipelinedMultiStep(config.decode.n, config.stage_slots) if config.is_pipelined_multi_step else None
        self.gates = Gates()

    @property
    def programs(self) -> dict[str, Any]:
        """Those of steps whose rows may draw several tokens, as fields of a `ProgramTable`."""
        return {"drafts": self.drafts, "forced": self.forced, "turns": self.turns}

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """See `executor.Executor.run`."""
        if plan.decode is not None and self.joint is not None:
            return self._go_round(plan.step_id, plan.decode, self.joint)
        if plan.decode is not None and plan.decode.turns:
            return self._take_turns(plan)
        return self.gates.run(plan.decode.gates if plan.decode else (), self._stages(plan, group_done))

    def _take_turns(self, plan: StepPlan) -> PendingMultiStep:
        assert plan.prefill is None and plan.decode and not plan.decode.gates, "turns hold rows alone, wait at no gate"
        slots, _ = self._begun(plan.decode, None)
        assert slots is not None and self.turns is not None, f"{self.config.worker} takes single steps"
        pending = self.turns.run(plan.step_id, plan.decode, slots.batch)
        if isinstance(self.decoder, DraftingDecoder):
            self.decoder.took_turns(slots.batch, pending.drawn.tokens.addressable_data(0))
        return pending

    def _go_round(self, step_id: int, rows: DecodeRows, joint: PipelinedMultiStep) -> PendingPipelinedMultiStep:
        drawn = list[Drawing]()
        for step in joint.of(rows):
            slots, _ = self._begun(step, None)
            assert slots is not None and self.decoder is not None, f"{self.config.worker} does not decode"
            if step.active:  # else it only says who has left
                drawn.append(self.decoder.finish(slots.batch, step, self._logits(slots)))
        return PendingPipelinedMultiStep(step_id, rows, drawn, self._counts())

    def _logits(self, slots: Slots) -> Array:
        """Of rows alone, on the device that draws."""
        x: Any = None
        for group in self.layer_groups:
            x = self.through(group, slots, None, x)
        return self.layer_groups[-1].submesh.first_copy(x)

    def _stages(self, plan: StepPlan, group_done: GroupDone | None) -> StagedStep[Pending]:
        """The step, layer group by layer group; a decode worker's are its stages (see `gates.py`)."""
        slots, prompts, x = *self._begun(plan.decode, plan.prefill), None
        for stage, group in enumerate(self.layer_groups):
            yield stage
            if x is not None and group_done is not None:
                group_done(group.layers.start)
            x = self.through(group, slots, prompts, x)
        return self._finish(plan, slots, prompts, x)

    def activations(self, rows: DecodeRows | None, chunks: PrefillChunks | None) -> Any:
        """What the last layer group makes of a step; nothing is drawn."""
        slots, prompts, x = *self._begun(rows, chunks), None
        for group in self.layer_groups:
            x = self.through(group, slots, prompts, x)
        return x

    def _begun(self, rows: DecodeRows | None, chunks: PrefillChunks | None) -> tuple[Slots | None, Prompts | None]:
        """Both as the step finds them, and their adapters there."""
        slots = self.slots(rows)
        if self.adapters is not None:
            asked = slots.batch.asked(slots.plan.active).each if slots else []
            self.adapters.here([*asked, *(chunk.sampling for chunk in (chunks.chunks if chunks else ()))])
            if slots is not None:
                slots.batch.find_adapters(self.adapters, slots.plan.active)
        return slots, self.prompts(chunks)

    def slots(self, rows: DecodeRows | None) -> Slots | None:
        if rows is None:
            return None
        assert self.decoder is not None, f"{self.config.worker} does not decode"
        return Slots(rows, self.decoder.begin(rows))

    def prompts(self, chunks: PrefillChunks | None) -> Prompts | None:
        if chunks is None:
            return None
        assert self.prefiller is not None, f"{self.config.worker} does not prefill"
        packed = pack(chunks, self.config, self.adapters)
        return Prompts(chunks, packed, self.prefiller.spread(packed))

    def through(self, group: LayerGroup, slots: Slots | None, prompts: Prompts | None, x: Array | None) -> Any:
        """Activations of the group before (None at the first) -> those after this one, or what the last one makes."""
        x = x if x is None else group.submesh.transfer(x)
        if slots is None:
            assert prompts is not None, "a step holds something"
            return group.prefill(prompts.on[group.submesh], x)
        assert self.decoder is not None
        run: Any = group  # one with a head takes besides what its decoder carries
        inputs = self.decoder.inputs(group, slots.batch, slots.plan.table_pages)
        if prompts is None:
            return run.decode(*inputs, x)
        return run.mixed(*inputs, prompts.on[group.submesh], x)

    def _finish(self, plan: StepPlan, slots: Slots | None, prompts: Prompts | None, x: Any) -> Pending:
        out = x if isinstance(x, MixedOut) else MixedOut(x, None, x)
        rows = chunks = None
        if slots is not None:
            assert self.decoder is not None
            logits = self.layer_groups[-1].submesh.first_copy(out.decode_logits)
            rows = self.decoder.finish(slots.batch, slots.plan, logits)
        if prompts is not None:
            assert self.prefiller is not None
            logits = None if out.chunk_logits is None else out.chunk_logits.addressable_data(0)
            chunks = self.prefiller.finish(prompts.plan, prompts.packed, out.chunks, logits)
            if self.draft is not None and self.draft.kept:  # last, so that no first token waits for it
                self.draft.read(prompts.packed, prompts.on.get(self.draft.submesh))
        return Pending(plan.step_id, rows, chunks, self._counts() if draws(rows, chunks) else ())

    def _counts(self) -> tuple[tuple[ExpertLoad, list[Array]], ...]:
        return tuple((group.load, group.load.taken()) for group in self.layer_groups if group.sparse)


def _drafting(
    layer_groups: Sequence[LayerGroup],
    config: WorkerConfig,
    vocab_size: int,
    grammars: Grammars | None,
    draft: DraftLayers | None,
) -> DraftingDecoder:
    parts = layer_groups, config, vocab_size, grammars
    return HeadedDecoder(*parts) if isinstance(layer_groups[-1], HeadedGroup) else DraftingDecoder(*parts, draft)


def draws(rows: Drawing | None, chunks: PendingChunks | None) -> bool:
    """Whether reading the step waits for what its programs make."""
    return rows is not None or (chunks is not None and chunks.tokens is not None)
