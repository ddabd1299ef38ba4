"""A layer group: consecutive layers on one submesh, their weights and KV pages, and the device programs over them.

On a decode worker each group is a pipeline stage on a submesh of its own. On a prefill worker all groups share one
submesh. Both run the same programs: `decode` (one token per slot), `prefill` (one packed chunk) and `mixed` (both). A
mixed program concatenates the rows, so that each weight is read once, and calls attention for each kind of row.
Programs are pure functions of flat lists of leaves; the module is merged while tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import AttentionOptions, Experts, ModelConfig
from jdisagg.engine.adapter_slots import SlotPrograms
from jdisagg.engine.attention import ChunkRows, DecodeAttentionRows, by_rows, decode_rows, paged_attend, shifted
from jdisagg.engine.declaration import abstract
from jdisagg.engine.expert_load import ExpertLoad, tokens_sent
from jdisagg.engine.pooling import pooled
from jdisagg.engine.sampling import token_logprobs
from jdisagg.kv.pools import POOL_SPEC, PagePoolLayout, StagePages, pool_format
from jdisagg.model.adapted_params import with_room
from jdisagg.model.looped_params import LoopedParams
from jdisagg.model.lora import AdapterCapacity, give_rows
from jdisagg.model.network import Layer, OptionsOf, Stage
from jdisagg.model.params import StageParams
from jdisagg.model.rope import RotaryTable
from jdisagg.parallel.submesh import WHOLE, Program, StageMesh
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool

# Layers of a device program that is written out, layer by layer.
#
# Layers that are alike are traced once: the first is a jitted function, and the others call it with their own weights
# and pages. Tracing and lowering thirty layers one by one would take most of a start whose programs are in the
# compilation cache.


class PagedLayers:
    """Runs each layer of one stage over its pages while a program is traced (`network.CallLayer`). pools: one per
    layer, or a single pool with the pages of all layers one after another; replaced by the pools that the layers
    return. live: bool[T], the rows that count in the load of experts."""

    def __init__(
        self,
        pools: list[Pool],
        rows: DecodeAttentionRows | None,
        chunks: ChunkRows | None,
        options_of: OptionsOf,
        experts: Experts | None,
        live: Array,
        adapters: Array | None = None,
        joined: int = 0,
    ) -> None:
        """Takes what all layers share. adapters: i32[T], the adapter slot of each row (`model/lora.py`); None if rows
        have no adapters. joined: number of layers whose pages share the one pool; 0: each layer has its own pool."""
        self.pools, self.options_of, self.experts = list(pools), options_of, experts
        self._rows, self._inputs = (rows, chunks), (live, adapters)
        self._pages = stored(pools[0]).shape[0] // joined if joined else 0  # pages per layer
        self._kinds: dict[Any, Callable[..., tuple[Array, Pool, list[Array]]]] = {}
        self._sent: list[Array] = []

    def __call__(self, layer: Layer, x: Array, rotation: RotaryTable, index: int) -> Array:
        graph, leaves = nnx.split(layer)
        kind = graph, self.options_of(index)
        if kind not in self._kinds:
            self._kinds[kind] = jax.jit(partial(run_layer, *kind, self.experts))
        held, inputs = index if self._pages == 0 else 0, (*self._rows_of(index), *self._inputs)
        x, self.pools[held], sent = self._kinds[kind](leaves, self.pools[held], x, rotation, *inputs)
        self._sent += sent
        return x

    def _rows_of(self, index: int) -> tuple[DecodeAttentionRows | None, ChunkRows | None]:
        rows, chunks = self._rows
        return (shifted(rows, index * self._pages), shifted(chunks, index * self._pages)) if self._pages else self._rows

    @property
    def counts(self) -> tuple[Array, ...]:
        """Returns the tokens sent to each expert, i32[layers with experts, experts], as the only item; () without
        experts."""
        return (jnp.stack(self._sent),) if self._sent else ()


def run_layer(
    graph: nnx.GraphDef[Layer],
    options: AttentionOptions,
    experts: Experts | None,
    leaves: nnx.State[Any, Any],
    pool: Pool,
    x: Array,
    rotation: RotaryTable,
    rows: DecodeAttentionRows | None,
    chunks: ChunkRows | None,
    live: Array,
    adapters: Array | None,
) -> tuple[Array, Pool, list[Array]]:
    """Returns the activations and the pool after one layer, and the tokens sent to each expert if it has experts."""
    pools, sent = [pool], []

    def routed(chosen: Array) -> None:
        assert experts is not None
        sent.append(tokens_sent(experts, chosen, live))

    attend = paged_attend(pools, rows, chunks, lambda _: options)
    layer = nnx.merge(graph, leaves)
    give_rows(layer, adapters)
    x = layer(x, rotation, 0, attend, routed)
    return x, pools[0], sent


# Layers of a device program that is a loop: one period of layers is traced and runs with each iteration's weights.
#
# The pages of all layers are in one pool, layer after layer. The loop carries the pool and writes it in place, without
# slicing: a layer's page numbers are offset to where its pages begin.


class LoopedLayers:
    """Runs the looped layers of one stage, once while a program is traced; then `pool` and `counts` are the results.
    pool: [layers * pages per layer, ...]. live: bool[T], the rows that count in the load of experts."""

    def __init__(
        self,
        pool: Pool,
        rows: DecodeAttentionRows | None,
        chunks: ChunkRows | None,
        num_layers: int,
        experts: Experts | None,
        live: Array,
    ) -> None:
        self.pool, self.experts = pool, experts
        self._rows, self._chunks, self._live = rows, chunks, live
        self._pages = stored(pool).shape[0] // num_layers  # pages per layer
        self._sent: list[Array] = []  # i32[layers, experts]

    @property
    def pools(self) -> list[Pool]:
        return [self.pool]

    @property
    def counts(self) -> tuple[Array, ...]:
        """Returns the tokens sent to each expert, i32[layers with experts, experts], as the only item; () without
        experts."""
        return (jnp.concatenate(self._sent),) if self._sent else ()

    def run(self, stage: Stage, x: Array, positions: Array) -> Array:
        """Returns the activations [..., hidden] after all layers, as `Stage.run_layers`."""
        assert stage.repeat is not None
        repeat, rotation_of = stage.repeat, stage.rotations(positions)

        def one(place: int, layer: Layer, number: Array | int, x: Array, pool: Pool) -> tuple[Array, Pool, Any]:
            graph, leaves = nnx.split(layer)
            rows, chunks = shifted(self._rows, number * self._pages), shifted(self._chunks, number * self._pages)
            kind = graph, stage.attention(place), self.experts
            return run_layer(*kind, leaves, pool, x, rotation_of(place), rows, chunks, self._live, None)

        def turn(carry: tuple[Array, Pool], inputs: tuple[list[Any], Array]) -> tuple[tuple[Array, Pool], Any]:
            (x, pool), (leaves, number), sent = carry, inputs, []
            for offset in range(repeat.period):
                layer = nnx.merge(graphs[offset], leaves[offset])
                x, pool, counts = one(repeat.first + offset, layer, number + offset, x, pool)
                sent += counts
            return (x, pool), jnp.stack(sent) if sent else None

        def alone(place: int) -> None:
            nonlocal x
            (number,) = repeat.places(place)
            x, self.pool, counts = one(place, stage.layers[place], number, x, self.pool)
            self._sent += [each[None] for each in counts]

        for place in range(repeat.first):
            alone(place)
        period = stage.layers[repeat.first : repeat.first + repeat.period]
        graphs, leaves = zip(*(nnx.split(layer) for layer in period), strict=True)
        numbers = repeat.first + repeat.period * jnp.arange(repeat.turns, dtype=jnp.int32)
        (x, self.pool), sent = jax.lax.scan(turn, (x, self.pool), (list(leaves), numbers))
        if sent is not None:
            self._sent.append(sent.reshape(-1, sent.shape[-1]))
        for place in range(repeat.first + repeat.period, len(stage.layers)):
            alone(place)
        return x


SCORE_ROWS = 64  # rows whose logits are in memory at once while prompt logprobs are computed


@dataclass(frozen=True)
class Chunks:
    """A packed prefill chunk on one submesh: T rows (padding last) of S sequences (unused ones have no rows)."""

    rows: Array  # i32[3, T]: token, position, page (0 for padding); i32[4, T] with adapters: adapter slot
    spans: Array  # i32[2, S + 1]: kv_lens and a zero; cu_q_lens
    table: Array  # i32[S, W]


class MixedResults(NamedTuple):
    """The results of the last group for decode rows and chunks together."""

    decode_logits: Array  # f32[B, V]
    chunk_logits: Array | None  # f32[S, V], after each chunk's last row; None if not computed yet
    chunks: Array  # [T, hidden]


class LayerGroupPrograms:
    """The programs of the model's layers `layers` on `submesh`; weights and pages may be shapes."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        submesh: StageMesh,
        params: StageParams,
        room: AdapterCapacity | None = None,
        *,
        form: PagePoolLayout | None = None,
    ) -> None:
        """Builds the programs. room: capacity for LoRA adapters; None: rows have no adapters. form: of the page pools;
        None: of pools without quantization codes."""
        self.config, self.layers, self.submesh, self.params = config, layers, submesh, by_rows(params, submesh)
        self.adapters: SlotPrograms | None = None
        self.form = form or PagePoolLayout(pool_format(submesh))
        if room is not None:
            self.params = adapted = with_room(self.params, config, layers, room, submesh)
            self.adapters = SlotPrograms(adapted, submesh)
        counts = 1 if self.sparse else 0  # i32[layers with experts, experts], see `expert_load.py`
        self.decode_program = self._program(self.decode_step, 3, 1 + counts)
        self.prefill_program = self._program(self._prefill, 4, 1 + counts)
        self.mixed_program = self._program(self._mixed, 6, (3 if self.is_last else 1) + counts)
        self.head_program, self.pool_program, self.score_program = self._ends()

    def _ends(self) -> tuple[Program, Program, Program]:
        """Returns the programs that run on the activations after the last layer: logits, pooled states, scores."""
        specs, program = self.params.specs, self.submesh.program
        return (
            program(self._head, (specs, WHOLE, WHOLE), WHOLE),
            program(self._pool, (specs, WHOLE, WHOLE), WHOLE),
            program(self._score, (specs, WHOLE, WHOLE), WHOLE),
        )

    @property
    def sparse(self) -> list[int]:
        """Returns the layers that have experts."""
        return [layer for layer in self.layers if self.config.is_sparse(layer)]

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    @property
    def kv_layers(self) -> range:
        """Returns the layers that have pages in this group; a draft head adds one (`spec/eagle.py`)."""
        return self.layers

    def carried(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of decode inputs besides page tables, state and activations."""
        return ()

    def _program(self, function: Callable[..., Any], arguments: int, results: int) -> Program:
        """Builds a program. `arguments` counts the inputs besides weights and pages, `results` the outputs besides the
        pages, which are written in place."""
        specs = (self.params.specs, POOL_SPEC, *[WHOLE] * arguments)
        formats = (self.form.format, *[None] * results)
        written = POOL_SPEC, *[WHOLE] * results
        return self.submesh.program(function, specs, written, (1,), formats, **self.compiled)

    @cached_property
    def compiled(self) -> dict[str, bool]:
        """Returns the compile options of programs with layers, see `Submesh.program`."""
        return {"as_stored": self.params.in_f32, "beside": self.first_layer.cuts_columns}

    @property
    def programs(self) -> list[Program]:
        layers = [self.decode_program, self.prefill_program, self.mixed_program]
        slots = [self.adapters.fill] if self.adapters else []
        return [*layers, self.head_program, self.score_program, self.pool_program, *slots]

    # ------------------------------------------------------------ code of one shard

    def _run(self, leaves: list[Array], x: Array | None, tokens: Array) -> tuple[Stage, Array]:
        stage = self.params.merge(leaves)
        return stage, stage.embed_tokens(tokens) if x is None else x

    @property
    def turns(self) -> int:
        """Returns the iterations of the loop over layers; 1 if the layers are written out."""
        return self.params.repeat.turns if isinstance(self.params, LoopedParams) and self.params.repeat else 1

    def parts(self, rows: int) -> int:
        """Returns the number of blocks in which a step's sums over the shards are computed; all layers have the
        same."""
        return self.first_layer.parts(rows)

    @cached_property
    def first_layer(self) -> Layer:
        """Returns the first layer with shapes for weights, so that it keeps no weights that are given up alive."""
        return self.params.merge(abstract(self.params.leaves)).layers[0]

    @property
    def joined(self) -> bool:
        """Returns True if one pool holds the pages of all layers. Each array that a program takes or returns costs host
        time per call, and a pool is both. Pools stay separate on a CPU that converts a pool at every layer, and if a
        GPU kernel could not address all of a joint pool."""
        converts = self.submesh.devices[0].platform == "cpu" and not self.params.in_f32
        return self.turns > 1 or (len(self.kv_layers) > 1 and not converts and not self.form.apart)

    def _run_layers(
        self,
        stage: Stage,
        pools: list[Pool],
        kinds: tuple[DecodeAttentionRows | None, ChunkRows | None],
        live: Array,
        adapters: list[Array],
        x: Array,
        positions: Array,
    ) -> tuple[Array, PagedLayers | LoopedLayers]:
        """Returns the activations after all layers, and the layers with their pools and counts."""
        if stage.repeat is not None:
            assert not adapters, "layers whose rows have adapters are written out"
            (pool,) = pools
            looped = LoopedLayers(pool, *kinds, len(self.kv_layers), self.config.experts, live)
            return looped.run(stage, x, positions), looped
        slots = jnp.concatenate(adapters) if adapters else None
        joined = len(self.kv_layers) if self.joined else 0
        layers = PagedLayers(pools, *kinds, stage.attention, self.config.experts, live, slots, joined)
        return stage.run_layers(x, positions, layers), layers

    def _slots(self, pools: list[Pool], table: Array, state: Array) -> tuple[DecodeAttentionRows, list[Array]]:
        """Returns the attention rows of slots and the adapters' slots. state i32[4, B]: token, position, stopped,
        enabled (see `engine/decode.py`). table i32[B, W], or one row per slot if a slot has several consecutive rows (a
        token and its draft). The last column of the table holds adapter slots if there are adapters."""
        adapters = []
        if self.adapters:
            table, last = table[:, :-1], table[:, -1]
            adapters = [jnp.repeat(last, state.shape[1] // table.shape[0])]
        return decode_rows(table, state[1], running(state), stored(pools[0]).shape[3]), adapters

    def _chunks(self, pools: list[Pool], rows: Array, spans: Array, table: Array) -> ChunkRows:
        return ChunkRows(table, spans[0, :-1], spans[1], rows[2], rows[1] % stored(pools[0]).shape[3])

    def decode_step(
        self, leaves: list[Array], pools: list[Pool], table: Array, state: Array, x: Array | None
    ) -> tuple[list[Pool] | Array, ...]:
        stage, x = self._run(leaves, x, state[0])
        slots, adapters = self._slots(pools, table, state)
        x, layers = self._run_layers(stage, pools, (slots, None), running(state), adapters, x, state[1])
        return layers.pools, stage.logits(x) if self.is_last else x, *layers.counts

    def _prefill(
        self, leaves: list[Array], pools: list[Pool], rows: Array, spans: Array, table: Array, x: Array | None
    ) -> tuple[list[Pool] | Array, ...]:
        stage, x = self._run(leaves, x, rows[0])
        kinds = None, self._chunks(pools, rows, spans, table)
        x, layers = self._run_layers(stage, pools, kinds, in_chunks(rows, spans), [*rows[3:]], x, rows[1])
        return layers.pools, x, *layers.counts

    def _mixed(
        self,
        leaves: list[Array],
        pools: list[Pool],
        slot_table: Array,
        state: Array,
        rows: Array,
        spans: Array,
        table: Array,
        x: Array | None,
    ) -> tuple[list[Pool] | Array, ...]:
        """Returns the pools and the activations [B + T, hidden] of slots and chunks. The last group returns the logits
        [B, V] of the slots, those after each chunk [S, V], and the activations [T, hidden] of the chunks."""
        stage, x = self._run(leaves, x, jnp.concatenate([state[0], rows[0]]))
        slots, adapters = self._slots(pools, slot_table, state)
        kinds = slots, self._chunks(pools, rows, spans, table)
        live, adapters = jnp.concatenate([running(state), in_chunks(rows, spans)]), [*adapters, *rows[3:]]
        positions = jnp.concatenate([state[1], rows[1]])
        x, layers = self._run_layers(stage, pools, kinds, live, adapters, x, positions)
        if not self.is_last:
            return layers.pools, x, *layers.counts
        rows_of_slots, chunks = x[: state.shape[1]], x[state.shape[1] :]
        ends = jnp.maximum(spans[1, 1:] - 1, 0)
        logits = stage.logits(jnp.concatenate([rows_of_slots, chunks[ends]]))
        return layers.pools, logits[: state.shape[1]], logits[state.shape[1] :], chunks, *layers.counts

    def _head(self, leaves: list[Array], x: Array, rows: Array) -> Array:
        return self.params.merge(leaves).logits(x[rows])

    def _pool(self, leaves: list[Array], x: Array, rows: Array) -> Array:
        return pooled(self.params.merge(leaves).states(x), rows)

    def _score(self, leaves: list[Array], x: Array, targets: Array) -> tuple[Array, Array, Array]:
        stage = self.params.merge(leaves)
        block = min(SCORE_ROWS, x.shape[0])
        padding = -x.shape[0] % block

        def score_block(inputs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            return token_logprobs(stage.logits(inputs[0]), inputs[1])

        blocks = (
            jnp.pad(x, ((0, padding), (0, 0))).reshape(-1, block, x.shape[1]),
            jnp.pad(targets, (0, padding)).reshape(-1, block),
        )
        chosen, ids, values = jax.lax.map(score_block, blocks)
        chosen, ids, values = (part.reshape(-1, *part.shape[2:])[: x.shape[0]] for part in (chosen, ids, values))
        return chosen, ids, values


def running(state: Array) -> Array:
    """Returns bool[B]: the slots that a step advances, from a decode state i32[4, B]."""
    return (state[3] == 1) & (state[2] == 0)


def in_chunks(rows: Array, spans: Array) -> Array:
    """Returns bool[T]: the rows that are not padding."""
    return jnp.arange(rows.shape[1]) < spans[1, -1]


class LayerGroup(LayerGroupPrograms):
    """A layer group with loaded weights and allocated pages."""

    def __init__(
        self,
        params: StageParams,
        config: ModelConfig,
        layers: range,
        submesh: StageMesh,
        layout: KVLayout,
        num_pages: int,
        room: AdapterCapacity | None = None,
    ) -> None:
        form = partial(PagePoolLayout.of, layout, num_pages=num_pages, submesh=submesh)
        super().__init__(config, layers, submesh, params, room, form=form(len(layers)))
        self.form = form(len(self.kv_layers))
        self.kv = StagePages(layout, self.kv_layers, num_pages, submesh, joined=self.joined)
        self.load = ExpertLoad(self.sparse, config.experts)

    def given_up(self) -> StageParams:
        """Returns the weights of a group that will not run again."""
        return self.params

    def decode(self, table: Array, state: Array, x: Array | None) -> Array:
        """Runs one decode step: activations [B, hidden] of the stage before (None at the first) -> the next, or
        logits."""
        self.kv.pools, result, *counts = self.decode_program(self.params.leaves, self.kv.pools, table, state, x)
        self.load.leaves(counts)
        return result

    def prefill(self, chunks: Chunks, x: Array | None) -> Array:
        """Runs one packed chunk: activations [T, hidden] of the group before (None at the first) -> those after this
        one."""
        batch = chunks.rows, chunks.spans, chunks.table
        self.kv.pools, result, *counts = self.prefill_program(self.params.leaves, self.kv.pools, *batch, x)
        self.load.leaves(counts)
        return result

    def mixed(self, slot_table: Array, state: Array, chunks: Chunks, x: Array | None) -> MixedResults | Array:
        """Runs decode rows and a chunk: activations [B + T, hidden] -> those after this one, or the last group's
        results."""
        batch = slot_table, state, chunks.rows, chunks.spans, chunks.table
        self.kv.pools, *results = self.mixed_program(self.params.leaves, self.kv.pools, *batch, x)
        made = 3 if self.is_last else 1
        self.load.leaves(results[made:])
        return MixedResults(*results[:made]) if self.is_last else results[0]

    def head(self, x: Array, rows: np.ndarray) -> Array:
        """Returns the logits f32[S, V] of the rows i32[S] of x [T, hidden]."""
        return self.head_program(self.params.leaves, x, self.submesh.put(rows))

    def pool(self, x: Array, rows: np.ndarray) -> Array:
        """Returns the final states of x's rows summed per sequence: see `pooling.pooled`."""
        return self.pool_program(self.params.leaves, x, self.submesh.put(rows))

    def score(self, x: Array, targets: np.ndarray) -> tuple[Array, Array, Array]:
        """Returns the log-probability f32[T] of targets i32[T], each after its row, and the top ones i32[T, 20], f32[T,
        20]."""
        return self.score_program(self.params.leaves, x, self.submesh.put(targets))
