"""Decode ring: one program over ("pp", "tp") that runs several decode steps of every slot and samples on the devices.

The slots are split into as many microbatches as stages. At each tick every stage steps one of them and activations move
to the next stage by `ppermute`. The last stage's output is sampled and enters the first stage at the next tick: after
the first pp - 1 ticks no stage is idle. A dispatch of n steps takes n * pp + pp - 1 ticks. It ends with no microbatch
in flight, so pages, slots and admissions are handled between two dispatches as with any other step, at the price of pp
- 1 ticks each. Layers, attention and sampling are those of pipeline stages (`layer_group.py`, `decode.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import RingCut
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots, SlotPrograms
from jdisagg.engine.attention import decode_rows
from jdisagg.engine.decode import MASKED, POSITION, TOKEN, MicrobatchState, steered
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.layer_group import PagedLayers, running
from jdisagg.engine.multi_step import (
    DRAWN,
    PLAIN,
    SCORED,
    DispatchResult,
    DispatchSlots,
    PendingMultiStep,
    WidthBuffer,
    draw_left,
)
from jdisagg.engine.runner import GatedSteps
from jdisagg.engine.sampling import NUM_TOP, SamplingTensors, TokenCounters, counted, token_logprobs, with_row
from jdisagg.engine.spec.grammar_masks import EVERYTHING
from jdisagg.kv.pools import RING_POOL_SPEC, RingPages, ring_pool_format
from jdisagg.model.adapted_params import ring_with_room
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.model.lora import AdapterCapacity
from jdisagg.model.network import Stage
from jdisagg.model.params import StageParams
from jdisagg.model.ring_params import RingParams
from jdisagg.parallel.submesh import RING, WHOLE, Program, RingMesh
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool


class TickLoopState(NamedTuple):
    """The loop's state between two ticks, on one device."""

    pools: list[Pool]
    x: Array  # [B, hidden]: the next input of this stage
    state: Array  # i32[4, pp, B]
    left: Array  # i32[pp, B]
    tokens: Array  # i32[most, pp, B]
    output: Array | None  # i32[pp, B, V]
    logprobs: tuple[Array, ...]  # [most, pp, B, ...] each
    load: Array | None  # i32[layer positions with experts, experts]


class RingPrograms:
    """The programs of a ring; weights and pages may be shapes."""

    def __init__(
        self,
        model: ModelConfig,
        cut: RingCut,
        ring: RingMesh,
        params: RingParams,
        num_slots: int,
        most_turns: int,
        room: AdapterCapacity | None = None,
    ) -> None:
        """Builds the programs; room: capacity for LoRA adapters; None: rows have no adapters."""
        assert num_slots % ring.pp == 0, (num_slots, ring.pp)
        self.model, self.cut, self.ring = model, cut, ring
        adapted = None if room is None else ring_with_room(params, model, cut, room, ring)
        self.params: StageParams = adapted or params
        self.adapters = None if adapted is None else SlotPrograms(adapted, ring)
        self.rows, self.most_turns = num_slots // ring.pp, most_turns
        self.sparse = [place for place, layer in enumerate(cut.numbers) if model.is_sparse(layer)]
        self.turns = {kind: self._turns_program(kind) for kind in (PLAIN, DRAWN, SCORED)}
        self.steer = ring.program(steered, (WHOLE, WHOLE), WHOLE)
        self.set_row_program = ring.program(with_row_set, (WHOLE,) * 4, WHOLE, donate=(0,))

    @property
    def programs(self) -> list[Program]:
        slots = [self.adapters.fill] if self.adapters else []
        return [*self.turns.values(), self.steer, self.set_row_program, *slots]

    def set_row(self, counts: TokenCounters, slot: Array, prompt: Array, output: Array) -> TokenCounters:
        return self.set_row_program(counts, slot, prompt, output)[0]

    def _turns_program(self, kind: str) -> Program:
        specs = (self.params.specs, RING_POOL_SPEC, WHOLE)
        loads = (PartitionSpec(RING),) if self.sparse else ()
        formats = (ring_pool_format(self.ring), *[None] * (1 + len(loads)))
        results = (RING_POOL_SPEC, *loads, WHOLE)
        turns = partial(self._turns, kind)
        return self.ring.program(turns, specs, results, (1,), formats, as_stored=self.params.in_f32)

    # ------------------------------------------------------------ code of one device

    def _turns(self, kind: str, leaves: list[Array], pools: list[Pool], slots: DispatchSlots) -> tuple[Any, ...]:
        pp, stage = self.ring.pp, self.params.merge(leaves)
        split = self._split(slots)
        carry = self._begin(kind, pools, split, stage)
        tick = partial(self._tick, kind, stage, split)
        end = jax.lax.fori_loop(0, split.turns * pp + pp - 1, tick, carry)
        loads = () if end.load is None else (end.load[None],)
        return end.pools, *loads, self._drawn(end)

    def _split(self, slots: DispatchSlots) -> DispatchSlots:
        """Reshapes the inputs of all slots to one leading axis per microbatch."""
        shape, metadata = (self.ring.pp, self.rows), slots.metadata
        counts = slots.counts
        return DispatchSlots(
            slots.table.reshape(*shape, -1),
            slots.state.reshape(4, *shape),
            slots.left.reshape(shape),
            slots.turns,
            SamplingTensors(metadata.ints.reshape(*shape, -1), metadata.floats.reshape(*shape, -1)),
            None if counts is None else TokenCounters(*(each.reshape(*shape, -1) for each in counts)),
            None if slots.allowed is None else slots.allowed.reshape(*shape, -1),
        )

    def _begin(self, kind: str, pools: list[Pool], slots: DispatchSlots, stage: Stage) -> TickLoopState:
        most, shape, experts = self.most_turns, (self.ring.pp, self.rows), self.model.experts
        top = min(NUM_TOP, self.model.vocab_size)
        kept = [((), jnp.float32), ((top,), jnp.int32), ((top,), jnp.float32)] if kind == SCORED else []
        return TickLoopState(
            list(pools),
            jnp.zeros((self.rows, self.model.hidden_size), stage.dtype),
            slots.state,
            slots.left,
            jnp.full((most, *shape), MASKED, jnp.int32),
            None if slots.counts is None else slots.counts.output,
            tuple(jnp.zeros((most, *shape, *rest), dtype) for rest, dtype in kept),
            jnp.zeros((len(self.sparse), experts.number), jnp.int32) if self.sparse and experts else None,
        )

    def _drawn(self, end: TickLoopState) -> DispatchResult:
        def flat(each: Array) -> Array:
            return each.reshape(each.shape[0], -1, *each.shape[3:])

        logprobs = None if not end.logprobs else tuple(map(flat, end.logprobs))
        output = None if end.output is None else end.output.reshape(-1, end.output.shape[-1])
        return DispatchResult(flat(end.tokens), logprobs, output, flat(end.state))  # pyright: ignore[reportArgumentType]

    def _tick(self, kind: str, stage: Stage, slots: DispatchSlots, t: Array, carry: TickLoopState) -> TickLoopState:
        """Steps on every stage the microbatch that is at it, and samples the one that leaves the last stage."""
        pp, here = self.ring.pp, jax.lax.axis_index(RING)
        x = jnp.where(here == 0, stage.embed_tokens(_at(carry.state, t % pp, 1)[TOKEN]), carry.x)
        pools, x, load = self._layers(stage, slots, t, carry, x)
        carry = carry._replace(pools=pools, load=load)
        leaving = jax.lax.psum(jnp.where(here == pp - 1, x, jnp.zeros_like(x)), RING)
        carry = self._draw(kind, slots, t, carry, stage.logits(leaving))
        return carry._replace(x=jax.lax.ppermute(x, RING, [(s, (s + 1) % pp) for s in range(pp)]))

    def _layers(
        self, stage: Stage, slots: DispatchSlots, t: Array, carry: TickLoopState, x: Array
    ) -> tuple[list[Pool], Array, Array | None]:
        """Runs this stage's layers for its microbatch of this tick; without a microbatch all results are discarded."""
        pp, here = self.ring.pp, jax.lax.axis_index(RING)
        mine, age = (t - here) % pp, t - here
        state = _at(carry.state, mine, 1)
        alive = running(state) & (_at(carry.left, mine) > 0) & (age >= 0) & (age < slots.turns * pp)
        table = _at(slots.table, mine)
        table, adapters = (table[:, :-1], table[:, -1]) if self.adapters else (table, None)
        rows = decode_rows(table, state[POSITION], alive, stored(carry.pools[0]).shape[3])
        held = jnp.array([[layer is not None for layer in row] for row in self.cut.places])[here]
        layers = PagedLayers(carry.pools, rows, None, stage.attention, self.model.experts, alive, adapters)
        x = stage.run_layers(x, state[POSITION], layers, held)
        load = carry.load
        if load is not None:
            load = load + jnp.where(held[jnp.array(self.sparse)][:, None], layers.counts[0], 0)
        return layers.pools, x, load

    def _draw(self, kind: str, slots: DispatchSlots, t: Array, carry: TickLoopState, logits: Array) -> TickLoopState:
        """Samples the microbatch that has left the last stage; the first pp - 1 ticks sample none."""
        pp = self.ring.pp
        m, turn = (t + 1) % pp, jnp.maximum((t - (pp - 1)) // pp, 0)
        state, left = _at(carry.state, m, 1), _at(carry.left, m)
        metadata = SamplingTensors(*(_at(each, m) for each in slots.metadata))
        output, logprobs = carry.output, carry.logprobs
        mine = state, jnp.where(t >= pp - 1, left, 0), metadata
        if kind == PLAIN:
            after, tokens = draw_left(kind, logits, *mine)
        else:
            assert slots.counts is not None and slots.allowed is not None and output is not None
            counts = TokenCounters(_at(slots.counts.prompt, m), _at(output, m))
            after, tokens = draw_left(kind, logits, *mine, counts, _at(slots.allowed, m))
            output = _put(output, counted(counts, tokens).output, m)
        if kind == SCORED:
            scores = token_logprobs(logits, tokens)
            logprobs = tuple(_put_at(kept, new, turn, m) for kept, new in zip(logprobs, scores, strict=True))
        return carry._replace(
            state=_put(carry.state, after, m, 1),
            left=_put(carry.left, left - (tokens != MASKED).astype(jnp.int32), m),
            tokens=_put_at(carry.tokens, tokens, turn, m),
            output=output,
            logprobs=logprobs,
        )


def with_row_set(counts: TokenCounters, slot: Array, prompt: Array, output: Array) -> tuple[TokenCounters, Array]:
    """Returns `with_row`; the second result becomes ready when that is done."""
    return with_row(counts, slot, prompt, output), slot[None]


def _at(array: Array, index: Array, axis: int = 0) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)


def _put(array: Array, new: Array, index: Array, axis: int = 0) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, new, index, axis)


def _put_at(array: Array, new: Array, turn: Array, index: Array) -> Array:
    """Writes `new` at [turn, index] of an array [most, pp, ...]."""
    return jax.lax.dynamic_update_slice(array, new[None, None], (turn, index, *[0] * (array.ndim - 2)))


# The host's part of a ring: a dispatch holds the rows of all slots, for one step or several.


class LoadedRing(RingPrograms):
    """A ring with loaded weights and allocated pages."""

    joined = False  # each layer position has a pool

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        layout: KVLayout,
        cut: RingCut,
        ring: RingMesh,
        params: RingParams,
        room: AdapterCapacity | None = None,
    ) -> None:
        super().__init__(model, cut, ring, params, config.num_slots, config.decode.steps_per_dispatch, room)
        self.kv = RingPages(layout, cut, config.num_pages, ring)
        self.layers, self.submesh = range(len(cut.numbers)), ring
        self.kv_layers = self.layers
        self.stages = [RingStage(self, stage) for stage in range(ring.pp)]

    def dispatch(self, kind: str, slots: DispatchSlots) -> DispatchResult:
        self.kv.pools[:], *loads, drawn = self.turns[kind](self.params.leaves, self.kv.pools, slots)
        for stage in self.stages:
            stage.load_leaves(loads)
        return drawn


class RingStage:
    """One stage of a ring for transfers and reports: its layers, its submesh, its pages."""

    programs: tuple[Program, ...] = ()  # the programs belong to the ring
    joined = False

    def __init__(self, ring: LoadedRing, stage: int) -> None:
        self.layers = self.kv_layers = ring.cut.runs[stage]
        self.submesh = ring.ring.stages[stage]
        self.kv, self.params = ring.kv.stages[stage], _StageWeights(ring.params.num_bytes // ring.ring.pp)
        self.is_first, self.is_last = stage == 0, stage == ring.ring.pp - 1
        rows = [row for row, place in enumerate(ring.sparse) if ring.cut.places[stage][place] is not None]
        layers = [ring.cut.places[stage][ring.sparse[row]] for row in rows]
        self.sparse = [layer for layer in layers if layer is not None]
        self.load = ExpertLoad(self.sparse, ring.model.experts, rows)
        self._ring, self._stage = ring.ring, stage

    def load_leaves(self, loads: list[Array]) -> None:
        """Records expert loads from the counts of all stages, if this process holds this stage's shard."""
        for each in loads if self.sparse and self.submesh.local_devices else ():
            here = self.submesh.local_devices[0]
            self.load.leaves([shard.data for shard in each.addressable_shards if shard.device == here])


@dataclass(frozen=True)
class _StageWeights:
    """The weights of one stage, as its share of the ring's bytes."""

    num_bytes: int
    leaves: tuple[Any, ...] = ()


class RingRunner:
    """Runs the steps of one ring and owns its slots."""

    prefiller = None  # a ring computes no prompts
    draft, programs = None, dict[str, Any]()  # several steps are part of the ring's program
    decoder = None  # sampling is part of the ring's program

    def __init__(
        self,
        ring: LoadedRing,
        config: WorkerConfig,
        grammars: CompiledGrammars | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.ring, self.config, self.adapters, self.gates = ring, config, adapters, GatedSteps()
        sizes = config.num_slots, config.table_buckets[-1], ring.model.vocab_size
        self.slots = MicrobatchState(0, *sizes, ring.ring.put, grammars)
        self._everything: Array = ring.ring.put(np.full((sizes[0], self.slots.masks.words), EVERYTHING))
        self._widths = WidthBuffer(config.num_slots, ring.ring.put)

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """Dispatches a step, see `executor.Executor.run`."""
        rows = plan.decode
        assert rows is not None and plan.prefill is None and not rows.gates, "a ring decodes, and waits at no gate"
        self.slots.send_changes(rows, self.ring.steer, self.ring.set_row)
        sampling, allowed = self.slots.batch_sampling(rows.active), self.slots.allowed(rows.active)
        if self.adapters is not None:
            self.adapters.load(sampling.each)
            self.slots.find_adapters(self.adapters, rows.active)
        kind = SCORED if sampling.scored else DRAWN
        kind = PLAIN if kind == DRAWN and allowed is None and sampling.plain else kind
        drawn = self.ring.dispatch(kind, self._slots(rows, kind, allowed))
        self.slots.state = drawn.state
        if drawn.output is not None:
            self.slots.counts = TokenCounters(self.slots.counts.prompt, drawn.output)
        for array in (drawn.tokens, *(drawn.logprobs or ())):
            array.copy_to_host_async()
        counts = tuple((stage.load, stage.load.taken()) for stage in self.ring.stages if stage.sparse)
        return PendingMultiStep(plan.step_id, rows, drawn, sampling.wanted, counts)

    def _slots(self, rows: DecodeRows, kind: str, allowed: Array | None) -> DispatchSlots:
        table, batch = self.slots.table_on(self.ring.ring, rows.table_pages), self.slots
        left, turns = self._widths.of(rows)
        drawn = (None, None) if kind == PLAIN else (batch.counts, self._everything if allowed is None else allowed)
        return DispatchSlots(table, batch.state, left, turns, batch.metadata, *drawn)
