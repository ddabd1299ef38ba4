"""Decode attention to latents on Hopper GPUs (Pallas Mosaic GPU).

All query heads read one row of K, whose beginning is V as well (DeepSeek-V2, section 2.1.2): heads fill the rows of a
wgmma. One block a part of a slot and 64 query heads. A third warpgroup brings tiles of latents by TMA, each once for
logits and mixture; the other two mix a half of V each, for all of it would take every register that a thread may have.
Both make all logits: of 576 numbers against 256 they are the greater part of the products, but those of both together
(by the data sheet 3,300 cycles a tile of 64 tokens) are done before the next tile is read (5,100), and neither waits
for the other.

Compiled for an H100, nothing is spilled and rows of 576 take 216 KiB of shared memory. Nothing is measured yet.
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
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.gpu import LOG2_E, MAX_PARTS, NEVER, PART_NUMBERS, Blocks, Rule, blocks_of
from pallas_kernels.paged_attention.hopper_pages import Pages, Room, bring
from pallas_kernels.paged_attention.hopper_rows import Walk, rows_of, side_by_side, visible_rows
from pallas_kernels.paged_attention.hopper_tiles import Held
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import MOSAIC, tuned

HALVES = 2  # of V: warpgroups that multiply
REGISTERS, FEW_REGISTERS = 232, 40  # a thread, of those that multiply and of those that bring pages
BLOCKS = 4 * 132  # of a call: four for each core of an H100, which has room for one at a time
STAGES = 2  # tiles in flight


def choose_blocks(q: Array, kv_pages: Array, value_size: int) -> Blocks:
    """The tuned choice, or enough parts for every core, of four tiles at least."""
    found = tuned("paged_attention", q, kv_pages)
    if found.get(MOSAIC):
        return blocks_of(found)
    kv_heads = kv_pages.shape[1]
    across = max(1, q.shape[0] * kv_heads * pl.cdiv(q.shape[1] // kv_heads, ROWS))
    parts = max(1, min(MAX_PARTS, BLOCKS // across, PART_NUMBERS // (across * ROWS * value_size)))
    return Blocks(parts, 4, TILE, warps=4, stages=STAGES)


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """As `pallas_kernels.paged_attention`, of what `mosaic.fits_latents`. interpret: parameters of the interpreter."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    value_size = args.value_size
    assert value_size is not None and not isinstance(kv_pages, QuantizedPages)
    (slots, heads, size), times = (page_table.shape[0], *q.shape[1:]), q.shape[0] // page_table.shape[0]
    _, kv_heads, _, page_size, _ = kv_pages.shape
    a_row_each: Any = jax.ShapeDtypeStruct((slots, heads, size), q.dtype)
    blocks = blocks or choose_blocks(a_row_each, kv_pages, value_size)
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    groups = heads // kv_heads
    if times * groups > ROWS:
        page_table, slots, times = jnp.repeat(page_table, times, axis=0), q.shape[0], 1
    rows = rows_of(times * groups)
    row_blocks = pl.cdiv(rows, ROWS)
    told = visible_rows(lengths, times, groups, args.window, blocks)
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    sums = shape((slots * parts * kv_heads * row_blocks, ROWS), jnp.float32)
    rule = Rule(args.scale, args.window, args.soft_cap, ((0, value_size),), None)
    found = plgpu.kernel(
        partial(
            attend_part,
            blocks=blocks,
            rule=rule,
            page_size=page_size,
            rows=min(rows, ROWS),
            chip=mosaic.chip_of(interpret),
        ),
        out_type=(sums, sums, shape((*sums.shape, value_size), jnp.float32)),
        grid=(slots, kv_heads, row_blocks, parts),
        grid_names=("slots", "heads", "row_blocks", "parts"),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=scratch(blocks, page_size, size),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(side_by_side(q, kv_heads, times, rows).reshape(-1, size), page_table, lengths, told, Held.of(kv_pages).numbers)
    partials = [
        mosaic.varying_as(q, each).reshape(slots, parts, kv_heads * row_blocks * ROWS, *each.shape[2:])
        for each in found
    ]
    padded = groups, row_blocks * ROWS, times
    return gpu.joined(partials, lengths, sinks, q.dtype, blocks, args.window, bool(interpret), padded)


def scratch(blocks: Blocks, page_size: int, size: int) -> list[Any]:
    """Rows of queries, who waits for them, and a ring of tiles."""
    copies = max(1, blocks.tile // page_size)
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.Barrier(num_arrivals=1),
        mosaic.swizzled(blocks.stages, blocks.tile, size),
        plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
        plgpu.Barrier(num_arrivals=HALVES, num_barriers=blocks.stages),
    ]


def attend_part(
    q_ref,
    table_ref,
    lengths_ref,
    told_ref,
    pool_ref,
    top_ref,
    total_ref,
    mixed_ref,
    q_smem,
    q_barrier,
    *ring,
    blocks: Blocks,
    rule: Rule,
    page_size: int,
    rows: int,
    chip: type[Chip],
):
    """One part of one slot, up to 64 query heads of one KV head."""
    names = "slots", "heads", "row_blocks", "parts", "warpgroup"
    slot, head, row_block, part, warpgroup = map(lax.axis_index, names)
    kv_heads, row_blocks = lax.axis_size("heads"), lax.axis_size("row_blocks")
    room, times = Room(*ring), lengths_ref.shape[0] // lax.axis_size("slots")
    walk = Walk.of([lengths_ref[slot * times + at] for at in range(times)], part, rule.window, blocks)

    @pl.when((warpgroup == HALVES) & (walk.steps > 0))
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        mine = (slot * kv_heads + head) * row_blocks + row_block
        held = q_ref.at[pl.ds(pl.multiple_of(mine * rows, BOX), rows)]
        plgpu.copy_gmem_to_smem(held, q_smem.at[pl.ds(0, rows)], q_barrier)
        place = Pages(Held(pool_ref, None), table_ref, slot, head, walk.longest, page_size, kv_heads, parts=1)
        bring(place, walk.steps, lambda step: walk.at(step)[0], [room], chip, e4m3=False)

    @pl.when((warpgroup < HALVES) & (walk.steps > 0))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        plgpu.barrier_wait(q_barrier)
        own = ((slot * lax.axis_size("parts") + part) * kv_heads + head) * row_blocks + row_block
        half = mixed_ref.shape[2] // HALVES
        top, total, mixed = mix_half(q_smem, room, (walk, told_ref.at[slot]), (warpgroup, half), rule, chip)
        mixed_ref.at[own, :, pl.ds(warpgroup * half, half)][...] = mixed

        @pl.when(warpgroup == 0)
        def _():
            top_ref.at[own][...] = top
            total_ref.at[own][...] = total


def mix_half(queries, room: Room, rows, mine, rule: Rule, chip: type[Chip]):
    """The greatest logit and total of the rows after all tiles, and of their mixture the numbers of this warpgroup's
    half."""
    (walk, told), (warpgroup, half) = rows, mine
    stages, tile, _ = room.numbers.shape

    def step(at, carry):
        top, total, mixed = carry
        (index, run), buffer = walk.at(at), lax.rem(at, stages)
        plgpu.barrier_wait(room.arrived.at[buffer])
        logits = chip.logits(queries, room.numbers.at[buffer])
        if rule.soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
        token = places(chip, logits.shape, 1) + index * tile
        logits = jnp.where(walk.seen(token, run, told, rule.window, chip), logits, NEVER)
        higher = jnp.maximum(top, logits.max(axis=1))
        share = jnp.exp2(top - higher)
        weights = jnp.exp2(logits - per_row(higher, logits.shape))
        total = total * share + weights.sum(axis=1)
        values = room.numbers.at[buffer, :, pl.ds(pl.multiple_of(warpgroup * half, half), half)]
        mixed = chip.mixture(mixed * per_row(share, mixed.shape), weights.astype(jnp.bfloat16), values)
        plgpu.barrier_arrive(room.done.at[buffer])
        return higher, total, mixed

    reduced = plgpu.Layout.WGMMA.reduce(1)
    top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), reduced)
    total = chip.lay(jnp.zeros((ROWS,), jnp.float32), reduced)
    mixed = chip.lay(jnp.zeros((ROWS, half), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, walk.steps, step, (top, total, mixed))
