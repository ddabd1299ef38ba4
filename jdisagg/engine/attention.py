"""Attention of a step over the pages of a layer group: new keys and values are written, then the pages are read."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from jdisagg.core.model_config import AttentionOptions
from jdisagg.engine.latent_prefill import prefill_latents
from jdisagg.model.latent_attention import LatentQueries
from jdisagg.model.network import Attend, OptionsOf
from pallas_kernels import QuantizedPages, paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool


def fit_to_keep(k: Array, v: Array | None, value_size: int | None) -> tuple[Array, Array | None]:
    """[T, Hkv, D] as they may lie in a page: a value that is no number is kept as 0, and its key as NaN.

    A page is read past its owner's tokens, where it holds what its last owner left, and of the null page anything: by
    weights of 0, but 0 * NaN is NaN. So one sequence's NaN would end those that get its pages. The key says the same
    to whoever attends to that token, and to nobody else: logits that are not to be seen are left out, not multiplied.
    Of a latent the first `value_size` numbers are its value as well, so the rest of it, the rotated key, says it.
    """
    if v is None:
        assert value_size is not None, "a row without V of its own says how much of it is V"
        sound = jnp.all(jnp.isfinite(k), axis=-1, keepdims=True)
        return jnp.where(sound, k, jnp.where(jnp.arange(k.shape[-1])[None, None, :] < value_size, 0, jnp.nan)), None
    sound = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def sharing_rows(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Queries and rows for pages whose K and V share a row, V first (`KVLayout`): what of a query meets V is 0."""
    return jnp.concatenate([jnp.zeros_like(q), q], axis=-1), jnp.concatenate([v, k], axis=-1)


class DecodeRows(NamedTuple):
    """Where a step's decode rows read and write: one new token a slot."""

    table: Array  # i32[B, W], or of fewer slots, each with as many rows one behind the other
    lengths: Array  # i32[B]: tokens to attend to, the new one included; 0 where nothing is drawn
    pages: Array  # i32[B]: where the new token goes; 0 where it is not to be kept
    offsets: Array  # i32[B]


class ChunkRows(NamedTuple):
    """Where a step's chunks read and write: row t goes to `offsets[t]` of page `pages[t]` (0: padding)."""

    table: Array  # i32[S, W]
    kv_lens: Array  # i32[S]
    cu_q_lens: Array  # i32[S + 1]
    pages: Array  # i32[T]
    offsets: Array  # i32[T]


Rows = TypeVar("Rows", DecodeRows | None, ChunkRows | None)


def shifted(rows: Rows, offset: Array | int) -> Rows:
    """The same rows in pages that begin at `offset`; page 0, which nobody reads, is where it was."""
    if rows is None:
        return rows
    return rows._replace(table=rows.table + offset, pages=jnp.where(rows.pages == 0, 0, rows.pages + offset))


def decode_rows(table: Array, positions: Array, alive: Array, page_size: int) -> DecodeRows:
    """positions i32[B]: tokens held before the new one; alive bool[B]: the others attend to nothing."""
    index = positions // page_size
    alive = alive & (index < table.shape[1])
    column = jnp.minimum(index, table.shape[1] - 1).reshape(table.shape[0], -1)
    pages = jnp.take_along_axis(table, column, axis=1).reshape(-1)
    lengths = jnp.where(alive, positions + 1, 0)
    return DecodeRows(table, lengths, jnp.where(alive, pages, 0), positions % page_size)


def paged_attend(pools: list[Pool], rows: DecodeRows | None, chunks: ChunkRows | None, options_of: OptionsOf) -> Attend:
    """Attention of a step's rows, those of slots before those of chunks; `pools` (a list of this program's own) is
    updated in place. No row reads what another of the same step writes, but for a chunk its own.
    """
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
    q: Array | LatentQueries, pool: Pool, rows: DecodeRows, options: AttentionOptions, sinks: Array | None
) -> Array:
    """One token a slot; latents are attended to as they are kept."""
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
