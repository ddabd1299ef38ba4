"""Writing KV on a TPU (Mosaic): the groups of tokens that change are read, amended and written back by DMA, in place.

The last two dimensions of the pool are tiled, so a DMA cannot touch one token alone: the least it moves is a *group*,
the tokens of one tile row of a page. Rows are sorted by place first; then the rows of a group lie next to each other,
a block of rows reads each group once, and no two groups in flight are the same. Rows for the null page are never moved.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.write_kv_pages import xla

TILE_BYTES = 32  # of one column of a tile: 8 rows of f32, 16 of bf16
LANES = 128
BLOCK_ROWS = 128  # rows amended before the next block's reads start
BLOCK_BYTES = 4 << 20  # of groups in VMEM at once, a quarter of the least default limit
NOWHERE = jnp.iinfo(jnp.int32).max


@partial(jax.jit, static_argnames=("block_rows", "interpret"))
def write_kv_pages(
    kv_pages: Array | QuantizedPages,
    k: Array,
    v: Array,
    page_ids: Array,
    offsets: Array,
    *,
    block_rows: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array | QuantizedPages:
    """As `pallas_kernels.write_kv_pages`; page 0 stays as it is."""
    if isinstance(kv_pages, QuantizedPages):
        return xla.write_kv_pages(kv_pages, k, v, page_ids, offsets)
    _, kv_heads, _, page_size, size = kv_pages.shape
    group = group_tokens(page_size, kv_pages.dtype)
    group_bytes = kv_heads * 2 * group * -(-size // LANES) * LANES * kv_pages.dtype.itemsize
    block = block_rows or rows_of_block(k.shape[0], group_bytes)
    place = jnp.where(page_ids == 0, NOWHERE, page_ids * page_size + offsets)
    order = jnp.argsort(place)
    rows = jnp.stack([k, v], axis=2).astype(kv_pages.dtype)[order].reshape(-1, kv_heads * 2, size)
    padding = -rows.shape[0] % block
    rows = jnp.pad(rows, ((0, padding), (0, 0), (0, 0)))
    place = jnp.pad(place[order], (0, padding), constant_values=NOWHERE)
    prefetch = place, list_leaders(place // group, block), jnp.sum(place != NOWHERE, keepdims=True, dtype=jnp.int32)
    return pl.pallas_call(
        partial(amend_block, page_size=page_size),
        out_shape=jax.ShapeDtypeStruct(
            kv_pages.shape, kv_pages.dtype, manual_axis_type=jax.typeof(kv_pages).manual_axis_type
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(rows.shape[0] // block,),
            in_specs=[
                pl.BlockSpec((block, kv_heads * 2, size), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((block, kv_heads, 2, group, size), kv_pages.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={len(prefetch) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_kv_pages",
    )(*prefetch, rows, kv_pages)


def group_tokens(page_size: int, dtype: jnp.dtype) -> int:
    """Tokens that a DMA may move alone: those of a tile row, or the page where tiles do not divide it."""
    tile = TILE_BYTES // dtype.itemsize
    return tile if page_size % tile == 0 else page_size


def rows_of_block(rows: int, group_bytes: int) -> int:
    """Rows of a block: each may need a group of its own in VMEM."""
    return max(1, min(rows, BLOCK_ROWS, BLOCK_BYTES // group_bytes))


def list_leaders(group: Array, block: int) -> Array:
    """For each row of sorted `group` i32[N], the first row of its block with its group, counted from the block's."""
    row = jnp.arange(group.shape[0], dtype=jnp.int32) % block
    fresh = (row == 0) | (group != jnp.roll(group, 1))
    return lax.cummax(jnp.where(fresh, row, 0).reshape(-1, block), axis=1).reshape(-1)


def amend_block(place_ref, leader_ref, total_ref, rows_ref, _, pool_ref, groups_ref, semaphore, *, page_size: int):
    """One block of rows, all its groups at once: read, amend, write. `pool_ref` is the pool read and written."""
    block, kv_heads, _, group, size = groups_ref.shape
    start = pl.program_id(0) * block
    rows = jnp.clip(total_ref[0] - start, 0, block)

    def held(row):
        place = place_ref[start + row]
        token = pl.multiple_of(place % page_size // group * group, group)
        return pool_ref.at[place // page_size, :, :, pl.ds(token, group)]

    def read(row):
        return pltpu.make_async_copy(held(row), groups_ref.at[row], semaphore)

    def write(row):
        return pltpu.make_async_copy(groups_ref.at[row], held(row), semaphore)

    def of_each_group(act):
        @pl.loop(0, rows)
        def _(row):
            pl.when(leader_ref[start + row] == row)(lambda: act(row))

    of_each_group(lambda row: read(row).start())
    of_each_group(lambda row: read(row).wait())

    @pl.loop(0, rows)
    def _(row):
        leader = leader_ref[start + row]
        token = lax.broadcasted_iota(jnp.int32, (kv_heads * 2, group, size), 1)
        mine = token == place_ref[start + row] % group
        old = groups_ref[leader].astype(jnp.float32).reshape(kv_heads * 2, group, size)
        new = jnp.where(mine, rows_ref[row].astype(jnp.float32)[:, None, :], old)
        groups_ref[leader] = new.reshape(kv_heads, 2, group, size).astype(groups_ref.dtype)

    of_each_group(lambda row: write(row).start())
    of_each_group(lambda row: write(row).wait())
