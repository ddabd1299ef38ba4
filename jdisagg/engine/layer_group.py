"""A layer group: consecutive layers on one submesh, their weights and KV pages, and the device programs over them.

On a decode worker each group is a pipeline stage on a submesh of its own; on a prefill worker all groups share one
submesh. Either way the same programs run it: `decode` (one token a slot), `prefill` (one packed chunk) and `mixed`
(both: rows are concatenated, so that each weight is read once, and attention is called for each kind). Programs are
pure and take flat lists of leaves; the module is merged while tracing.
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
from jdisagg.kv.pools import POOL_SPEC, PoolForm, StagePages, pool_format
from jdisagg.model.adapted_params import with_room
from jdisagg.model.looped_params import LoopedParams
from jdisagg.model.lora import AdapterCapacity, give_rows
from jdisagg.model.network import Layer, OptionsOf, Stage
from jdisagg.model.params import StageParams
from jdisagg.model.rope import Rotation
from jdisagg.parallel.submesh import WHOLE, Program, Submesh
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool

# The layers of a device program, each called over its own pages.
#
# Layers that are alike are traced once: the first is a jitted function, which the others call with their own
# weights and pages. Tracing and lowering thirty layers one by one is most of the time that a start takes whose
# programs are compiled already.


class PagedLayers:
    """Is called with each layer of one stage, once, while a program is traced (`network.CallLayer`).

    pools: of each layer by its place, or one of all of them, layer behind layer; replaced by what the layers leave.
    live: bool[T], the rows that count as tokens that experts are sent.
    """

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
        """adapters: i32[T], the slot of each row's (`low_rank.py`), where rows may have any. joined: layers whose pages
        lie in the one pool; 0: each has its own."""
        self.pools, self.options_of, self.experts = list(pools), options_of, experts
        self._rows, self._inputs = (rows, chunks), (live, adapters)
        self._pages = stored(pools[0]).shape[0] // joined if joined else 0  # of one layer
        self._kinds: dict[Any, Callable[..., tuple[Array, Pool, list[Array]]]] = {}
        self._sent: list[Array] = []

    def __call__(self, layer: Layer, x: Array, rotation: Rotation, index: int) -> Array:
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
        """Tokens that each expert was sent, i32[layers with experts, experts], alone; nothing where none has any."""
        return (jnp.stack(self._sent),) if self._sent else ()


def run_layer(
    graph: nnx.GraphDef[Layer],
    options: AttentionOptions,
    experts: Experts | None,
    leaves: nnx.State[Any, Any],
    pool: Pool,
    x: Array,
    rotation: Rotation,
    rows: DecodeAttentionRows | None,
    chunks: ChunkRows | None,
    live: Array,
    adapters: Array | None,
) -> tuple[Array, Pool, list[Array]]:
    """Activations and pool after one layer, and of one with experts the tokens each was sent."""
    pools, sent = [pool], []

    def routed(chosen: Array) -> None:
        assert experts is not None
        sent.append(tokens_sent(experts, chosen, live))

    attend = paged_attend(pools, rows, chunks, lambda _: options)
    layer = nnx.merge(graph, leaves)
    give_rows(layer, adapters)
    x = layer(x, rotation, 0, attend, routed)
    return x, pools[0], sent


# The layers of a device program as a loop: one period of them is written out, and goes round with each turn's
# weights.
#
# The stage's pages lie in one pool, layer behind layer. It is carried through the loop and written in place,
# never cut: a layer finds its pages by page numbers that begin where its own do.


class LoopedLayers:
    """Of one stage, run once while a program is traced; pool and counts are then what the layers leave.

    pool: [layers * pages of one, ...]. live: bool[T], the rows that count as tokens that experts are sent.
    """

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
        self._pages = stored(pool).shape[0] // num_layers  # of one layer
        self._sent: list[Array] = []  # i32[layers, experts]

    @property
    def pools(self) -> list[Pool]:
        return [self.pool]

    @property
    def counts(self) -> tuple[Array, ...]:
        """Tokens that each expert was sent, i32[layers with experts, experts], alone; nothing where none has any."""
        return (jnp.concatenate(self._sent),) if self._sent else ()

    def run(self, stage: Stage, x: Array, positions: Array) -> Array:
        """[..., hidden] -> [..., hidden], as `Stage.run_layers`."""
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


SCORE_ROWS = 64  # rows whose logits exist at once while prompt logprobs are made


@dataclass(frozen=True)
class Chunks:
    """A packed prefill chunk on one submesh: T rows (padding last), S sequences (unused ones hold no row)."""

    rows: Array  # i32[3, T]: token, position, page (0 for padding); a fourth, where there are any: slot of its adapter
    spans: Array  # i32[2, S + 1]: kv_lens and a zero; cu_q_lens
    table: Array  # i32[S, W]


class MixedOut(NamedTuple):
    """What the last group makes of slots and chunks together."""

    decode_logits: Array  # f32[B, V]
    chunk_logits: Array | None  # f32[S, V], after each chunk's last row; None where they are not made yet
    chunks: Array  # [T, hidden]


class LayerGroupPrograms:
    """The programs of layers `layers` of the model on `submesh`, whether or not weights and pages exist."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        submesh: Submesh,
        params: StageParams,
        room: AdapterCapacity | None = None,
        *,
        form: PoolForm | None = None,
    ) -> None:
        """room: for adapters of rows; None where rows have none. form: of pages; None: of those that are no codes."""
        self.config, self.layers, self.submesh, self.params = config, layers, submesh, by_rows(params, submesh)
        self.adapters: SlotPrograms | None = None
        self.form = form or PoolForm(pool_format(submesh))
        if room is not None:
            self.params = adapted = with_room(self.params, config, layers, room, submesh)
            self.adapters = SlotPrograms(adapted, submesh)
        counts = 1 if self.sparse else 0  # i32[layers with experts, experts], see `expert_load.py`
        self.decode_program = self._program(self.decode_step, 3, 1 + counts)
        self.prefill_program = self._program(self._prefill, 4, 1 + counts)
        self.mixed_program = self._program(self._mixed, 6, (3 if self.is_last else 1) + counts)
        self.head_program, self.pool_program, self.score_program = self._ends()

    def _ends(self) -> tuple[Program, Program, Program]:
        """What is made of activations behind the last layer."""
        specs, program = self.params.specs, self.submesh.program
        return (
            program(self._head, (specs, WHOLE, WHOLE), WHOLE),
            program(self._pool, (specs, WHOLE, WHOLE), WHOLE),
            program(self._score, (specs, WHOLE, WHOLE), WHOLE),
        )

    @property
    def sparse(self) -> list[int]:
        """Layers that have experts."""
        return [layer for layer in self.layers if self.config.is_sparse(layer)]

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    @property
    def kv_layers(self) -> range:
        """The layers that have pages here: a draft head's besides (`headed_group.py`)."""
        return self.layers

    def carried(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What decode rows are given besides page tables and state."""
        return ()

    def _program(self, function: Callable[..., Any], arguments: int, results: int) -> Program:
        """Of so many arguments beyond weights and pages, and results beyond the pages, which are written in place."""
        specs = (self.params.specs, POOL_SPEC, *[WHOLE] * arguments)
        formats = (self.form.format, *[None] * results)
        written = POOL_SPEC, *[WHOLE] * results
        return self.submesh.program(function, specs, written, (1,), formats, **self.compiled)

    @cached_property
    def compiled(self) -> dict[str, bool]:
        """How programs of its layers are, see `Submesh.program`."""
        return {"as_stored": self.params.in_f32, "beside": self.first_layer.cuts_columns}

    @property
    def programs(self) -> list[Program]:
        layers = [self.decode_program, self.prefill_program, self.mixed_program]
        slots = [self.adapters.fill] if self.adapters else []
        return [*layers, self.head_program, self.score_program, self.pool_program, *slots]

    # ------------------------------------------------------------ what one shard runs

    def _run(self, leaves: list[Array], x: Array | None, tokens: Array) -> tuple[Stage, Array]:
        stage = self.params.merge(leaves)
        return stage, stage.embed_tokens(tokens) if x is None else x

    @property
    def turns(self) -> int:
        """Of the loop that its layers are in programs; 1 where they are written out."""
        return self.params.repeat.turns if isinstance(self.params, LoopedParams) and self.params.repeat else 1

    def parts(self, rows: int) -> int:
        """That a step's sums over the shards are made in; layers are alike in it."""
        return self.first_layer.parts(rows)

    @cached_property
    def first_layer(self) -> Layer:
        """By shapes alone: it must keep no weights that are given up."""
        return self.params.merge(abstract(self.params.leaves)).layers[0]

    @property
    def joined(self) -> bool:
        """Whether all layers' pages lie in one pool: each array that a program is given, and each that it hands back,
        costs the host's call of it, and a pool is both. What a CPU converts of a pool at every layer is to be small,
        and a GPU's kernels are to reach all of it."""
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
        """Activations after all layers, and what they leave."""
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
        """state i32[4, B]: token, position, stopped, enabled (see `engine/decode.py`); table i32[B, W], or of fewer
        slots, whose rows (a token and its draft) lie one behind the other. Adapters' slots are its last column."""
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
        """Activations [B + T, hidden] of slots and chunks; of the last group the logits of the slots [B, V] and after
        each chunk [S, V], and the activations [T, hidden] of the chunks."""
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
    """bool[B]: slots that are stepped, of a decode state i32[4, B]."""
    return (state[3] == 1) & (state[2] == 0)


def in_chunks(rows: Array, spans: Array) -> Array:
    """bool[T]: rows that are no padding."""
    return jnp.arange(rows.shape[1]) < spans[1, -1]


class LayerGroup(LayerGroupPrograms):
    """A layer group that runs: its weights are loaded and its pages allocated."""

    def __init__(
        self,
        params: StageParams,
        config: ModelConfig,
        layers: range,
        submesh: Submesh,
        layout: KVLayout,
        num_pages: int,
        room: AdapterCapacity | None = None,
    ) -> None:
        form = partial(PoolForm.of, layout, num_pages=num_pages, submesh=submesh)
        super().__init__(config, layers, submesh, params, room, form=form(len(layers)))
        self.form = form(len(self.kv_layers))
        self.kv = StagePages(layout, self.kv_layers, num_pages, submesh, joined=self.joined)
        self.load = ExpertLoad(self.sparse, config.experts)

    def given_up(self) -> StageParams:
        """The layers' weights, of a group that is not to run again."""
        return self.params

    def decode(self, table: Array, state: Array, x: Array | None) -> Array:
        """One step: activations [B, hidden] of the stage before (None at the first) -> those of this one, or logits."""
        self.kv.pools, result, *counts = self.decode_program(self.params.leaves, self.kv.pools, table, state, x)
        self.load.leaves(counts)
        return result

    def prefill(self, chunks: Chunks, x: Array | None) -> Array:
        """One chunk: activations [T, hidden] of the group before (None at the first) -> those after this one."""
        batch = chunks.rows, chunks.spans, chunks.table
        self.kv.pools, result, *counts = self.prefill_program(self.params.leaves, self.kv.pools, *batch, x)
        self.load.leaves(counts)
        return result

    def mixed(self, slot_table: Array, state: Array, chunks: Chunks, x: Array | None) -> MixedOut | Array:
        """Both: activations [B + T, hidden] -> those after this one, or what comes of the last group."""
        batch = slot_table, state, chunks.rows, chunks.spans, chunks.table
        self.kv.pools, *results = self.mixed_program(self.params.leaves, self.kv.pools, *batch, x)
        made = 3 if self.is_last else 1
        self.load.leaves(results[made:])
        return MixedOut(*results[:made]) if self.is_last else results[0]

    def head(self, x: Array, rows: np.ndarray) -> Array:
        """Logits f32[S, V] of i32[S] rows of x [T, hidden]."""
        return self.head_program(self.params.leaves, x, self.submesh.put(rows))

    def pool(self, x: Array, rows: np.ndarray) -> Array:
        """The states of x's rows, as the head takes them, summed by sequence: see `pooling.pooled`."""
        return self.pool_program(self.params.leaves, x, self.submesh.put(rows))

    def score(self, x: Array, targets: np.ndarray) -> tuple[Array, Array, Array]:
        """Log-probability of i32[T] targets, each after its row: f32[T], and the likeliest i32[T, 20], f32[T, 20]."""
        return self.score_program(self.params.leaves, x, self.submesh.put(targets))
