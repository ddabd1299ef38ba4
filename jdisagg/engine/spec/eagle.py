"""The last layer group of a model with a draft head, whose layer follows the group's (`model/draft_head.py`).

Every program that runs tokens through the group also writes the head's keys and values for them, in a pool behind those
of its layers. They are therefore wherever the pages are: after a handoff, a preemption or a prefix hit. This needs only
the head's first products, as the output of its layer is not used. `guess` runs the whole head, one row per slot, once
per drafted token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import Admission, DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.attention import ChunkRows, DecodeAttentionRows, decode_rows, paged_attend, shifted
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, logit_bytes, whole
from jdisagg.engine.decode import POSITION, TOKEN, MicrobatchState, PendingSamples
from jdisagg.engine.draw_declarations import SamplingShapes
from jdisagg.engine.layer_group import SCORE_ROWS, LayerGroup, LayerGroupPrograms, MixedResults, in_chunks, running
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, NEVER, TEMPERATURE, SamplingTensors, pick_greedy
from jdisagg.engine.spec.draft_layers import FREE, drawn_alike
from jdisagg.engine.spec.drafting import DraftBuffers, DraftingDecoder
from jdisagg.kv.pools import abstract_pools
from jdisagg.model.draft_head import DraftHead, HeadModel, HeadParams, load_head
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.model.looped_params import LoopedParams
from jdisagg.model.lora import AdapterCapacity
from jdisagg.model.network import Stage, blocks_of
from jdisagg.model.params import StageParams
from jdisagg.model.products import TILE_ROWS
from jdisagg.parallel.submesh import Program, StageMesh
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool

Kinds = tuple[DecodeAttentionRows | None, ChunkRows | None]


@dataclass(frozen=True)
class EagleParams:
    stage: StageParams
    head: HeadParams

    @property
    def leaves(self) -> list[Any]:
        """Returns all leaves in one list, read anew at each call: the stage's adapters change."""
        return [*self.stage.leaves, *self.head.leaves]

    @property
    def specs(self) -> list[PartitionSpec]:
        return [*self.stage.specs, *self.head.specs]

    @property
    def num_reductions(self) -> int:
        return self.stage.num_reductions

    @property
    def in_f32(self) -> bool:
        return self.stage.in_f32

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def merge(self, leaves: list[Array]) -> Stage:
        return self.stage.merge(leaves[: len(leaves) - len(self.head.specs)])

    def merge_head(self, leaves: list[Array]) -> DraftHead:
        return self.head.merge(leaves[len(leaves) - len(self.head.specs) :])


class EagleLayerGroup(LayerGroup):
    """A `LayerGroup` with a draft head, whose pages have one more layer."""

    def __init__(
        self,
        params: StageParams,
        config: ModelConfig,
        layers: range,
        submesh: StageMesh,
        layout: KVLayout,
        worker: WorkerConfig,
        head: HeadModel,
        dtype: Any,
        room: AdapterCapacity | None = None,
    ) -> None:
        super().__init__(params, config, layers, submesh, layout, worker.num_pages, room)
        loaded = load_head(head, submesh.mesh, dtype, embeds=not self.is_first)
        self.params: Any = EagleParams(self.params, loaded)
        self.head_config, self.worker, self.dtype = head.config, worker, dtype
        counts = 1 if self.sparse else 0
        self.decode_program = self._program(self.decode_step, 4, 2 + counts)
        self.prefill_program = self._program(self._prefill, 4, 1 + counts)
        self.mixed_program = self._program(self._mixed, 7, 4 + counts)
        self.head_program, self.pool_program, self.score_program = self._ends()
        self.guess_program = self._program(self._guess, 6, 1)
        self.states_of_rows: Array | None = None  # [rows, hidden], of the last step's decode rows

    @property
    def kv_layers(self) -> range:
        return range(self.layers.start, self.layers.stop + 1)

    @property
    def turns(self) -> int:
        params = self.params.stage if isinstance(self.params, EagleParams) else self.params
        return params.repeat.turns if isinstance(params, LoopedParams) and params.repeat else 1

    @property
    def programs(self) -> list[Any]:
        return [*super().programs, self.guess_program]

    # ------------------------------------------------------------ code of one shard

    def decode_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, leaves: list[Array], pools: list[Pool], table: Array, state: Array, kept: Array, x: Array | None
    ) -> tuple[list[Pool] | Array, ...]:
        """Runs the group and writes the head's KV. kept [B, hidden]: the state before each slot's first row. Returns
        the states of all rows besides the logits."""
        stage, x = self._run(leaves, x, state[TOKEN])
        slots, adapters = self._slots(pools, table, state)
        kinds: Kinds = slots, None
        x, layers = self._run_layers(stage, pools, kinds, running(state), adapters, x, state[POSITION])
        states = stage.states(x)
        before = behind(kept, states)
        pools = self._write(leaves, stage, layers.pools, kinds, state[TOKEN], state[POSITION], before)
        return pools, stage.scores(states), states, *layers.counts

    def _prefill(
        self, leaves: list[Array], pools: list[Pool], rows: Array, spans: Array, table: Array, x: Array | None
    ) -> tuple[list[Pool] | Array, ...]:
        kinds: Kinds = None, self._chunks(pools, rows, spans, table)
        results: Any = super()._prefill(leaves, pools, rows, spans, table, x)
        stage = self.params.merge(leaves)
        before = behind_in_chunks(spans, stage.states(results[1]))
        return self._write(leaves, stage, results[0], kinds, rows[0], rows[1], before), *results[1:]

    def _mixed(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        leaves: list[Array],
        pools: list[Pool],
        slot_table: Array,
        state: Array,
        kept: Array,
        rows: Array,
        spans: Array,
        table: Array,
        x: Array | None,
    ) -> tuple[list[Pool] | Array, ...]:
        tokens, positions = (jnp.concatenate([state[row], rows[row]]) for row in (TOKEN, POSITION))
        stage, x = self._run(leaves, x, tokens)
        slots, adapters = self._slots(pools, slot_table, state)
        kinds: Kinds = slots, self._chunks(pools, rows, spans, table)
        live = jnp.concatenate([running(state), in_chunks(rows, spans)])
        x, layers = self._run_layers(stage, pools, kinds, live, [*adapters, *rows[3:]], x, positions)
        states, number = stage.states(x), state.shape[1]
        before = jnp.concatenate([behind(kept, states[:number]), behind_in_chunks(spans, states[number:])])
        pools = self._write(leaves, stage, layers.pools, kinds, tokens, positions, before)
        ends = number + jnp.maximum(spans[1, 1:] - 1, 0)
        logits = stage.scores(jnp.concatenate([states[:number], states[ends]]))
        return pools, logits[:number], logits[number:], x[number:], states[:number], *layers.counts

    def _write(
        self,
        leaves: list[Array],
        stage: Stage,
        pools: list[Pool],
        kinds: Kinds,
        tokens: Array,
        positions: Array,
        before: Array,
    ) -> list[Pool]:
        """Returns the pools with the head's keys and values of these rows."""
        return self._through_head(leaves, stage, pools, kinds, tokens, positions, before)[0]

    def _through_head(
        self,
        leaves: list[Array],
        stage: Stage,
        pools: list[Pool],
        kinds: Kinds,
        tokens: Array,
        positions: Array,
        before: Array,
    ) -> tuple[list[Pool], Array]:
        """Returns the pools, and the head's prediction of the states of these rows."""
        head, last = self.params.merge_head(leaves), [pools[-1]]
        offset = (len(self.kv_layers) - 1) * (stored(pools[-1]).shape[0] // len(self.kv_layers)) if self.joined else 0
        rows, chunks = (shifted(kinds[0], offset), shifted(kinds[1], offset)) if offset else kinds
        attend = paged_attend(last, rows, chunks, lambda _: self.head_config.layer.attention(0))
        embed = stage.embed if head.embed is None else head.embed
        assert embed is not None
        x = head(embed[...][tokens], before, positions, attend)
        return [*pools[:-1], last[0]], x

    # ------------------------------------------------------------ drafts

    def guess(self, table: Array, state: Array, kept: Array, widths: Array, given: Array, metadata: Any) -> Array:
        """Returns drafts i32[B, drafts]; positions of `given` that are not FREE are kept."""
        here = self.submesh.spread
        held = *(here(each) for each in (state, kept, widths, given)), SamplingTensors(*map(here, metadata))
        pools, guess = self.guess_program(self.params.leaves, self.kv.pools[-1:], table, *held)
        self.kv.pools[-1:] = pools
        return guess.addressable_data(0)

    def _guess(
        self,
        leaves: list[Array],
        pools: list[Pool],
        table: Array,
        state: Array,
        kept: Array,
        widths: Array,
        given: Array,
        metadata: SamplingTensors,
    ) -> tuple[list[Pool] | Array, ...]:
        """Makes the drafts. For each further token the row's state is what the head made of the row before. A head has
        no adapters: those of the rows are part of the states that it starts from."""
        table = table[:, :-1] if self.adapters else table
        stage, head = self.params.merge(leaves), self.params.merge_head(leaves)
        token, states, found = state[TOKEN], kept, []
        for ahead in range(given.shape[1]):
            wanted, positions = running(state) & (widths > ahead + 1), state[POSITION] + ahead
            rows = decode_rows(table, positions, wanted, stored(pools[-1]).shape[3])
            pools, states = self._through_head(leaves, stage, pools, (rows, None), token, positions, states)
            token = self._drawn(stage, head, states, metadata, positions + 1)
            found.append(jnp.where(wanted, token, FREE))
        return pools, jnp.where(given == FREE, jnp.stack(found, axis=1), given)

    def _drawn(self, stage: Stage, head: DraftHead, states: Array, metadata: SamplingTensors, at: Array) -> Array:
        """Returns i32[B]: the token that each slot would sample from such states, among the head's tokens."""
        scores = head.scores(states)
        if scores is None:
            return drawn_alike(stage.scores(states), metadata, at)
        tokens = np.array(self.head_config.tokens, np.int32)
        place = np.full(self.config.vocab_size, -1, np.int32)
        place[tokens] = np.arange(len(tokens))

        def drawn(scores: Array) -> Array:
            spread = jnp.where(jnp.asarray(place >= 0)[None], scores[:, np.maximum(place, 0)], NEVER)
            return drawn_alike(spread, metadata, at)

        def likeliest(scores: Array) -> Array:
            return jnp.asarray(tokens)[jnp.maximum(pick_greedy(scores), 0)]

        return jax.lax.cond(jnp.any(metadata.floats[:, TEMPERATURE] > 0), drawn, likeliest, scores)

    # ------------------------------------------------------------ calls

    def given_up(self) -> StageParams:
        self.params.head.leaves.clear()
        return self.params.stage

    def decode(self, table: Array, state: Array, *rest: Any) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs one decode step as a `LayerGroup`; `rest` are the states before the rows and the activations."""
        results = self.decode_program(self.params.leaves, self.kv.pools, table, state, *rest)
        self.kv.pools, logits, self.states_of_rows, *counts = results
        self.load.leaves(counts)
        return logits

    def mixed(self, slot_table: Array, state: Array, *rest: Any) -> MixedResults:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, chunks, x = rest
        batch = slot_table, state, kept, chunks.rows, chunks.spans, chunks.table
        results = self.mixed_program(self.params.leaves, self.kv.pools, *batch, x)
        self.kv.pools, *made, self.states_of_rows = results[:5]
        self.load.leaves(list(results[5:]))
        return MixedResults(*made)

    # ------------------------------------------------------------ declarations

    def carried(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (whole(self.submesh, (slots, self.config.hidden_size), self.dtype),)


def declared_guesses(group: EagleLayerGroup, stage: int, slots: int, drafts: int) -> list[DeclaredProgram]:
    """Declares the programs that make drafts of `drafts` tokens, one per table width."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return whole(group.submesh, shape)

    floats = whole(group.submesh, (slots, FLOAT_COLUMNS), jnp.float32)
    metadata: Any = SamplingTensors(ints(slots, INT_COLUMNS), floats)  # pyright: ignore[reportArgumentType]
    batch = ints(4, slots), *group.carried(slots), ints(slots), ints(slots, drafts), metadata
    layers = group.kv_layers if group.joined else group.kv_layers[-1:]
    held = len(layers), group.worker.num_pages, group.submesh
    pools = abstract_pools(group.kv.layout, *held, joined=group.joined)
    return [
        DeclaredProgram(
            f"guess {drafts}",
            stage,
            width,
            group.guess_program,
            (ints(slots, width + group.worker.adapter_columns), *batch),
            group.submesh,
            layers,
            abstract(group.params.leaves),
            pools,
            batch_bytes=logit_bytes(group.config, slots),
            donated_bytes=sum(map(local_bytes, jax.tree.leaves(pools))),
        )
        for width in group.worker.table_buckets
    ]


def behind(kept: Array, states: Array) -> Array:
    """Returns [rows, hidden]: the state before each row, for slots with consecutive rows; kept [B, hidden]."""
    by_slot = states.reshape(kept.shape[0], -1, states.shape[1])
    before = jnp.concatenate([kept[:, None].astype(states.dtype), by_slot[:, :-1]], axis=1)
    return before.reshape(states.shape)


def behind_in_chunks(spans: Array, states: Array) -> Array:
    """Returns [T, hidden]: the state before each row of packed chunks, zeros before the first of each."""
    firsts = jnp.zeros(states.shape[0], jnp.bool_).at[spans[1, :-1]].set(True, mode="drop")
    return jnp.where(firsts[:, None], 0, jnp.roll(states, 1, axis=0))


def carried_on(kept: Array, states: Array, before: Array, after: Array) -> Array:
    """Returns [B, hidden]: the state before the token that each slot is fed next; `states` are those of the step's
    rows, `before` and `after` the decode states around the step."""
    by_slot = states.reshape(kept.shape[0], -1, states.shape[1])
    taken = after[POSITION] - before[POSITION]
    last = jnp.take_along_axis(by_slot, jnp.maximum(taken - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((taken > 0)[:, None], last.astype(kept.dtype), kept)


def forgotten(kept: Array, row: Array) -> Array:
    return kept.at[row].set(0)


# Decode rows whose drafts a head makes, from the states that the model's own output head takes.
#
# The device that samples holds, per slot, the state before the token that is fed next. The group's programs take it
# with the rows, as it is needed for the head's KV of each slot's first row. They return the states of all rows; the
# accepted tokens select the one that is kept.


class HeadPrograms:
    def __init__(self, group: EagleLayerGroup) -> None:
        self.group = group
        self.carry, self.forget = Program(carried_on), Program(forgotten)

    @property
    def programs(self) -> list[Program]:
        return [self.carry, self.forget]

    def declared(self, slots: SamplingShapes, widths: Sequence[SamplingShapes]) -> Iterator[DeclaredProgram]:
        """Yields the head's programs: `slots` that sample, and for each width the rows of tokens and drafts."""
        number, states = slots.rows, self.group.dtype

        def held(count: int) -> Any:
            return slots.of((count, self.group.config.hidden_size), states)

        taken = slots.ints(4, number), slots.ints(4, number)
        yield slots.program("draw forget", self.forget, (held(number), slots.ints()))
        for rows in (slots, *widths):
            yield rows.program("draw carry", self.carry, (held(number), held(rows.rows), *taken))
        for rows in widths:
            yield from declared_guesses(self.group, slots.stage, number, rows.rows // number - 1)


class EagleDecoder(DraftingDecoder):
    """A `DraftingDecoder` over a group that has a draft head."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        super().__init__(layer_groups, config, vocab_size, grammars)
        assert isinstance(layer_groups[-1], EagleLayerGroup), "the last stage has the head"
        self.group = layer_groups[-1]
        self.head = self.drafts.head = HeadPrograms(self.group)
        shape = config.slots_per_microbatch, self.group.config.hidden_size
        self.kept: list[Array] = [batch.put(np.zeros(shape, self.group.dtype)) for batch in self.microbatches]

    def _admit(self, batch: MicrobatchState, guesses: DraftBuffers, admission: Admission) -> None:
        super()._admit(batch, guesses, admission)
        place, row = self._place(batch), batch.put(np.asarray(admission.slot - batch.first_slot, np.int32))
        self.kept[place] = self.head.forget(self.kept[place], row)

    def _guess(self, batch: MicrobatchState, guesses: DraftBuffers, given: Array, width: int) -> Array:
        table = batch.table_on(self.group.submesh, width)
        held = batch.state, self.kept[self._place(batch)], guesses.widths, given, batch.metadata
        return self.group.guess(table, *held)

    def inputs(self, group: LayerGroup, batch: MicrobatchState, width: int) -> tuple[Array, ...]:
        """Returns the inputs without a head, and for the group with the head the states [B, hidden] before the rows."""
        held = super().inputs(group, batch, width)
        return (*held, group.submesh.spread(self.kept[self._place(batch)])) if group is self.group else held

    def finish(self, batch: MicrobatchState, plan: DecodeRows, logits: Array) -> PendingSamples:
        before, states, place = batch.state, self.group.states_of_rows, self._place(batch)
        assert states is not None, "the group's program ran"
        drawing = super().finish(batch, plan, logits)
        self.kept[place] = self.head.carry(self.kept[place], states.addressable_data(0), before, batch.state)
        return drawing

    def _place(self, batch: MicrobatchState) -> int:
        return batch.first_slot // batch.size


# Declared programs after a chunk's last layer: logits of some rows, scores of all of a prompt's rows, and states.


def declared_heads(
    config: WorkerConfig, last: LayerGroupPrograms, stage: int, tokens: int, dtype: DTypeLike
) -> Iterator[DeclaredProgram]:
    """Yields the programs of the last layer group of a worker that computes prompts, for chunks of `tokens` tokens."""
    model, sequences, weights = last.config, config.max_chunk_seqs, abstract(last.params.leaves)
    submesh = last.submesh
    x = whole(submesh, (tokens, model.hidden_size), dtype)
    ends = [("head", last.head_program, sequences)]
    if config.role.prefills:  # a decode worker only computes the ends of prompts and scores none
        ends.append(("score", last.score_program, tokens))
    for kind, program, rows in ends:
        room = 2 * local_bytes(x) + logit_bytes(model, min(rows, max(sequences, SCORE_ROWS)))
        what, batch = (kind, stage, tokens, program), (x, whole(submesh, (rows,)))
        gathers = gathers_of(last)
        yield DeclaredProgram(*what, batch, submesh, weights=weights, batch_bytes=room, collectives=gathers)
    if config.embeds and config.role.prefills:
        what, batch = ("states", stage, tokens, last.pool_program), (x, whole(submesh, (2, sequences)))
        room = 6 * local_bytes(whole(submesh, x.shape, jnp.float32))  # states, and three parts of each
        yield DeclaredProgram(*what, batch, submesh, weights=weights, batch_bytes=room)


def gathers_of(group: LayerGroupPrograms) -> dict[str, int]:
    """Returns the gathers of the logits if the vocabulary is split over shards."""
    shards, vocab_size = group.submesh.tp, group.config.vocab_size
    if shards == 1 or vocab_size % shards:
        return {}
    return {"all-gather": blocks_of(vocab_size // shards, group.submesh.devices[0].platform)}


def scored_bytes(group: LayerGroupPrograms, rows: int) -> int:
    """Returns a bound of the bytes of a step's logits, with the rows that fill up a product's tiles. If the vocabulary
    is split, there are three copies: per shard, gathered, and in order."""
    copies = 3 if gathers_of(group) else 1
    return copies * (rows + 2 * TILE_ROWS) * group.config.vocab_size * 4
