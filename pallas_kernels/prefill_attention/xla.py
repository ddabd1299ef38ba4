"""Prefill attention for XLA: blocks of query rows, each of one sequence, over that sequence's pages tile by tile.

Two loops with dynamic bounds: the outer over the blocks that hold real rows, the inner over the tiles of KV that the
block can see, with the softmax kept running (Dao et al. 2022). Cost follows the useful products: nothing is computed
across sequences, and padding rows, padding sequences and tiles before a window are never visited.
"""

import jax.numpy as jnp
from jax import Array, lax

QUERY_ROWS = 64
TILE_TOKENS = 128


def prefill_attention(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    tokens, heads, size = q.shape
    kv_heads, page_size = kv_pages.shape[1], kv_pages.shape[3]
    groups = heads // kv_heads
    tile_pages = max(1, TILE_TOKENS // page_size)
    tile_tokens = tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    blocks_before = jnp.cumulative_sum(-(-q_lens // QUERY_ROWS), include_initial=True)
    padded = jnp.pad(q.astype(jnp.float32) * scale, ((0, QUERY_ROWS), (0, 0), (0, 0)))

    def block(index: Array, out: Array) -> Array:
        sequence = jnp.searchsorted(blocks_before, index, side="right") - 1
        start = cu_q_lens[sequence] + (index - blocks_before[sequence]) * QUERY_ROWS
        rows = lax.dynamic_slice_in_dim(padded, start, QUERY_ROWS)
        rows = rows.reshape(QUERY_ROWS, kv_heads, groups, size).transpose(1, 2, 0, 3)
        length = kv_lens[sequence]
        first = length - cu_q_lens[sequence + 1] + start  # position of the block's first row
        position = first + jnp.arange(QUERY_ROWS)
        stop = jnp.minimum(first + QUERY_ROWS, length)
        low = 0 if window is None else jnp.maximum(first - window + 1, 0) // tile_tokens

        def tile(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, mixed = carry
            ids = lax.dynamic_slice(table, (sequence, step * tile_pages), (1, tile_pages))[0]
            pages = kv_pages[ids].astype(jnp.float32)  # [pages, Hkv, 2, page_size, D]
            keys, values = (pages[:, :, i].transpose(1, 0, 2, 3).reshape(kv_heads, tile_tokens, size) for i in (0, 1))
            logits = jnp.einsum("hgtd,hsd->hgts", rows, keys)
            if soft_cap is not None:
                logits = soft_cap * jnp.tanh(logits / soft_cap)
            behind = position[:, None] - (step * tile_tokens + jnp.arange(tile_tokens))
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            logits = jnp.where(seen, logits, -jnp.inf)
            higher = jnp.maximum(top, jnp.max(logits, axis=-1))
            safe = jnp.where(jnp.isfinite(higher), higher, 0.0)
            weights = jnp.exp(logits - safe[..., None])
            keep = jnp.exp(top - safe)
            total = total * keep + jnp.sum(weights, axis=-1)
            mixed = mixed * keep[..., None] + jnp.einsum("hgts,hsd->hgtd", weights, values)
            return higher, total, mixed

        top = jnp.full_like(rows[..., 0], -jnp.inf)
        total = jnp.zeros_like(top)
        if sinks is not None:
            top = jnp.maximum(top, sinks.astype(jnp.float32).reshape(kv_heads, groups, 1))
            total = jnp.ones_like(top)
        carry = (top, total, jnp.zeros_like(rows))
        _, total, mixed = lax.fori_loop(low, -(-stop // tile_tokens), tile, carry)
        mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
        rows = mixed.transpose(2, 0, 1, 3).reshape(QUERY_ROWS, heads, size)
        return lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    out = lax.fori_loop(0, blocks_before[-1], block, jnp.zeros_like(padded))[:tokens]
    return jnp.where((jnp.arange(tokens) < cu_q_lens[-1])[:, None, None], out, 0.0).astype(q.dtype)
