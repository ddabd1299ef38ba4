"""Prefill attention to latents on Hopper GPUs (Pallas Mosaic GPU).

As decode attention to them (`paged_attention/hopper_latents.py`): two warpgroups make all logits of a block's 64 rows
and mix a half of V each, a third brings tiles, each once for both. A block is the query heads of as many tokens as fill
64 rows, or 64 of one token's heads: rows that lie side by side in the chunk, so that one copy brings them, and those of
the last block that there are not are others' before it, multiplied in vain. What is mixed leaves from where the queries
lay, eight rows a copy.

Compiled for an H100, nothing is spilled and rows of 576 take 216 KiB of shared memory. Nothing is measured yet.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, places, plgpu
from pallas_kernels.paged_attention.gpu import LOG2_E, Rule
from pallas_kernels.paged_attention.hopper_latents import (
    FEW_REGISTERS,
    HALVES,
    REGISTERS,
    STAGES,
    mix_half,
)
from pallas_kernels.paged_attention.hopper_pages import Pages, Room, bring
from pallas_kernels.paged_attention.hopper_tiles import Held
from pallas_kernels.prefill_attention import xla
from pallas_kernels.quantized import QuantizedPages


def prefill_attention(
    args: PrefillAttentionArgs,
    *,
    interpret: Any = None,
) -> Array:
    """As `pallas_kernels.prefill_attention`, of what `mosaic.fits_latent_chunks`. interpret: the interpreter's
    parameters."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    value_size = args.value_size
    assert value_size is not None and not isinstance(kv_pages, QuantizedPages)
    tokens, heads, size = q.shape
    page_size = kv_pages.shape[3]
    together = max(1, ROWS // heads)
    work = xla.list_blocks(tokens, kv_lens, cu_q_lens, tile_tokens=TILE, window=args.window, query_rows=together)
    end = jnp.minimum(cu_q_lens[work.sequence + 1] - work.start, together)
    spans = jnp.stack([work.sequence, work.start, work.position, work.first, work.stop, end], axis=1)
    rows = q.reshape(-1, size)
    rows = jnp.pad(rows, ((0, max(0, ROWS - rows.shape[0])), (0, 0)))
    starts = [] if sinks is None else [jnp.tile(sinks.astype(jnp.float32) * LOG2_E, tokens + ROWS)[: rows.shape[0]]]
    rule = Rule(args.scale, args.window, args.soft_cap, ((0, value_size),), None)
    out = plgpu.kernel(
        partial(attend_block, rule=rule, heads=heads, page_size=page_size, chip=mosaic.chip_of(interpret)),
        out_type=jax.ShapeDtypeStruct(
            (rows.shape[0], value_size), q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type
        ),
        grid=(spans.shape[0], pl.cdiv(heads, ROWS)),
        grid_names=("blocks", "lanes"),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=scratch(page_size, size),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(rows, page_table, spans, Held.of(kv_pages).numbers, *starts)
    out = mosaic.varying_as(q, out)[: tokens * heads].reshape(tokens, heads, value_size)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out, 0)  # no block writes the padding


def scratch(page_size: int, size: int) -> list[Any]:
    """Rows of queries and what is mixed of them, who waits for either, and a ring of tiles."""
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=HALVES),
        mosaic.swizzled(STAGES, TILE, size),
        plgpu.Barrier(num_arrivals=max(1, TILE // page_size), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
    ]


class Sight(NamedTuple):
    """What a block's rows see, told as `hopper_rows.Walk` tells it of a slot's."""

    first: Array  # tile
    stop: Array
    position: Array  # of the block's first token
    ahead: Array  # the row that is that token's first head's; less than 0 where other heads of it come first
    heads: int

    @property
    def steps(self) -> Array:
        return self.stop - self.first

    def at(self, step: Array) -> tuple[Array, int]:
        return self.first + step, 0

    def seen(self, token: Array, run: int, told: None, window: int | None, chip: type[Chip]) -> Array:
        """bool [rows, tokens]."""
        del run, told
        behind = self.position + lax.div(places(chip, token.shape, 0) - self.ahead, self.heads) - token
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def attend_block(
    q_ref, table_ref, spans_ref, pool_ref, *refs, rule: Rule, heads: int, page_size: int, chip: type[Chip]
):
    """Up to 64 rows of one sequence. `refs` are where sinks are, if there are, what leaves, and what `scratch` says."""
    sinks_ref, (out_ref, q_smem, came, read, *ring) = (None, refs) if len(refs) == 7 else (refs[0], refs[1:])
    block, lane, warpgroup = (lax.axis_index(name) for name in ("blocks", "lanes", "warpgroup"))
    sequence, start, position, first, stop, end = (spans_ref[block, at] for at in range(6))
    wanted = start * heads + lane * ROWS
    held = pl.multiple_of(jnp.minimum(wanted, q_ref.shape[0] - ROWS), BOX)
    sight = Sight(first, stop, position, wanted - held - lane * ROWS, heads)
    room = Room(*ring)

    @pl.when((warpgroup == HALVES) & (stop > first))
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(held, ROWS)], q_smem, came)
        place = Pages(Held(pool_ref, None), table_ref, sequence, jnp.int32(0), position + end, page_size, 1, parts=1)
        bring(place, sight.steps, lambda step: first + step, [room], chip, e4m3=False)

    @pl.when((warpgroup < HALVES) & (stop > first))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        plgpu.barrier_wait(came)
        half = out_ref.shape[1] // HALVES
        top, total, mixed = mix_half(q_smem, room, (sight, None), (warpgroup, half), rule, chip)
        plgpu.barrier_arrive(read)
        if sinks_ref is not None:
            sinks = chip.load(sinks_ref.at[pl.ds(held, ROWS)], plgpu.Layout.WGMMA.reduce(1))
            higher = jnp.maximum(top, sinks)
            share = jnp.exp2(top - higher)
            total = total * share + jnp.exp2(sinks - higher)
            mixed = mixed * per_row(share, mixed.shape)
        found = mixed / per_row(jnp.where(total > 0, total, 1.0), mixed.shape)
        columns = pl.ds(pl.multiple_of(warpgroup * half, half), half)
        plgpu.barrier_wait(read)  # the other warpgroup multiplies by the queries no more
        leaving = q_smem.at[:, columns]
        leaving[...] = found.astype(q_smem.dtype)
        plgpu.commit_smem()
        count = jnp.minimum(end * heads - lane * ROWS, ROWS)
        leave(leaving, out_ref.at[pl.ds(held, ROWS), columns], wanted - held, count)


def leave(rows: Any, out_ref: Any, before: Array, count: Array) -> None:
    """The `count` rows behind those `before` them: what is whole in shared memory is a box of some columns."""

    @pl.loop(lax.div(before, BOX), lax.div(before + count, BOX))
    def _(box):
        some = pl.ds(pl.multiple_of(box * BOX, BOX), BOX)
        plgpu.copy_smem_to_gmem(rows.at[some], out_ref.at[some])

    plgpu.wait_smem_to_gmem(0)
