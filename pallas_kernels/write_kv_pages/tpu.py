"""Writes KV on a TPU (Mosaic): the groups of tokens that change are read, changed and written back by DMA, in place.

The last two dimensions of the pool are tiled, so a DMA cannot access one token alone: the smallest unit is a group, the
tokens of one tile row of a page; for scales it is a page's. Rows are sorted by token index first. The rows of a group
are then adjacent, a block of rows reads each group once, and no two groups in flight are the same. Rows for the null
page are never moved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized import QuantizedPages, quantize_rows, stored
from pallas_kernels.tpu_blocks import LANES, pool_specs
from pallas_kernels.write_kv_pages.xla import joined

TILE_BYTES = 32  # bytes of one column of a tile: 8 rows of f32, 16 of bf16, 32 of int8
BLOCK_ROWS = 128  # rows changed before the next block's reads start
BLOCK_BYTES = 4 << 20  # groups in VMEM at once, a quarter of the lowest default limit
NOWHERE = jnp.iinfo(jnp.int32).max


@partial(jax.jit, static_argnames=("block_rows", "interpret"))
def write_kv_pages(
    kv_pages: Array | QuantizedPages,
    k: Array,
    v: Array | None,
    page_ids: Array,
    offsets: Array,
    *,
    block_rows: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array | QuantizedPages:
    """Computes `pallas_kernels.write_kv_pages`; page 0 is not changed."""
    pool = stored(kv_pages)
    _, kv_heads, parts, page_size, size = pool.shape
    group = group_tokens(page_size, pool.dtype)
    group_bytes = kv_heads * parts * group * -(-size // LANES) * LANES * pool.dtype.itemsize
    block = block_rows or rows_of_block(k.shape[0], group_bytes)
    place = jnp.where(page_ids == 0, NOWHERE, page_ids * page_size + offsets)
    order = jnp.argsort(place)
    padding = -place.shape[0] % block
    place = jnp.pad(place[order], (0, padding), constant_values=NOWHERE)
    rows = jax.tree.map(lambda part: padded(part[order], padding), stored_rows(kv_pages, k, v))
    leaders = list_leaders(place // group, block), list_leaders(place // page_size, block)
    prefetch = place, *leaders, jnp.sum(place != NOWHERE, keepdims=True, dtype=jnp.int32)
    out: Any = pl.pallas_call(
        partial(amend_block, page_size=page_size),
        out_shape=jax.tree.map(same_shape, kv_pages),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(place.shape[0] // block,),
            in_specs=[jax.tree.map(partial(block_of_rows, block), rows), pool_specs(kv_pages)],
            out_specs=pool_specs(kv_pages),
            scratch_shapes=[groups_scratch(kv_pages, block, group), pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases=aliases(len(prefetch), len(jax.tree.leaves(kv_pages))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_kv_pages",
    )(*prefetch, rows, kv_pages)
    return out


def stored_rows(kv_pages: Array | QuantizedPages, k: Array, v: Array | None) -> Array | QuantizedPages:
    """Returns K and V as the pool stores them: [T, Hkv * C, D], and scales f32[T, Hkv, C]."""
    rows = joined(k, v)
    flat = (rows.shape[0], -1, rows.shape[3])
    if not isinstance(kv_pages, QuantizedPages):
        return rows.astype(kv_pages.dtype).reshape(flat)
    values, scales = quantize_rows(rows, kv_pages.values.dtype)
    return QuantizedPages(values.reshape(flat), scales)


def padded(rows: Array, padding: int) -> Array:
    return jnp.pad(rows, ((0, padding), (0, 0), (0, 0)))


def same_shape(pool: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(pool.shape, pool.dtype, manual_axis_type=jax.typeof(pool).manual_axis_type)


def block_of_rows(block: int, rows: Array) -> pl.BlockSpec:
    return pl.BlockSpec((block, *rows.shape[1:]), lambda i, *_: (i, 0, 0))


def groups_scratch(kv_pages: Array | QuantizedPages, block: int, group: int) -> Any:
    """Returns scratch for one group per row, and for one page's scales per row."""
    _, kv_heads, parts, _, size = stored(kv_pages).shape
    values: Any = pltpu.VMEM((block, kv_heads, parts, group, size), stored(kv_pages).dtype)
    if not isinstance(kv_pages, QuantizedPages):
        return values
    scales: Any = pltpu.VMEM((block, *kv_pages.scales.shape[1:]), kv_pages.scales.dtype)
    return QuantizedPages(values, scales)


def aliases(num_prefetch: int, leaves: int) -> dict[int, int]:
    """Returns the aliases: arguments are the prefetched, the leaves of the rows, then those of the pool; results are
    the pool's leaves."""
    return {num_prefetch + leaves + leaf: leaf for leaf in range(leaves)}


def group_tokens(page_size: int, dtype: jnp.dtype) -> int:
    """Returns the tokens that a DMA may move alone: those of a tile row, or the page if tiles do not divide it."""
    tile = TILE_BYTES // dtype.itemsize
    return tile if page_size % tile == 0 else page_size


def rows_of_block(rows: int, group_bytes: int) -> int:
    """Returns the rows per block: each may need a group of its own in VMEM."""
    return max(1, min(rows, BLOCK_ROWS, BLOCK_BYTES // group_bytes))


def list_leaders(group: Array, block: int) -> Array:
    """Returns for each row of sorted `group` i32[N] the first row of its block with its group, counted from the block's
    first."""
    row = jnp.arange(group.shape[0], dtype=jnp.int32) % block
    fresh = (row == 0) | (group != jnp.roll(group, 1))
    return lax.cummax(jnp.where(fresh, row, 0).reshape(-1, block), axis=1).reshape(-1)


def amend_block(place_ref, group_leader_ref, page_leader_ref, total_ref, rows, _, *refs, page_size: int):
    """Writes one block of rows, all its groups at once: read, change, write. The last `refs`: the pool, written and
    read."""
    *results, groups, semaphore = refs
    pool = QuantizedPages(*results) if isinstance(groups, QuantizedPages) else results[0]
    block, group = stored(groups).shape[:4:3]
    start = pl.program_id(0) * block
    real = jnp.clip(total_ref[0] - start, 0, block)

    def group_copy(row, back):
        place = place_ref[start + row]
        token = pl.multiple_of(place % page_size // group * group, group)
        held = stored(pool).at[place // page_size, :, :, pl.ds(token, group)]
        return copy(held, stored(groups).at[row], back)

    def scales_copy(row, back):
        return copy(pool.scales.at[place_ref[start + row] // page_size], groups.scales.at[row], back)

    def copy(held, room, back):
        return pltpu.make_async_copy(*((room, held) if back else (held, room)), semaphore)

    def of_each_group(act: Callable[[Any], None], back: bool):
        @pl.loop(0, real)
        def _(row: Any):
            pl.when(group_leader_ref[start + row] == row)(lambda: act(group_copy(row, back)))
            if isinstance(pool, QuantizedPages):
                pl.when(page_leader_ref[start + row] == row)(lambda: act(scales_copy(row, back)))

    def move(back):
        of_each_group(lambda copy: copy.start(), back)
        of_each_group(lambda copy: copy.wait(), back)

    move(back=False)

    @pl.loop(0, real)
    def _(row):
        place = place_ref[start + row]
        amend_group(stored(groups), group_leader_ref[start + row], stored(rows)[row], place % group)
        if isinstance(groups, QuantizedPages):
            amend_scales(groups.scales, page_leader_ref[start + row], rows.scales[row], place % page_size, page_size)

    move(back=True)


def amend_group(groups, leader, row, token):
    """Writes `row` [Hkv * C, D] to token `token` of group `leader`."""
    _, kv_heads, parts, group, size = groups.shape
    mine = lax.broadcasted_iota(jnp.int32, (kv_heads * parts, group, size), 1) == token
    old = groups[leader].astype(jnp.float32).reshape(kv_heads * parts, group, size)
    new = jnp.where(mine, row.astype(jnp.float32)[:, None, :], old)
    groups[leader] = new.reshape(kv_heads, parts, group, size).astype(groups.dtype)


def amend_scales(scales, leader, row, token, page_size: int):
    """Writes `row` f32[Hkv, C] to the scales of token `token` of page `leader`."""
    lane = lax.broadcasted_iota(jnp.int32, scales.shape[1:], 1)
    amended = scales[leader]
    for part in range(row.shape[1]):
        amended = jnp.where(lane == token + part * page_size, row[:, part : part + 1], amended)
    scales[leader] = amended
