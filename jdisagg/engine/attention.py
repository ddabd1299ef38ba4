"""Attention of a step over the pages of a layer group: writes new keys and values, then reads the pages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jdisagg.core.model_config import AttentionOptions
from jdisagg.model.latent_attention import LatentQueries
from jdisagg.model.network import Attend, OptionsOf
from jdisagg.model.params import StageParams, dotted
from jdisagg.parallel.submesh import WHOLE, StageMesh
from pallas_kernels import QuantizedPages, paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool

# Prompt chunks over latent pages, by the cheaper of two equivalent methods (`model/latent_attention.py`).
#
# Absorbed: a chunk attends to the latents as decode does. Expanded: the keys and values of every head are computed from
# the latents of its sequences, into temporary pages for one layer, and ordinary attention runs over those. Which method
# costs fewer FLOPs depends on the cached tokens per new token, so the device decides per chunk. A prompt without a
# cached prefix is expanded; a few new tokens after a long prefix are absorbed.

LEAST_ROWS = 64  # rows of a chunk; smaller ones save too little for a second method in the program
TOKENS_A_ROW = 4  # most expanded tokens per row of the chunk
EXPANDED_BYTES = 1 << 28  # most bytes of expanded pages
BLOCK_TOKENS = 128  # tokens expanded in one product


def prefill_latents(
    queries: LatentQueries,
    pool: Array,
    table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    options: AttentionOptions,
) -> Array:
    """Computes the attention of a packed chunk, [T, H, V]; arguments as of `prefill_attention`."""
    spans = table, kv_lens, cu_q_lens
    ways = [partial(way, queries, options=options) for way in (absorbed_prefill, expanded_prefill)]
    most = most_pages(queries, pool, table)
    if most == 0:
        return ways[0](pool, *spans)
    pays = expansion_pays(queries, pool.shape[3], most, kv_lens, cu_q_lens)
    return lax.cond(pays, partial(ways[1], most=most), ways[0], pool, *spans)


def absorbed_prefill(queries: LatentQueries, pool: Array, *spans: Array, options: AttentionOptions) -> Array:
    return queries.values_of(prefill_attention(queries.absorbed, pool, *spans, **options._asdict()))


def expanded_prefill(
    queries: LatentQueries,
    pool: Array,
    table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    *,
    options: AttentionOptions,
    most: int,
) -> Array:
    """Computes attention over expanded pages; most: pages of the sequences with rows in this chunk, at most."""
    held = held_pages(kv_lens, cu_q_lens, pool.shape[3])
    before = jnp.cumulative_sum(held, include_initial=True)
    column = jnp.arange(table.shape[1])[None, :]
    dense = jnp.where(column < held[:, None], 1 + before[:-1, None] + column, 0).astype(jnp.int32)
    pages = expanded_pages(queries, pool, table, before, most)
    named: Any = options._replace(value_size=None)._asdict()
    mixed = prefill_attention(queries.whole, pages, dense, kv_lens, cu_q_lens, **named)
    return mixed[..., : queries.value_size]


def expanded_pages(queries: LatentQueries, pool: Array, table: Array, before: Array, most: int) -> Array:
    """Returns [1 + most, H, 2, page_size, D]: keys and values of the held pages, one sequence after another. before:
    i32[S + 1], pages of the sequences before each. Page 0 is zeros; pages behind the last held one are not written."""
    page_size, heads = pool.shape[3], queries.up.shape[0]
    block = pages_of_block(page_size)
    item = jnp.arange(-(-most // block) * block)
    owner = jnp.minimum(jnp.sum(before[None, 1:] <= item[:, None], axis=1), table.shape[0] - 1)
    place = jnp.minimum(item - before[owner], table.shape[1] - 1)
    ids = jnp.where(item < before[-1], table[owner, place], 0)
    size = max(queries.key_size, queries.value_size)

    def expand(index: Array, pages: Array) -> Array:
        rows = pool[lax.dynamic_slice_in_dim(ids, index * block, block)][:, 0, 0]  # [block, page_size, R + rotated]
        both = [_widened(part, size) for part in queries.expanded(rows.astype(queries.up.dtype))]
        made = jnp.stack(both).transpose(1, 3, 0, 2, 4)  # [block, H, 2, page_size, D]
        return lax.dynamic_update_slice_in_dim(pages, made, 1 + index * block, axis=0)

    pages = jnp.zeros((1 + item.shape[0], heads, 2, page_size, size), queries.up.dtype)
    return lax.fori_loop(0, -(-before[-1] // block), expand, pages)


def _widened(rows: Array, size: int) -> Array:
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, size - rows.shape[-1])])


def most_pages(queries: LatentQueries, pool: Array, table: Array) -> int:
    """Returns the pages that a chunk of this shape may expand; 0 if it never does."""
    rows, page_size = queries.nope.shape[0], pool.shape[3]
    size = max(queries.key_size, queries.value_size)
    page_bytes = queries.up.shape[0] * 2 * page_size * size * queries.up.dtype.itemsize
    block = pages_of_block(page_size)
    fits = min(table.size, rows * TOKENS_A_ROW // page_size, EXPANDED_BYTES // page_bytes)
    return 0 if rows < LEAST_ROWS else fits // block * block or fits


def pages_of_block(page_size: int) -> int:
    return max(1, BLOCK_TOKENS // page_size)


def expansion_pays(queries: LatentQueries, page_size: int, most: int, kv_lens: Array, cu_q_lens: Array) -> Array:
    """Returns bool[]: True if expansion takes fewer FLOPs and fits the temporary pages."""
    pages = jnp.sum(held_pages(kv_lens, cu_q_lens, page_size))
    rows, held = jnp.diff(cu_q_lens).astype(jnp.float32), kv_lens.astype(jnp.float32)
    _, made, rank = queries.up.shape
    making = 2.0 * rank * made  # per token and head: its key and value computed, or its query absorbed
    saving = 2.0 * (2 * rank - made)  # per pair and head; the rotated part costs the same in both methods
    saved = jnp.sum(rows * (held - rows / 2)) * saving
    cost = (pages.astype(jnp.float32) * page_size - jnp.sum(rows)) * making
    return (cost < saved) & (pages <= most)


def held_pages(kv_lens: Array, cu_q_lens: Array, page_size: int) -> Array:
    """Returns i32[S]: pages of each sequence that has rows in the chunk."""
    return jnp.where(jnp.diff(cu_q_lens) > 0, -(-kv_lens // page_size), 0)


def fit_to_keep(k: Array, v: Array | None, value_size: int | None) -> tuple[Array, Array | None]:
    """Returns k and v [T, Hkv, D] without values that would spread: a value that is not finite becomes 0, its key NaN.

    A page is read past its owner's tokens, where it holds its last owner's data, and the null page may hold anything.
    The weights there are 0, but 0 * NaN is NaN, so one sequence's NaN would end the sequences that get its pages. The
    NaN key reports the fault to every row that attends to the token, and to no other: masked logits are replaced, not
    multiplied. The first `value_size` numbers of a latent are also its value, so the rest, the rotated key, carries the
    NaN.
    """
    if v is None:
        assert value_size is not None, "a row without V of its own says how much of it is V"
        sound = jnp.all(jnp.isfinite(k), axis=-1, keepdims=True)
        return jnp.where(sound, k, jnp.where(jnp.arange(k.shape[-1])[None, None, :] < value_size, 0, jnp.nan)), None
    sound = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def sharing_rows(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns queries and rows for pages whose K and V share a row, V first (`KVLayout`): the query is 0 on V's
    part."""
    return jnp.concatenate([jnp.zeros_like(q), q], axis=-1), jnp.concatenate([v, k], axis=-1)


class DecodeAttentionRows(NamedTuple):
    """The pages that a step's decode rows read and write: one new token per row."""

    table: Array  # i32[B, W], or fewer rows if each slot has several consecutive rows
    lengths: Array  # i32[B]: tokens to attend to, the new one included; 0 for idle rows
    pages: Array  # i32[B]: page of the new token; 0 if it is not kept
    offsets: Array  # i32[B]


class ChunkRows(NamedTuple):
    """The pages that a step's chunks read and write: row t goes to `offsets[t]` of page `pages[t]` (0: padding)."""

    table: Array  # i32[S, W]
    kv_lens: Array  # i32[S]
    cu_q_lens: Array  # i32[S + 1]
    pages: Array  # i32[T]
    offsets: Array  # i32[T]


Rows = TypeVar("Rows", DecodeAttentionRows | None, ChunkRows | None)


def shifted(rows: Rows, offset: Array | int) -> Rows:
    """Returns the rows with page numbers shifted by `offset`; page 0, which is never read, is not shifted."""
    if rows is None:
        return rows
    return rows._replace(table=rows.table + offset, pages=jnp.where(rows.pages == 0, 0, rows.pages + offset))


def decode_rows(table: Array, positions: Array, alive: Array, page_size: int) -> DecodeAttentionRows:
    """Returns the attention rows of decode. positions i32[B]: tokens held before the new one; alive bool[B]: other rows
    attend to nothing."""
    index = positions // page_size
    alive = alive & (index < table.shape[1])
    column = jnp.minimum(index, table.shape[1] - 1).reshape(table.shape[0], -1)
    pages = jnp.take_along_axis(table, column, axis=1).reshape(-1)
    lengths = jnp.where(alive, positions + 1, 0)
    return DecodeAttentionRows(table, lengths, jnp.where(alive, pages, 0), positions % page_size)


def paged_attend(
    pools: list[Pool], rows: DecodeAttentionRows | None, chunks: ChunkRows | None, options_of: OptionsOf
) -> Attend:
    """Returns the attention function of a step's rows, those of slots before those of chunks. It updates `pools` (a
    list of this program's own) in place. No row reads what another row of the same step writes, except rows of the same
    chunk."""
    kinds = [kind for kind in (rows, chunks) if kind is not None]
    pages = jnp.concatenate([kind.pages for kind in kinds])
    offsets = jnp.concatenate([kind.offsets for kind in kinds])
    slots = 0 if rows is None else rows.lengths.shape[0]

    def attend(layer: int, q: Array | LatentQueries, k: Array, v: Array | None, sinks: Array | None) -> Array:
        options = options_of(layer)
        if v is not None and stored(pools[layer]).shape[2] == 1:
            assert not isinstance(q, LatentQueries), "latents have no V of their own"
            q, k, v, options = *sharing_rows(q, k, v), None, options._replace(value_size=v.shape[-1])
        held: Any = pools[layer]
        pool = pools[layer] = write_kv_pages(held, *fit_to_keep(k, v, options.value_size), pages, offsets)
        mixed = []
        if rows is not None:
            mixed.append(attend_slots(_rows_of(q, slice(slots)), pool, rows, options, sinks))
        if chunks is not None:
            mixed.append(attend_chunks(_rows_of(q, slice(slots, None)), pool, chunks, options, sinks))
        return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed)

    return attend


def attend_slots(
    q: Array | LatentQueries, pool: Pool, rows: DecodeAttentionRows, options: AttentionOptions, sinks: Array | None
) -> Array:
    """Computes attention of decode rows, one token each; latents are attended to in absorbed form."""
    named = {**options._asdict(), "sinks": sinks}
    if isinstance(q, LatentQueries):
        return q.values_of(paged_attention(q.absorbed, pool, rows.table, rows.lengths, **named))
    return paged_attention(q, pool, rows.table, rows.lengths, **named)


def attend_chunks(
    q: Array | LatentQueries, pool: Pool, chunks: ChunkRows, options: AttentionOptions, sinks: Array | None
) -> Array:
    spans = chunks.table, chunks.kv_lens, chunks.cu_q_lens
    if isinstance(q, LatentQueries):
        assert not isinstance(pool, QuantizedPages), "latents are kept as they are"
        return prefill_latents(q, pool, *spans, options)
    return prefill_attention(q, pool, *spans, **options._asdict(), sinks=sinks)


def _rows_of(q: Array | LatentQueries, rows: slice) -> Array | LatentQueries:
    return q.of(rows) if isinstance(q, LatentQueries) else q[rows]


# Layout of the embedding table on a TPU: row-major, as tokens are looked up.
#
# By default a TPU puts the longer dimension last if the hidden size is not a multiple of the lanes, which pads less. It
# then copies the whole table at every lookup: 1.1 GiB per step of gpt-oss, whose rows have 2,880 numbers.

TABLE = "embed"


def by_rows(params: StageParams, submesh: StageMesh) -> StageParams:
    """Returns the weights, or their shapes, with the embedding table row-major; unchanged on platforms other than
    TPU."""
    if submesh.devices[0].platform != "tpu":
        return params
    tree = jax.tree.unflatten(params.treedef, params.leaves)
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return replace(params, leaves=[_by_rows(leaf, submesh) if dotted(path) == TABLE else leaf for path, leaf in named])


def _by_rows(table: Any, submesh: StageMesh) -> Any:
    form = submesh.row_major(WHOLE, 2)
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=form)
    if submesh.spans_processes:
        return jax.jit(lambda each: each, out_shardings=form)(table)
    return jax.device_put(table, form)
