"""Decode attention for XLA, written for the CPU: a list of tiles that hold tokens, read a few at a time.

A tile is a few pages of one slot. The tiles of all slots that hold visible tokens make one list. A loop with a dynamic
bound gathers a few of them into a buffer the size of a core's cache and computes both products there. Each tile's
softmax is then joined with its slot's others (Flash-Decoding, Dao et al. 2023). Time therefore follows the tokens held,
not the table's width or the longest slot, and the context is never copied.

For 8 slots of 512 tokens, 8/4 heads of 64, f32, a layer takes 1.8 to 2.7 times the processor time of copying its pages,
at 2,048 tokens 1.6 (`benchmarks/kernels.py`, several runs on a busy machine). Pages must hold finite numbers, past a
slot's length too: a masked weight is 0, and 0 * NaN is not.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.quantized import QuantizedPages, stored

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
TILE_TOKENS = 128
STEP_BYTES = 1 << 20  # K and V in f32: a step's gather stays in a core's second-level cache
MAX_TILES_A_STEP = 1


class TileTable(NamedTuple):
    """The tiles with visible tokens, slot after slot; N is the most that the whole table could have, in whole steps."""

    slot: Array  # i32[N]
    pages: Array  # i32[N, pages of a tile]
    low: Array  # i32[N], first visible token, counted from the tile's start; may be negative
    high: Array  # i32[N], the token after the last visible one; may be past the tile
    total: Array  # i32[], how many of the N are real
    first: Array  # i32[B], index of each slot's first tile in the list
    held: Array  # i32[B], number of each slot's tiles


class TileResults(NamedTuple):
    """The softmax of each tile of the list."""

    top: Array  # f32[N, Hkv, G], the largest logit
    total: Array  # f32[N, Hkv, G], the sum of weights exp(logit - top)
    mixed: Array  # f32[N, Hkv, G, D], the weighted sum of values


def paged_attention(
    args: PagedAttentionArgs,
) -> Array:
    """Computes `pallas_kernels.paged_attention`, see there."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    slots, heads, size = q.shape
    _, kv_heads, parts, page_size, _ = stored(kv_pages).shape
    tile_pages, width = tile_shape(kv_heads * parts, page_size, size, page_table.shape)
    tiles = list_tiles(page_table, lengths, page_size=page_size, tile_pages=tile_pages, width=width, window=args.window)
    grouped = (q.astype(jnp.float32) * args.scale).reshape(slots, kv_heads, heads // kv_heads, size)
    position = jnp.arange(tile_pages * page_size)[None, :]

    def step(index: Array, old: TileResults) -> TileResults:
        slot, pages, low, high = (lax.dynamic_slice_in_dim(part, index * width, width) for part in tiles[:4])
        keys, values = read_tiles(kv_pages, pages)
        logits = scores(grouped[slot], keys)
        logits = logits if args.soft_cap is None else args.soft_cap * jnp.tanh(logits / args.soft_cap)
        seen = ((position < high[:, None]) & (position >= low[:, None]))[:, None, None]
        top = jnp.max(jnp.where(seen, logits, NEVER), axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - top[..., None]), 0.0)
        mixed = jnp.einsum("nhgs,nhsd->nhgd", weights, values)
        new = TileResults(top, jnp.sum(weights, axis=-1), mixed)
        write = lax.dynamic_update_slice_in_dim
        return TileResults(*(write(whole, part, index * width, axis=0) for whole, part in zip(old, new, strict=True)))

    empty = jnp.broadcast_to(grouped[:1], (tiles.slot.shape[0], *grouped.shape[1:]))
    partials = TileResults(jnp.full_like(empty[..., 0], NEVER), jnp.zeros_like(empty[..., 0]), jnp.zeros_like(empty))
    partials = lax.fori_loop(0, -(-tiles.total // width), step, partials)
    mixed = merged(partials, tiles, grouped, None if sinks is None else sinks.reshape(kv_heads, -1))
    return mixed.reshape(q.shape)[..., : args.value_size].astype(q.dtype)


def scores(queries: Array, keys: Array) -> Array:
    """Multiplies [N, Hkv, G, D] by [N, Hkv, S, D] to [N, Hkv, G, S], K as the left operand. XLA's CPU products pack the
    right operand at every call, and K is the larger one; the barriers keep the order."""
    turned = lax.optimization_barrier(jnp.swapaxes(queries, 2, 3))
    return jnp.swapaxes(lax.optimization_barrier(jnp.einsum("nhsd,nhdg->nhsg", keys, turned)), 2, 3)


def merged(parts: TileResults, tiles: TileTable, grouped: Array, sinks: Array | None) -> Array:
    """Joins each slot's tiles in their own order, [B, Hkv, G, D]. A slot's result must not depend on other slots, to
    the last bit: a sample with a seed is the same in any batch. So tiles are summed in their order in the slot, one
    after another, and not by the step in which they were read."""

    def join(column: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        own = column < tiles.held
        item, own = jnp.where(own, tiles.first + column, 0), own[:, None, None]
        higher = jnp.where(own, jnp.maximum(top, parts.top[item]), top)
        share, keep = jnp.where(own, jnp.exp(parts.top[item] - higher), 0.0), jnp.exp(top - higher)
        total = total * keep + parts.total[item] * share
        return higher, total, mixed * keep[..., None] + parts.mixed[item] * share[..., None]

    _, total, mixed = lax.fori_loop(0, jnp.max(tiles.held), join, first_carry(grouped, sinks))
    return mixed / jnp.where(total > 0, total, 1.0)[..., None]


def tile_shape(rows: int, page_size: int, size: int, table: tuple[int, ...]) -> tuple[int, int]:
    """Returns the pages of a tile and the tiles of a step, at most those that the table [rows, W] can use; rows: of a
    token's K, V."""
    tile_pages = min(max(1, TILE_TOKENS // page_size), table[1])
    tile_bytes = tile_pages * page_size * rows * size * 4
    most = table[0] * -(-table[1] // tile_pages)
    return tile_pages, max(1, min(STEP_BYTES // tile_bytes, MAX_TILES_A_STEP, most))


def list_tiles(
    page_table: Array, lengths: Array, *, page_size: int, tile_pages: int, width: int, window: int | None
) -> TileTable:
    """Returns the tiles of one call. It reads no KV, so XLA computes it once for all layers of a program."""
    slots, pages = page_table.shape
    columns, tile_tokens = -(-pages // tile_pages), tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, columns * tile_pages - pages))).reshape(slots, columns, tile_pages)
    start = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first = start // tile_tokens
    before = jnp.cumulative_sum(-(-lengths // tile_tokens) - first, include_initial=True)
    item = jnp.arange(-(-slots * columns // width) * width)
    slot = jnp.minimum(jnp.sum(before[None, 1:] <= item[:, None], axis=1), slots - 1)
    tile = jnp.clip(first[slot] + item - before[slot], 0, columns - 1)
    high = jnp.where(item < before[-1], lengths[slot] - tile * tile_tokens, 0)
    ids = jnp.where(jnp.arange(tile_pages)[None, :] * page_size < high[:, None], table[slot, tile], 0)
    low = start[slot] - tile * tile_tokens
    return TileTable(slot, ids, low, high, before[-1], before[:-1], before[1:] - before[:-1])


def read_tiles(kv_pages: Array | QuantizedPages, pages: Array) -> tuple[Array, Array]:
    """Gathers i32[N, pages] -> K and V, f32[N, Hkv, pages * page_size, D] each; for pages of one part K twice.

    V is then the first numbers of each row: taking the whole mixture's first numbers in the end costs an eighth more of
    a product, slicing rows costs a copy of each. Rows of a head's page are gathered flat, K and V separately, and
    reshaped only afterwards. A loop whose last dimension is as short as D is unrolled by LLVM into copies of single
    numbers. XLA would make such a loop of the gather fused with the reshape, or of slices that separate K from V. It
    fuses across everything but the end of a branch: hence the condition, which is always true.
    """
    pool, kv_heads, parts, page_size, size = stored(kv_pages).shape
    heads = jnp.arange(kv_heads)[None, :, None]
    rows = (pages[:, None] * kv_heads + heads) * parts  # [N, Hkv, pages], of K; V's are the next
    shape = (*rows.shape, page_size * size)

    def gather() -> tuple[Array, ...]:
        flat = stored(kv_pages).reshape(pool * kv_heads * parts, page_size * size)
        each = [rows + part for part in range(parts)]
        found = [flat.at[at].get(mode="promise_in_bounds").astype(jnp.float32) for at in each]
        if not isinstance(kv_pages, QuantizedPages):
            return tuple(found)
        scales = kv_pages.scales.reshape(pool * kv_heads * parts, page_size, 1)
        return tuple(scaled(numbers, scales[at]) for numbers, at in zip(found, each, strict=True))

    # Made from both arguments, so that inside `shard_map` its shards differ as those of the result do.
    nothing = jnp.zeros_like(stored(kv_pages), jnp.float32, shape) + jnp.zeros_like(pages, jnp.float32, ())
    found = lax.cond(pages[0, 0] >= 0, gather, lambda: (nothing,) * parts)
    keys, *values = (part.reshape(*rows.shape[:2], -1, size) for part in found)
    return keys, values[0] if values else keys


def scaled(rows: Array, scales: Array) -> Array:
    """Multiplies f32[..., page_size * D] by f32[..., page_size, 1], one scale per token."""
    return (rows.reshape(*scales.shape[:-1], -1) * scales).reshape(rows.shape)


def first_carry(queries: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Returns maximum, sum and mixture of a softmax over the sinks alone: queries [..., D] -> [...], [...], [..., D].
    Made from the queries, so that inside `shard_map` its shards differ as those of the queries do."""
    top, mixed = jnp.full_like(queries[..., 0], NEVER), jnp.zeros_like(queries)
    if sinks is None:
        return top, jnp.zeros_like(top), mixed
    sinks = sinks.astype(jnp.float32).reshape((1,) * (top.ndim - sinks.ndim) + sinks.shape)
    return jnp.maximum(top, sinks), jnp.ones_like(top), mixed
