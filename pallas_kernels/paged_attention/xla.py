"""Decode attention for XLA, written for the CPU: a list of tiles that hold tokens, read a few at a time.

A *tile* is a few pages of one slot. The tiles of all slots that hold visible tokens make one list; a loop with a
dynamic bound gathers `tiles_a_step` of them into a buffer the size of a core's cache, takes both products there, and
merges the results into the slots' running softmax (Milakov and Gimelshein 2018; split over the sequence as in
Flash-Decoding, Dao et al. 2023). Time therefore follows the tokens held, whatever the table's width or the longest
slot, and no copy of the context is ever made.

Pages of 32 or 64 tokens suit the CPU: 8 slots of 512 tokens, 8/4 heads of 64, f32, cost 1.8 CPU milliseconds a layer
with either and 2.3 with pages of 16 (busy machine). Pages must hold finite numbers, past a slot's length too: a masked
weight is 0, and 0 * NaN is not.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
TILE_TOKENS = 64
STEP_BYTES = 1 << 20  # of K and V in f32: a step's gather stays in a core's second-level cache
MAX_TILES_A_STEP = 8


class Tiles(NamedTuple):
    """The tiles with something to read, slot after slot; N is how many the whole table could have, in whole steps."""

    slot: Array  # i32[N]
    pages: Array  # i32[N, pages of a tile]
    low: Array  # i32[N], first visible token, counted from the tile's start; may be negative
    high: Array  # i32[N], the token after the last visible one; may be past the tile
    total: Array  # i32[], how many of the N are real


def paged_attention(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    lengths: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    """As `pallas_kernels.paged_attention`."""
    slots, heads, size = q.shape
    kv_heads, page_size = kv_pages.shape[1], kv_pages.shape[3]
    tile_pages, width = tile_shape(kv_heads, page_size, size, page_table.shape)
    tiles = list_tiles(page_table, lengths, page_size=page_size, tile_pages=tile_pages, width=width, window=window)
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, heads // kv_heads, size)
    position = jnp.arange(tile_pages * page_size)

    def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        slot, pages, low, high = (lax.dynamic_slice_in_dim(part, index * width, width) for part in tiles[:4])
        keys, values = read_tiles(kv_pages, pages)
        logits = jnp.einsum("nhgd,nhsd->nhgs", grouped[slot], keys)
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        seen = (position < high[:, None]) & (position >= low[:, None])
        logits = jnp.where(seen[:, None, None], logits, NEVER)
        real = index * width + jnp.arange(width) < tiles.total
        mine = real & (slot == jnp.arange(slots)[:, None])  # [B, width]
        higher = jnp.max(jnp.where(mine[:, :, None, None], jnp.max(logits, axis=-1), NEVER), axis=1)
        higher = jnp.maximum(top, higher)
        weights = jnp.exp(logits - higher[slot][..., None])
        share, keep = mine.astype(jnp.float32), jnp.exp(top - higher)
        total = total * keep + jnp.einsum("bn,nhg->bhg", share, jnp.sum(weights, axis=-1))
        parts = jnp.einsum("nhgs,nhsd->nhgd", weights, values)
        mixed = mixed * keep[..., None] + jnp.einsum("bn,nhgd->bhgd", share, parts)
        return higher, total, mixed

    carry = first_carry(grouped, None if sinks is None else sinks.reshape(kv_heads, -1))
    _, total, mixed = lax.fori_loop(0, -(-tiles.total // width), step, carry)
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed.reshape(q.shape).astype(q.dtype)


def tile_shape(kv_heads: int, page_size: int, size: int, table: tuple[int, ...]) -> tuple[int, int]:
    """Pages of a tile, tiles of a step: no more of either than the table [rows, W] can use."""
    tile_pages = min(max(1, TILE_TOKENS // page_size), table[1])
    tile_bytes = tile_pages * page_size * kv_heads * size * 2 * 4
    most = table[0] * -(-table[1] // tile_pages)
    return tile_pages, max(1, min(STEP_BYTES // tile_bytes, MAX_TILES_A_STEP, most))


def list_tiles(
    page_table: Array, lengths: Array, *, page_size: int, tile_pages: int, width: int, window: int | None
) -> Tiles:
    """The work of one call. It reads no KV, so XLA computes it once for all layers of a program."""
    slots, pages = page_table.shape
    columns, tile_tokens = -(-pages // tile_pages), tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, columns * tile_pages - pages))).reshape(slots, columns, tile_pages)
    start = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first = start // tile_tokens
    before = jnp.cumulative_sum(-(-lengths // tile_tokens) - first, include_initial=True)
    item = jnp.arange(-(-slots * columns // width) * width)
    slot = jnp.minimum(jnp.sum(before[1:] <= item[:, None], axis=1), slots - 1)
    tile = jnp.clip(first[slot] + item - before[slot], 0, columns - 1)
    high = jnp.where(item < before[-1], lengths[slot] - tile * tile_tokens, 0)
    ids = jnp.where(jnp.arange(tile_pages) * page_size < high[:, None], table[slot, tile], 0)
    return Tiles(slot, ids, start[slot] - tile * tile_tokens, high, before[-1])


def read_tiles(kv_pages: Array, pages: Array) -> tuple[Array, Array]:
    """i32[N, pages] -> K and V, f32[N, Hkv, pages * page_size, D] each.

    One gather of rows that hold K and V of a head's page together, flat: XLA's CPU loop over a long last dimension
    reads twice as fast as over [page_size, D], and the indices are computed once, not once an element.
    """
    pool, kv_heads, _, page_size, size = kv_pages.shape
    rows = lax.optimization_barrier(pages[:, None] * kv_heads + jnp.arange(kv_heads)[:, None])  # [N, Hkv, pages]
    flat = kv_pages.reshape(pool * kv_heads, 2 * page_size * size)
    read = flat.at[rows].get(mode="promise_in_bounds").astype(jnp.float32)
    read = read.reshape(*rows.shape, 2, page_size, size)
    keys, values = (read[:, :, :, i].reshape(*rows.shape[:2], -1, size) for i in (0, 1))
    return keys, values


def first_carry(queries: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Maximum, sum and mixture of a softmax that has seen its sinks alone: queries [..., D] -> [...], [...], [..., D].

    Made from the queries, so that inside `shard_map` they are known to differ from shard to shard as the queries do.
    """
    top, mixed = jnp.full_like(queries[..., 0], NEVER), jnp.zeros_like(queries)
    if sinks is None:
        return top, jnp.zeros_like(top), mixed
    return jnp.maximum(top, sinks.astype(jnp.float32)), jnp.ones_like(top), mixed
