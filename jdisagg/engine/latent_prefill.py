"""Chunks of prompts over latent pages, by the cheaper of two ways that give the same (`model/latent_attention.py`).

*Absorbed*, a chunk attends to the latents as decode does. *Expanded*, keys and values of every head are made of the
latents that its sequences hold, into pages of their own that last for one layer, and ordinary attention runs over
those. Which costs fewer FLOPs depends on how many tokens are held for each new one, so the device decides, chunk by
chunk: a prompt without a cached prefix is expanded; a few new tokens behind a long prefix are absorbed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jdisagg.core.model_config import AttentionOptions
from jdisagg.model.latent_attention import LatentQueries
from pallas_kernels import prefill_attention

LEAST_ROWS = 64  # of a chunk: what smaller ones could save is not worth a second way in the program
TOKENS_A_ROW = 4  # tokens that are expanded at most, for each row of the chunk
EXPANDED_BYTES = 1 << 28  # of expanded pages at most
BLOCK_TOKENS = 128  # expanded in one product


def prefill_latents(
    queries: LatentQueries,
    pool: Array,
    table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    options: AttentionOptions,
) -> Array:
    """Attention of a packed chunk, [T, H, V]; arguments as of `prefill_attention`."""
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
    """most: pages that the sequences with rows in this chunk hold at most."""
    held = held_pages(kv_lens, cu_q_lens, pool.shape[3])
    before = jnp.cumulative_sum(held, include_initial=True)
    column = jnp.arange(table.shape[1])[None, :]
    dense = jnp.where(column < held[:, None], 1 + before[:-1, None] + column, 0).astype(jnp.int32)
    pages = expanded_pages(queries, pool, table, before, most)
    named: Any = options._replace(value_size=None)._asdict()
    mixed = prefill_attention(queries.whole, pages, dense, kv_lens, cu_q_lens, **named)
    return mixed[..., : queries.value_size]


def expanded_pages(queries: LatentQueries, pool: Array, table: Array, before: Array, most: int) -> Array:
    """[1 + most, H, 2, page_size, D]: keys and values of the pages that are held, one sequence after another.

    before: i32[S + 1], pages of the sequences before each. Page 0 is zeros; what follows the last page is not written.
    """
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
    """Zeros behind the last dimension."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, size - rows.shape[-1])])


def most_pages(queries: LatentQueries, pool: Array, table: Array) -> int:
    """Pages that a chunk of this shape may expand; 0 where it never does."""
    rows, page_size = queries.nope.shape[0], pool.shape[3]
    size = max(queries.key_size, queries.value_size)
    page_bytes = queries.up.shape[0] * 2 * page_size * size * queries.up.dtype.itemsize
    block = pages_of_block(page_size)
    fits = min(table.size, rows * TOKENS_A_ROW // page_size, EXPANDED_BYTES // page_bytes)
    return 0 if rows < LEAST_ROWS else fits // block * block or fits


def pages_of_block(page_size: int) -> int:
    return max(1, BLOCK_TOKENS // page_size)


def expansion_pays(queries: LatentQueries, page_size: int, most: int, kv_lens: Array, cu_q_lens: Array) -> Array:
    """bool[]: whether to expand takes fewer FLOPs, and the pages are there for it."""
    pages = jnp.sum(held_pages(kv_lens, cu_q_lens, page_size))
    rows, held = jnp.diff(cu_q_lens).astype(jnp.float32), kv_lens.astype(jnp.float32)
    _, made, rank = queries.up.shape
    making = 2.0 * rank * made  # of a token and head: its key and value made, or its query absorbed
    saving = 2.0 * (2 * rank - made)  # of a pair and head; what is rotated costs the same in both ways
    saved = jnp.sum(rows * (held - rows / 2)) * saving
    cost = (pages.astype(jnp.float32) * page_size - jnp.sum(rows)) * making
    return (cost < saved) & (pages <= most)


def held_pages(kv_lens: Array, cu_q_lens: Array, page_size: int) -> Array:
    """i32[S]: pages of each sequence that has rows in the chunk."""
    return jnp.where(jnp.diff(cu_q_lens) > 0, -(-kv_lens // page_size), 0)
