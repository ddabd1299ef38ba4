"""Decode attention on Hopper GPUs (Pallas Mosaic GPU): pages come by TMA, both products are wgmma's.

The work is cut as in the Triton code: one warpgroup a part of a slot and KV head, and the same kernel joins a slot's
parts. The query heads of a KV head are the first rows of the 64 that a wgmma takes; the others hold whatever shared
memory held, and nothing of them leaves. A draft's rows lie behind those of the token that it follows (`hopper_rows`). A
ring of tiles is in flight: a tile's pages are two copies each, K and V, that arrive at one barrier, and two more of
their scales where they are quantised.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, places, plgpu
from pallas_kernels.paged_attention import gpu, hopper_latents
from pallas_kernels.paged_attention.gpu import LOG2_E, NEVER, Blocks, Rule, blocks_of
from pallas_kernels.paged_attention.hopper_rows import Walk, rows_of, side_by_side, visible_rows
from pallas_kernels.paged_attention.hopper_tiles import Held, Rooms
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.tuning import MOSAIC, tuned


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages) -> Blocks:
    """The tuned choice, or parts as for Triton, of the least tiles: three of a head of 128 are 96 KiB."""
    found = tuned("paged_attention", q, kv_pages)
    if found.get(MOSAIC):
        return blocks_of(found)
    parts = gpu.choose_blocks(q, kv_pages, ((0, q.shape[2]),))
    return parts._replace(tile=TILE, warps=4, stages=3)


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """As `pallas_kernels.paged_attention`, of what `mosaic.fits_widened` or `mosaic.fits_latents`. interpret: the
    interpreter's parameters."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    if args.value_size is not None:
        return hopper_latents.paged_attention(args, blocks=blocks, interpret=interpret)
    interpret = interpret or None
    (slots, heads, size), times = (page_table.shape[0], *q.shape[1:]), q.shape[0] // page_table.shape[0]
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    held, kind = Held.of(kv_pages), stored(kv_pages).dtype.name if isinstance(kv_pages, QuantizedPages) else None
    a_row_each: Any = jax.ShapeDtypeStruct((slots, heads, size), q.dtype)
    blocks = blocks or choose_blocks(a_row_each, kv_pages)
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    groups = heads // kv_heads
    if times * groups > ROWS:
        page_table, slots, times = jnp.repeat(page_table, times, axis=0), q.shape[0], 1
    rows = rows_of(times * groups)
    told = visible_rows(lengths, times, groups, args.window, blocks)
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    sums = shape((slots * parts * kv_heads * rows,), jnp.float32)
    rule = Rule(args.scale, args.window, args.soft_cap, ((0, size),), None)
    top, total, mixed = plgpu.kernel(
        partial(attend_part, blocks=blocks, rule=rule, page_size=page_size, chip=mosaic.chip_of(interpret), kind=kind),
        out_type=(sums, sums, shape((sums.shape[0], size), jnp.float32)),
        grid=(slots, kv_heads, parts),
        grid_names=("slots", "heads", "parts"),
        scratch_types=scratch(blocks, page_size, size, codes=kind is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(side_by_side(q, kv_heads, times, rows).reshape(-1, size), page_table, lengths, told, *held.refs)
    found = mosaic.varying_as(q, top), mosaic.varying_as(q, total), mosaic.varying_as(q, mixed)
    partials = [each.reshape(slots, parts, kv_heads * rows, *each.shape[1:]) for each in found]
    return gpu.joined(
        partials, lengths, sinks, q.dtype, blocks, args.window, interpret is not None, (groups, rows, times)
    )


def scratch(blocks: Blocks, page_size: int, size: int, *, codes: bool) -> list[Any]:
    """The rows of a KV head, sums, who waits for the first, and tiles of K and of V."""
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.SMEM((ROWS, size), jnp.float32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=1),
        *Rooms.scratch(blocks.stages, blocks.tile, page_size, size, codes=codes),
    ]


def attend_part(
    q_ref,
    table_ref,
    lengths_ref,
    told_ref,
    *refs,
    blocks: Blocks,
    rule: Rule,
    page_size: int,
    chip: type[Chip],
    kind: str | None,
):
    """One part of one slot, all query heads of one KV head. `refs` are the pool and its scales, what leaves, and what
    `scratch` says. kind: dtype of the pool's codes."""
    pool, refs = Held(refs[0], refs[1] if kind else None), refs[2 if kind else 1 :]
    (top_ref, total_ref, mixed_ref), (q_smem, mixed_smem, sums_smem, q_barrier, *tiles_smem) = refs[:3], refs[3:]
    rooms = Rooms(*tiles_smem)
    slot, head, part = (lax.axis_index(name) for name in ("slots", "heads", "parts"))
    kv_heads = lax.axis_size("heads")
    tile, stages, rows = blocks.tile, blocks.stages, q_ref.shape[0] // (lax.axis_size("slots") * kv_heads)
    times = lengths_ref.shape[0] // lax.axis_size("slots")
    walk = Walk.of([lengths_ref[slot * times + at] for at in range(times)], part, rule.window, blocks)
    own = ((slot * lax.axis_size("parts") + part) * kv_heads + head) * rows

    def fetch(step):
        """Starts K and V of a tile on their way; of pages past the end, those of the null page."""
        (index, _), buffer, length = walk.at(step), lax.rem(step, stages), walk.longest
        for at in range(0, tile, page_size):
            token = index * tile + at
            page = jnp.where(token < length, table_ref[slot, lax.div(jnp.minimum(token, length - 1), page_size)], 0)
            seat = buffer, at, min(page_size, tile)
            rooms.fetch(pool, page, head, lax.rem(token, page_size), seat, page_size)

    @pl.when(walk.steps > 0)
    def _():
        for ahead in range(stages - 1):
            pl.when(ahead < walk.steps)(partial(fetch, jnp.int32(ahead)))
        plgpu.copy_gmem_to_smem(
            q_ref.at[pl.ds((slot * kv_heads + head) * rows, rows)], q_smem.at[pl.ds(0, rows)], q_barrier
        )
        plgpu.barrier_wait(q_barrier)

        def step(at, carry):
            top, total, mixed = carry
            (index, run), buffer = walk.at(at), lax.rem(at, stages)
            pl.when(at + stages - 1 < walk.steps)(lambda: fetch(at + stages - 1))
            plgpu.barrier_wait(rooms.arrived.at[buffer])
            keys, values = rooms.widen(buffer, chip, e4m3=kind == "float8_e4m3fn")
            logits = rooms.scaled(chip.logits(q_smem, keys), buffer, 0, chip)
            if rule.soft_cap is None:
                logits = logits * (rule.scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
            token = places(chip, logits.shape, 1) + index * tile
            logits = jnp.where(walk.seen(token, run, told_ref.at[slot], rule.window, chip), logits, NEVER)
            higher = jnp.maximum(top, logits.max(axis=1))
            share = jnp.exp2(top - higher)
            weights = jnp.exp2(logits - per_row(higher, logits.shape))
            total = total * share + weights.sum(axis=1)

            mixed = mixed * per_row(share, mixed.shape)
            weights = rooms.scaled(weights, buffer, 1, chip)
            return higher, total, chip.mixture(mixed, weights.astype(jnp.bfloat16), values)

        of_rows = plgpu.Layout.WGMMA.reduce(1)
        top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), of_rows)
        total = chip.lay(jnp.zeros((ROWS,), jnp.float32), of_rows)
        mixed = chip.lay(jnp.zeros(mixed_smem.shape, jnp.float32), plgpu.Layout.WGMMA)
        top, total, mixed = lax.fori_loop(0, walk.steps, step, (top, total, mixed))
        mixed_smem[...] = mixed
        sums_smem[0] = top
        sums_smem[1] = total
        plgpu.commit_smem()
        leaving, kept = pl.ds(pl.multiple_of(own, BOX), rows), pl.ds(0, rows)
        plgpu.copy_smem_to_gmem(mixed_smem.at[kept], mixed_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[0, kept], top_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[1, kept], total_ref.at[leaving])
        plgpu.wait_smem_to_gmem(0)
