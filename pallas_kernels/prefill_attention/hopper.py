"""Prefill attention on Hopper GPUs (Pallas Mosaic GPU): two warpgroups multiply, a third loads pages by TMA.

The blocks are those of the Triton kernel, each of one sequence, those with the most tiles first. A warpgroup has the 64
rows that a wgmma takes: all query heads of a KV head, for as many tokens as fit. Both warpgroups read the same tiles of
K and V; a tile's buffer is refilled when both have released it. Rows of queries are loaded and results stored token by
token, so that a block may begin and end anywhere in a packed chunk: the rows past its end belong to another sequence or
are padding.

Codes of 8 bits are widened by the loading warpgroup, so that the others always find bf16.

Compiled for an H100, no register is spilled. With heads of 128 a block takes 192 KiB of shared memory, with codes 210,
so that a core has one. No run has been measured.

Attention over latents is split as in decode (`paged_attention/hopper.py`): two warpgroups compute all logits of a
block's 64 rows and mix half of V each, a third loads tiles, each once for both. A block is the query heads of as many
tokens as fill 64 rows, or 64 of one token's heads: adjacent rows of the chunk, loaded by one copy. Missing rows of the
last block are replaced by rows before it, whose results are discarded. The mixture is stored from the shared memory of
the queries, eight rows per copy.

Compiled for an H100, no register is spilled and rows of 576 take 216 KiB of shared memory. No run has been measured.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.hopper_attention import (
    FEW_REGISTERS,
    HALVES,
    REGISTERS,
    STAGES,
    Pages,
    PoolTensors,
    TileRing,
    bring,
    mix_half,
    rooms_of,
    scratch_of_rooms,
)
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, places, plgpu
from pallas_kernels.prefill_attention import xla
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import LOG2_E, NEVER
from pallas_kernels.triton_attention import AttentionParams as SoftmaxRule
from pallas_kernels.tuning import MOSAIC, tuned

WARPGROUPS = 2  # multiplying warpgroups
REGISTERS_OF_CODES = 192, 128  # if the loading warpgroup widens codes


class Blocks(NamedTuple):
    """The split of the work into tiles."""

    tile: int  # KV tokens per step
    stages: int  # tiles in flight


class BlockParams(NamedTuple):
    """The parameters of attention that are the same for every block."""

    scale: float
    window: int | None
    soft_cap: float | None
    groups: int  # query heads per KV head

    @property
    def tokens(self) -> int:
        """Returns the tokens whose query heads fill a warpgroup's rows."""
        return ROWS // self.groups


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages) -> Blocks:
    """Returns the tuned choice, or two tiles in flight: 128 KiB with heads of 128. Codes are in shared memory twice:
    three tiles of half as many tokens, 144 KiB."""
    found = tuned("prefill_attention", q, kv_pages)
    if found.get(MOSAIC):
        return Blocks(found["tile"], found["stages"])
    return Blocks(TILE, 3) if isinstance(kv_pages, QuantizedPages) else Blocks(2 * TILE, 2)


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def prefill_attention(
    args: PrefillAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """Computes `pallas_kernels.prefill_attention` for arguments of `mosaic.fits_widened` or
    `mosaic.fits_latent_chunks`. interpret: parameters of the interpreter."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    if args.value_size is not None:  # latents have one split, `blocks` is not used
        return attend_latents(args, interpret=interpret)
    tokens, heads, size = q.shape
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    held, kind = PoolTensors.of(kv_pages), stored(kv_pages).dtype.name if isinstance(kv_pages, QuantizedPages) else None
    blocks = blocks or choose_blocks(q, kv_pages)
    rule = BlockParams(args.scale, args.window, args.soft_cap, heads // kv_heads)
    rows = WARPGROUPS * rule.tokens
    work = xla.list_blocks(tokens, kv_lens, cu_q_lens, tile_tokens=blocks.tile, window=args.window, query_rows=rows)
    end = jnp.minimum(cu_q_lens[work.sequence + 1] - work.start, rows)
    spans = jnp.stack([work.sequence, work.start, work.position, work.first, work.stop, end], axis=1)
    out = plgpu.kernel(
        partial(attend_block, blocks=blocks, rule=rule, page_size=page_size, chip=mosaic.chip_of(interpret), kind=kind),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        grid=(spans.shape[0], kv_heads),
        grid_names=("blocks", "heads"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch(blocks, page_size, size, rule, codes=kind is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(q, page_table, spans, row_sinks(sinks, kv_heads, rule), *held.refs)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, mosaic.varying_as(q, out), 0)  # no block writes the padding


def row_sinks(sinks: Array | None, kv_heads: int, rule: BlockParams) -> Array:
    """Returns f32 [kv_heads, ROWS] in base 2: the initial logit of each row's softmax."""
    if sinks is None:
        return jnp.full((kv_heads, ROWS), NEVER, jnp.float32)
    own = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2_E, (1, rule.tokens))
    return jnp.pad(own, ((0, 0), (0, ROWS - own.shape[1])), constant_values=NEVER)


def scratch(blocks: Blocks, page_size: int, size: int, rule: BlockParams, *, codes: bool) -> list[Any]:
    """Returns the scratch shapes: rows as stored in HBM and as a wgmma reads them, barriers, and tiles of K and V."""
    return [
        plgpu.SMEM((WARPGROUPS, ROWS, size), jnp.bfloat16),
        mosaic.swizzled(WARPGROUPS, ROWS, size),
        plgpu.Barrier(num_arrivals=rule.tokens, num_barriers=WARPGROUPS),
        *scratch_of_rooms(blocks.stages, blocks.tile, page_size, size, readers=WARPGROUPS, codes=codes),
    ]


def attend_block(
    q_ref,
    table_ref,
    spans_ref,
    sinks_ref,
    *refs,
    blocks: Blocks,
    rule: BlockParams,
    page_size: int,
    chip,
    kind: str | None,
):
    """Computes one block and KV head. `refs` are the pool and its scales, the results, and the scratch. kind: dtype of
    the pool's codes."""
    pool, refs = PoolTensors(refs[0], refs[1] if kind else None), refs[2 if kind else 1 :]
    (out_ref, rows_smem, q_smem, q_barriers), rooms = refs[:4], rooms_of(refs[4:])
    block, head, warpgroup = (lax.axis_index(name) for name in ("blocks", "heads", "warpgroup"))
    sequence, start, position, first, stop, end = (spans_ref[block, at] for at in range(6))
    many, few = REGISTERS_OF_CODES if kind else (REGISTERS, FEW_REGISTERS)

    @pl.when((warpgroup == WARPGROUPS) & (stop > first))
    def _():
        plgpu.set_max_registers(few, action="decrease")
        place = Pages(pool, table_ref, sequence, head, position + end, page_size, lax.axis_size("heads"))
        bring(place, stop - first, lambda step: first + step, rooms, chip, e4m3=kind == "float8_e4m3fn")

    @pl.when((warpgroup < WARPGROUPS) & (stop > first))
    def _():
        plgpu.set_max_registers(many, action="increase")
        own = Rows(q_ref, out_ref, rows_smem.at[warpgroup], start + warpgroup * rule.tokens, head * rule.groups)
        own.fetch(q_barriers.at[warpgroup], rule)
        queries = q_smem.at[warpgroup]
        queries[...] = chip.load(rows_smem.at[warpgroup], plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        at = position + warpgroup * rule.tokens
        top, total, mixed = attend_tiles(queries, rooms, (first, stop, at), blocks, rule, chip)
        sinks = chip.load(sinks_ref.at[head], plgpu.Layout.WGMMA.reduce(1))
        higher = jnp.maximum(top, sinks)
        share = jnp.exp2(top - higher)
        total = total * share + jnp.exp2(sinks - higher)
        found = mixed * per_row(share / jnp.where(total > 0, total, 1.0), mixed.shape)
        rows_smem.at[warpgroup][...] = found.astype(jnp.bfloat16)
        plgpu.commit_smem()
        own.leave(end - warpgroup * rule.tokens, rule)


class Rows(NamedTuple):
    """The rows of a warpgroup: their position in the chunk and their buffers."""

    q_ref: Any
    out_ref: Any
    room: Any
    start: Array
    head: Array

    def fetch(self, barrier: Any, rule: BlockParams) -> None:
        @pl.loop(0, rule.tokens)
        def _(token):
            there = jnp.minimum(self.start + token, self.q_ref.shape[0] - 1)
            held = self.q_ref.at[there, pl.ds(self.head, rule.groups)]
            plgpu.copy_gmem_to_smem(held, self.room.at[pl.ds(token * rule.groups, rule.groups)], barrier)

        plgpu.barrier_wait(barrier)

    def leave(self, count: Array, rule: BlockParams) -> None:
        """Stores the rows of the first `count` tokens."""

        @pl.loop(0, jnp.clip(count, 0, rule.tokens))
        def _(token):
            place = self.out_ref.at[self.start + token, pl.ds(self.head, rule.groups)]
            plgpu.copy_smem_to_gmem(self.room.at[pl.ds(token * rule.groups, rule.groups)], place)

        plgpu.wait_smem_to_gmem(0)


def attend_tiles(queries, rooms: tuple[TileRing, TileRing], span, blocks: Blocks, rule: BlockParams, chip: type[Chip]):
    """Returns the greatest logit, total and mixture of a warpgroup's rows after the tiles of `span`; `at` is the
    position of its first row. Sinks are left to the caller: within a `shard_map` that checks, they vary over shards,
    and the values here are not marked so."""
    first, stop, at = span
    keys, values = rooms
    shape = ROWS, blocks.tile

    def step(index, carry, *, masked: bool):
        top, total, mixed = carry
        buffer = lax.rem(index - first, blocks.stages)
        plgpu.barrier_wait(keys.arrived.at[buffer])
        logits = keys.scaled(chip.logits(queries, keys.numbers.at[buffer]), buffer, chip)
        plgpu.barrier_arrive(keys.done.at[buffer])
        if rule.soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
        if masked:
            position = lax.div(places(chip, shape, 0), rule.groups) + at
            token = places(chip, shape, 1) + index * blocks.tile
            seen = position >= token
            if rule.window is not None:
                seen = seen & (position - token < rule.window)
            logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, logits.max(axis=1))
        share = jnp.exp2(top - higher)
        weights = jnp.exp2(logits - per_row(higher, shape))
        total = total * share + weights.sum(axis=1)
        mixed = mixed * per_row(share, mixed.shape)
        plgpu.barrier_wait(values.arrived.at[buffer])
        weights = values.scaled(weights, buffer, chip)
        mixed = chip.mixture(mixed, weights.astype(jnp.bfloat16), values.numbers.at[buffer])
        plgpu.barrier_arrive(values.done.at[buffer])
        return higher, total, mixed

    reduced = plgpu.Layout.WGMMA.reduce(1)
    top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), reduced)
    total = chip.lay(jnp.zeros((ROWS,), jnp.float32), reduced)
    mixed = chip.lay(jnp.zeros((ROWS, queries.shape[1]), jnp.float32), plgpu.Layout.WGMMA)
    # Tiles that every row sees whole need no masks; a window hides part of any tile.
    whole = first if rule.window is not None else jnp.clip(lax.div(at + 1, blocks.tile), first, stop)
    carry = lax.fori_loop(first, whole, partial(step, masked=False), (top, total, mixed))
    return lax.fori_loop(whole, stop, partial(step, masked=True), carry)


def attend_latents(
    args: PrefillAttentionArgs,
    *,
    interpret: Any = None,
) -> Array:
    """Computes `pallas_kernels.prefill_attention` for arguments of `mosaic.fits_latent_chunks`; interpret: the
    interpreter's parameters."""
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
    rule = SoftmaxRule(args.scale, args.window, args.soft_cap, ((0, value_size),), None)
    out = plgpu.kernel(
        partial(attend_latent_block, rule=rule, heads=heads, page_size=page_size, chip=mosaic.chip_of(interpret)),
        out_type=jax.ShapeDtypeStruct(
            (rows.shape[0], value_size), q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type
        ),
        grid=(spans.shape[0], pl.cdiv(heads, ROWS)),
        grid_names=("blocks", "lanes"),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=latent_scratch(page_size, size),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(rows, page_table, spans, PoolTensors.of(kv_pages).numbers, *starts)
    out = mosaic.varying_as(q, out)[: tokens * heads].reshape(tokens, heads, value_size)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out, 0)  # no block writes the padding


def latent_scratch(page_size: int, size: int) -> list[Any]:
    """Returns the scratch shapes: rows of queries and their mixture, the barriers of both, and a ring of tiles."""
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=HALVES),
        mosaic.swizzled(STAGES, TILE, size),
        plgpu.Barrier(num_arrivals=max(1, TILE // page_size), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
    ]


class VisibleSpan(NamedTuple):
    """The tokens that a block's rows see, in the form of `paged_attention.hopper.Walk`."""

    first: Array  # first tile
    stop: Array
    position: Array  # position of the block's first token
    ahead: Array  # row of that token's first head; below 0 if the block begins with a later head
    heads: int

    @property
    def steps(self) -> Array:
        return self.stop - self.first

    def at(self, step: Array) -> tuple[Array, int]:
        return self.first + step, 0

    def seen(self, token: Array, run: int, told: None, window: int | None, chip: type[Chip]) -> Array:
        """Returns bool [rows, tokens]: the visible ones."""
        del run, told
        behind = self.position + lax.div(places(chip, token.shape, 0) - self.ahead, self.heads) - token
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def attend_latent_block(
    q_ref, table_ref, spans_ref, pool_ref, *refs, rule: SoftmaxRule, heads: int, page_size: int, chip: type[Chip]
):
    """Computes up to 64 rows of one sequence. `refs` are the sinks, if there are any, the results, and the scratch."""
    sinks_ref, (out_ref, q_smem, came, read, *ring) = (None, refs) if len(refs) == 7 else (refs[0], refs[1:])
    block, lane, warpgroup = (lax.axis_index(name) for name in ("blocks", "lanes", "warpgroup"))
    sequence, start, position, first, stop, end = (spans_ref[block, at] for at in range(6))
    wanted = start * heads + lane * ROWS
    held = pl.multiple_of(jnp.minimum(wanted, q_ref.shape[0] - ROWS), BOX)
    sight = VisibleSpan(first, stop, position, wanted - held - lane * ROWS, heads)
    room = TileRing(*ring)

    @pl.when((warpgroup == HALVES) & (stop > first))
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(held, ROWS)], q_smem, came)
        place = Pages(
            PoolTensors(pool_ref, None), table_ref, sequence, jnp.int32(0), position + end, page_size, 1, parts=1
        )
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
        plgpu.barrier_wait(read)  # the other warpgroup has finished reading the queries
        leaving = q_smem.at[:, columns]
        leaving[...] = found.astype(q_smem.dtype)
        plgpu.commit_smem()
        count = jnp.minimum(end * heads - lane * ROWS, ROWS)
        leave(leaving, out_ref.at[pl.ds(held, ROWS), columns], wanted - held, count)


def leave(rows: Any, out_ref: Any, before: Array, count: Array) -> None:
    """Stores the `count` rows after the first `before`; a copy from swizzled shared memory is a box of some columns."""

    @pl.loop(lax.div(before, BOX), lax.div(before + count, BOX))
    def _(box):
        some = pl.ds(pl.multiple_of(box * BOX, BOX), BOX)
        plgpu.copy_smem_to_gmem(rows.at[some], out_ref.at[some])

    plgpu.wait_smem_to_gmem(0)
