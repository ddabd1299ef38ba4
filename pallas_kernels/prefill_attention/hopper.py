"""Prefill attention on Hopper GPUs (Pallas Mosaic GPU): two warpgroups multiply, a third brings pages by TMA.

The blocks are those of the Triton kernel, each of one sequence, those with the most tiles first. A warpgroup has the 64
rows that a wgmma takes: all query heads of a KV head, for as many tokens as have room. Both warpgroups read the same
tiles of K and V; a tile's buffer is filled anew when both said that they are done with it. Rows of queries come and
results go token by token, so that a block may begin and end anywhere in a packed chunk: what lies past its end is
another sequence's, or nobody's.

Codes of 8 bits are widened by the warpgroup that brings them, so that those that multiply find bf16 either way.

Compiled for an H100, nothing is spilled; with heads of 128 a block takes 192 KiB of shared memory, of codes 210, so
that a core has one. Nothing is measured yet.

Attention to latents is cut as in decode (`paged_attention/hopper.py`): two warpgroups make all logits of a block's 64
rows and mix a half of V each, a third brings tiles, each once for both. A block is the query heads of as many tokens
as fill
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
from pallas_kernels.hopper_attention import (
    FEW_REGISTERS,
    HALVES,
    REGISTERS,
    STAGES,
    Held,
    Pages,
    Room,
    bring,
    mix_half,
    rooms_of,
    scratch_of_rooms,
)
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, places, plgpu
from pallas_kernels.prefill_attention import xla
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import LOG2_E, NEVER
from pallas_kernels.triton_attention import Rule as SoftmaxRule
from pallas_kernels.tuning import MOSAIC, tuned

WARPGROUPS = 2  # that multiply
REGISTERS_OF_CODES = 192, 128  # where those that bring them widen them too


class Blocks(NamedTuple):
    """How the work is cut."""

    tile: int  # KV tokens of a step
    stages: int  # tiles in flight


class Rule(NamedTuple):
    """What is computed, the same for every block."""

    scale: float
    window: int | None
    soft_cap: float | None
    groups: int  # query heads of a KV head

    @property
    def tokens(self) -> int:
        """Whose query heads fill a warpgroup's rows."""
        return ROWS // self.groups


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages) -> Blocks:
    """The tuned choice, or two tiles in flight: with heads of 128 they are 128 KiB. Of codes, which lie there twice,
    three of half as many tokens: 144 KiB."""
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
    """As `pallas_kernels.prefill_attention`, of what `mosaic.fits_widened` or `mosaic.fits_latent_chunks`. interpret:
    parameters of the interpreter."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    if args.value_size is not None:  # cut in one way, whatever `blocks` are
        return attend_latents(args, interpret=interpret)
    tokens, heads, size = q.shape
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    held, kind = Held.of(kv_pages), stored(kv_pages).dtype.name if isinstance(kv_pages, QuantizedPages) else None
    blocks = blocks or choose_blocks(q, kv_pages)
    rule = Rule(args.scale, args.window, args.soft_cap, heads // kv_heads)
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


def row_sinks(sinks: Array | None, kv_heads: int, rule: Rule) -> Array:
    """f32 [kv_heads, ROWS] in base 2: where each row's softmax begins."""
    if sinks is None:
        return jnp.full((kv_heads, ROWS), NEVER, jnp.float32)
    own = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2_E, (1, rule.tokens))
    return jnp.pad(own, ((0, 0), (0, ROWS - own.shape[1])), constant_values=NEVER)


def scratch(blocks: Blocks, page_size: int, size: int, rule: Rule, *, codes: bool) -> list[Any]:
    """Rows as they come and go and as a wgmma reads them, who waits for them, and tiles of K and of V."""
    return [
        plgpu.SMEM((WARPGROUPS, ROWS, size), jnp.bfloat16),
        mosaic.swizzled(WARPGROUPS, ROWS, size),
        plgpu.Barrier(num_arrivals=rule.tokens, num_barriers=WARPGROUPS),
        *scratch_of_rooms(blocks.stages, blocks.tile, page_size, size, readers=WARPGROUPS, codes=codes),
    ]


def attend_block(
    q_ref, table_ref, spans_ref, sinks_ref, *refs, blocks: Blocks, rule: Rule, page_size: int, chip, kind: str | None
):
    """One block and KV head. `refs` are the pool and its scales, what leaves, and what `scratch` says. kind: dtype of
    the pool's codes."""
    pool, refs = Held(refs[0], refs[1] if kind else None), refs[2 if kind else 1 :]
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
    """A warpgroup's rows: where in the chunk they are, and where they wait."""

    q_ref: Any
    out_ref: Any
    room: Any
    start: Array
    head: Array

    def fetch(self, barrier: Any, rule: Rule) -> None:
        @pl.loop(0, rule.tokens)
        def _(token):
            there = jnp.minimum(self.start + token, self.q_ref.shape[0] - 1)
            held = self.q_ref.at[there, pl.ds(self.head, rule.groups)]
            plgpu.copy_gmem_to_smem(held, self.room.at[pl.ds(token * rule.groups, rule.groups)], barrier)

        plgpu.barrier_wait(barrier)

    def leave(self, count: Array, rule: Rule) -> None:
        """The first `count` tokens' rows."""

        @pl.loop(0, jnp.clip(count, 0, rule.tokens))
        def _(token):
            place = self.out_ref.at[self.start + token, pl.ds(self.head, rule.groups)]
            plgpu.copy_smem_to_gmem(self.room.at[pl.ds(token * rule.groups, rule.groups)], place)

        plgpu.wait_smem_to_gmem(0)


def attend_tiles(queries, rooms: tuple[Room, Room], span, blocks: Blocks, rule: Rule, chip: type[Chip]):
    """The greatest logit, total and mixture of a warpgroup's rows after the tiles from first to stop; `at` is its first
    row's place. Sinks are left to the caller: within a `shard_map` that checks they are each shard's own, as nothing
    here is said to be."""
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
    # Tiles that every row sees whole take no masks; a window hides some of any.
    whole = first if rule.window is not None else jnp.clip(lax.div(at + 1, blocks.tile), first, stop)
    carry = lax.fori_loop(first, whole, partial(step, masked=False), (top, total, mixed))
    return lax.fori_loop(whole, stop, partial(step, masked=True), carry)


def attend_latents(
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
    )(rows, page_table, spans, Held.of(kv_pages).numbers, *starts)
    out = mosaic.varying_as(q, out)[: tokens * heads].reshape(tokens, heads, value_size)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out, 0)  # no block writes the padding


def latent_scratch(page_size: int, size: int) -> list[Any]:
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
    """What a block's rows see, told as `paged_attention.hopper.Walk` tells it of a slot's."""

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


def attend_latent_block(
    q_ref, table_ref, spans_ref, pool_ref, *refs, rule: SoftmaxRule, heads: int, page_size: int, chip: type[Chip]
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
