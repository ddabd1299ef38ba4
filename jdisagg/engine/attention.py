"""Attention of a step over the pages of a layer group: new keys and values are written, then the pages are read."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jdisagg.model.network import Attend, OptionsOf
from pallas_kernels import paged_attention, prefill_attention, write_kv_pages


def fit_to_keep(k: Array, v: Array) -> tuple[Array, Array]:
    """[T, Hkv, D] as they may lie in a page: a value that is no number is kept as 0, and its key as NaN.

    A page is read past its owner's tokens, where it holds what its last owner left, and of the null page anything: by
    weights of 0, but 0 * NaN is NaN. So one sequence's NaN would end those that get its pages. The key says the same
    to whoever attends to that token, and to nobody else: logits that are not to be seen are left out, not multiplied.
    """
    sound = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


class DecodeRows(NamedTuple):
    """Where a step's decode rows read and write: one new token a slot."""

    table: Array  # i32[B, W]
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


def decode_rows(table: Array, positions: Array, alive: Array, page_size: int) -> DecodeRows:
    """positions i32[B]: tokens held before the new one; alive bool[B]: the others attend to nothing."""
    index = positions // page_size
    alive = alive & (index < table.shape[1])
    pages = jnp.take_along_axis(table, jnp.minimum(index, table.shape[1] - 1)[:, None], axis=1)[:, 0]
    lengths = jnp.where(alive, positions + 1, 0)
    return DecodeRows(table, lengths, jnp.where(alive, pages, 0), positions % page_size)


def paged_attend(
    pools: list[Array], rows: DecodeRows | None, chunks: ChunkRows | None, options_of: OptionsOf
) -> Attend:
    """Attention of a step's rows, those of slots before those of chunks; `pools` (a list of this program's own) is
    updated in place. No row reads what another of the same step writes, but for a chunk its own.
    """
    kinds = [kind for kind in (rows, chunks) if kind is not None]
    pages = jnp.concatenate([kind.pages for kind in kinds])
    offsets = jnp.concatenate([kind.offsets for kind in kinds])
    slots = 0 if rows is None else rows.lengths.shape[0]

    def attend(layer: int, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        pool = pools[layer] = write_kv_pages(pools[layer], *fit_to_keep(k, v), pages, offsets)
        mixed, options = [], {**options_of(layer)._asdict(), "sinks": sinks}
        if rows is not None:
            mixed.append(paged_attention(q[:slots], pool, rows.table, rows.lengths, **options))
        if chunks is not None:
            spans = chunks.table, chunks.kv_lens, chunks.cu_q_lens
            mixed.append(prefill_attention(q[slots:], pool, *spans, **options))
        return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed)

    return attend
