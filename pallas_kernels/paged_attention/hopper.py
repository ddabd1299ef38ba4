"""Decode attention on Hopper GPUs (Pallas Mosaic GPU): pages come by TMA, both products are wgmma's.

The work is cut as in the Triton code: one warpgroup a part of a slot and KV head, and the same kernel joins a slot's
parts. The query heads of a KV head are the first rows of the 64 that a wgmma takes; the others hold whatever shared
memory held, and nothing of them leaves. A ring of tiles is in flight: a tile's pages are two copies each, K and V, that
arrive at one barrier.
"""

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.gpu import LOG2_E, MOSAIC, NEVER, Blocks, Rule, blocks_of
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import tuned


def mosaic_gpu() -> Any:
    """Pallas' module; None where absl is not installed, which it needs: then Triton's code runs."""
    try:
        return import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return None


plgpu = mosaic_gpu()
ROWS = 64  # of a wgmma
TILE = 64  # tokens at least: what a wgmma sums over is a whole swizzle
BOX = 8  # rows of shared memory that a swizzle turns together: what is copied is a multiple
SWIZZLE_BYTES = 128


def fits(q: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Whether this code can: bf16, K and V apart, whole swizzles in a row and a page, few enough heads.

    Rows of 256 would need 24 bytes more of shared memory than a block may have.
    """
    if (
        plgpu is None
        or isinstance(kv_pages, QuantizedPages)
        or kv_pages.dtype != jnp.bfloat16
        or q.dtype != jnp.bfloat16
    ):
        return False
    _, kv_heads, parts, page_size, size = kv_pages.shape
    whole = size % (SWIZZLE_BYTES // 2) == 0 and size <= 128 and page_size % BOX == 0 and page_size & page_size - 1 == 0
    return parts == 2 and whole and q.shape[1] // kv_heads <= ROWS


def choose_blocks(q: Array, kv_pages: Array) -> Blocks:
    """The tuned choice, or parts as for Triton, of the least tiles: three of a head of 128 are 96 KiB."""
    found = tuned("paged_attention", q, kv_pages)
    if found.get(MOSAIC):
        return blocks_of(found)
    parts = gpu.choose_blocks(q, kv_pages, ((0, q.shape[2]),))
    return parts._replace(tile=TILE, warps=4, stages=3)


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "value_size", "blocks", "interpret"))
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
    value_size: int | None = None,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """As `pallas_kernels.paged_attention`, of what `fits`. interpret: parameters of Mosaic GPU's interpreter."""
    assert value_size is None, value_size
    interpret = interpret or None
    slots, heads, size = q.shape
    _, kv_heads, _, page_size, _ = kv_pages.shape
    blocks = blocks or choose_blocks(q, kv_pages)
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    groups = heads // kv_heads
    rows = pl.cdiv(groups, BOX) * BOX
    queries = jnp.pad(q.reshape(slots, kv_heads, groups, size), ((0, 0), (0, 0), (0, rows - groups), (0, 0)))
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    per_row = shape((slots * parts * kv_heads * rows,), jnp.float32)
    rule = Rule(scale, window, soft_cap, ((0, size),), None)
    top, total, mixed = plgpu.kernel(
        partial(
            attend_part, blocks=blocks, rule=rule, page_size=page_size, chip=Chip if interpret is None else Interpreted
        ),
        out_type=(per_row, per_row, shape((per_row.shape[0], size), jnp.float32)),
        grid=(slots, kv_heads, parts),
        grid_names=("slots", "heads", "parts"),
        scratch_types=scratch(blocks, page_size, size),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(queries.reshape(-1, size), kv_pages.reshape(-1, size), page_table, lengths)
    found = varying_as(q, top), varying_as(q, total), varying_as(q, mixed)
    partials = [each.reshape(slots, parts, kv_heads * rows, *each.shape[1:]) for each in found]
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, groups), ((0, 0), (0, rows - groups))).reshape(-1)
    out = gpu.joined(partials, lengths, sinks, q.dtype, blocks, window, interpret=interpret is not None)
    return out.reshape(slots, kv_heads, rows, size)[:, :, :groups].reshape(slots, heads, size)


def scratch(blocks: Blocks, page_size: int, size: int) -> list[Any]:
    """The rows of a KV head, tiles of K and of V, sums, and who waits for what of them."""
    turned = plgpu.TilingTransform((BOX, SWIZZLE_BYTES // 2)), plgpu.SwizzleTransform(SWIZZLE_BYTES)
    tiles = plgpu.SMEM((blocks.stages, blocks.tile, size), jnp.bfloat16, transforms=turned)
    copies = 2 * max(1, blocks.tile // page_size)
    return [
        plgpu.SMEM((ROWS, size), jnp.bfloat16, transforms=turned),
        tiles,
        tiles,
        plgpu.SMEM((ROWS, size), jnp.float32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
    ]


def varying_as(like: Array, array: Array) -> Array:
    """Within a `shard_map` a kernel of Mosaic GPU does not say that its results are each shard's own."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array


class Chip:
    """The products as a Hopper takes them."""

    @staticmethod
    def lay(array: Array, layout: Any) -> Array:
        return plgpu.layout_cast(array, layout)

    @staticmethod
    def logits(queries: Any, keys: Any) -> Array:
        """[rows, D] by [tokens, D], both in shared memory."""

        def multiply(sums):
            plgpu.wgmma(sums, queries, plgpu.transpose_ref(keys, (1, 0)))
            return sums[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((queries.shape[0], keys.shape[0]), jnp.float32))

    @staticmethod
    def mixture(weights: Array, values: Any) -> Array:
        """[rows, tokens] in registers by [tokens, D] in shared memory."""

        def multiply(sums):
            plgpu.wgmma(sums, weights, values)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((weights.shape[0], values.shape[1]), jnp.float32))


class Interpreted(Chip):
    """The same for the interpreter of jax 0.10, which knows neither layouts nor turned operands."""

    @staticmethod
    def lay(array: Array, layout: Any) -> Array:
        return array

    @staticmethod
    def logits(queries: Any, keys: Any) -> Array:
        return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)

    @staticmethod
    def mixture(weights: Array, values: Any) -> Array:
        return jnp.dot(weights, values[...], preferred_element_type=jnp.float32)


def attend_part(
    q_ref,
    pool,
    table_ref,
    lengths_ref,
    top_ref,
    total_ref,
    mixed_ref,
    q_smem,
    k_smem,
    v_smem,
    mixed_smem,
    sums_smem,
    q_barrier,
    barriers,
    *,
    blocks: Blocks,
    rule: Rule,
    page_size: int,
    chip: type[Chip] | type[Interpreted],
):
    """One part of one slot, all query heads of one KV head."""
    slot, head, part = (lax.axis_index(name) for name in ("slots", "heads", "parts"))
    kv_heads = lax.axis_size("heads")
    tile, stages, rows = blocks.tile, blocks.stages, q_ref.shape[0] // (lax.axis_size("slots") * kv_heads)
    length = lengths_ref[slot]
    start, first, tiles, parts = gpu.cut(length, rule.window, blocks)
    first = first + part * tiles
    stop = jnp.minimum(first + tiles, pl.cdiv(length, tile))
    own = ((slot * lax.axis_size("parts") + part) * kv_heads + head) * rows

    def fetch(index):
        """Starts K and V of a tile on their way; of pages past the end, those of the null page."""
        buffer = lax.rem(index - first, stages)
        for at in range(0, tile, page_size):
            token = index * tile + at
            page = jnp.where(token < length, table_ref[slot, lax.div(jnp.minimum(token, length - 1), page_size)], 0)
            row = (page * kv_heads + head) * 2 * page_size + lax.rem(token, page_size)
            size = min(page_size, tile)
            for room, place in ((k_smem, row), (v_smem, row + page_size)):
                held = pool.at[pl.ds(pl.multiple_of(place, BOX), size)]
                plgpu.copy_gmem_to_smem(held, room.at[buffer, pl.ds(at, size)], barriers.at[buffer])

    @pl.when(part < parts)
    def _():
        for ahead in range(stages - 1):
            pl.when(first + ahead < stop)(partial(fetch, first + ahead))
        plgpu.copy_gmem_to_smem(
            q_ref.at[pl.ds((slot * kv_heads + head) * rows, rows)], q_smem.at[pl.ds(0, rows)], q_barrier
        )
        plgpu.barrier_wait(q_barrier)

        def step(index, carry):
            top, total, mixed = carry
            buffer = lax.rem(index - first, stages)
            pl.when(index + stages - 1 < stop)(lambda: fetch(index + stages - 1))
            plgpu.barrier_wait(barriers.at[buffer])

            logits = chip.logits(q_smem, k_smem.at[buffer])
            if rule.soft_cap is None:
                logits = logits * (rule.scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
            token = chip.lay(lax.broadcasted_iota(jnp.int32, logits.shape, 1), plgpu.Layout.WGMMA) + index * tile
            logits = jnp.where((token < length) & (token >= start), logits, NEVER)
            higher = jnp.maximum(top, logits.max(axis=1))
            share = jnp.exp2(top - higher)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(higher, logits.shape, [0]))
            total = total * share + weights.sum(axis=1)

            more = chip.mixture(weights.astype(jnp.bfloat16), v_smem.at[buffer])
            return higher, total, mixed * lax.broadcast_in_dim(share, mixed.shape, [0]) + more

        per_row = plgpu.Layout.WGMMA.reduce(1)
        top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), per_row)
        total = chip.lay(jnp.zeros((ROWS,), jnp.float32), per_row)
        mixed = chip.lay(jnp.zeros(mixed_smem.shape, jnp.float32), plgpu.Layout.WGMMA)
        top, total, mixed = lax.fori_loop(first, stop, step, (top, total, mixed))
        mixed_smem[...] = mixed
        sums_smem[0] = top
        sums_smem[1] = total
        plgpu.commit_smem()
        leaving, kept = pl.ds(pl.multiple_of(own, BOX), rows), pl.ds(0, rows)
        plgpu.copy_smem_to_gmem(mixed_smem.at[kept], mixed_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[0, kept], top_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[1, kept], total_ref.at[leaving])
        plgpu.wait_smem_to_gmem(0)
