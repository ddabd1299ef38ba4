"""Decode attention on a GPU (Pallas Triton): a slot's tokens are split into parts, one program per part and KV head.

One long sequence then fills the chip (Flash-Decoding, Dao et al. 2023); a second kernel joins a slot's parts in their
order. The split of a slot follows from its own length: its bits depend neither on other slots nor on the table's width.
Programs whose part holds no visible token exit at once, so time follows the tokens held. Tokens are gathered one by one
through the page table, so a page may have any size; unseen tokens are not read.

Triton's arrays are powers of two, and a tensor core takes 16 rows: head sizes and groups are padded by masks, in
registers only. Softmax is online, in f32 and in base 2 (the chip's native exponential).

Compiled for an H100, head size 128, no register is spilled and pages are fetched by asynchronous copies of 8 or 16
bytes; no run has been measured. jax 0.11.2 calls the Triton backend deprecated: versions after `jax<0.12` may need
another.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.paged_attention import xla
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import (
    LOG2_E,
    MIN_ROWS,
    NEVER,
    AttentionParams,
    Runs,
    attend_tokens,
    empty_softmax,
    padded_numbers,
    precision_of,
    product_dtype,
    read_queries,
    runs_of,
    within_reach,
)
from pallas_kernels.tuning import MOSAIC, tuned

MAX_ROWS = 64  # most query heads of one KV head in a program
TILE_BYTES = 1 << 15  # bytes of K and V in shared memory per stage of the pipeline
JOINED = 16  # parts joined in one step
MAX_PARTS, PROGRAMS = 256, 8192  # parts of a slot and KV head; programs of a call, 60 per core of an H100
PART_NUMBERS = 1 << 23  # most f32 numbers that wait to be joined: 32 MiB at any lengths
WIDE = 1 << 14  # most sums of a program that four warps hold in registers


class Blocks(NamedTuple):
    """The split of the work. It must not depend on the table's width, or the bits of a result would."""

    parts: int  # most parts of a slot
    tiles: int  # fewest tiles of a part
    tile: int  # tokens of one step of a program's loop
    warps: int
    stages: int  # stages of the loop's pipeline: tiles in flight


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """Computes `pallas_kernels.paged_attention`; pools of single bytes of 2 to 4 GiB are handled by XLA."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    if not within_reach(kv_pages):
        return xla.paged_attention(args)
    slots, heads, size = q.shape
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    rows, row_blocks = rows_of_heads(heads // kv_heads)
    runs = runs_of(size, args.value_size)
    blocks = blocks or choose_blocks(q, kv_pages, runs)
    rule = AttentionParams(
        args.scale, args.window, args.soft_cap, runs, precision_of(product_dtype(q.dtype, kv_pages), interpret)
    )
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    per_head = shape((slots, parts, heads), jnp.float32)
    partials = pl.pallas_call(
        partial(attend_part, blocks=blocks, rows=rows, row_blocks=row_blocks, rule=rule),
        out_shape=(per_head, per_head, shape((slots, parts, heads, runs[0][1]), jnp.float32)),
        grid=(slots, kv_heads * row_blocks, parts),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="paged_attention",
    )(q, kv_pages, page_table, lengths)
    return joined(partials, lengths, sinks, q.dtype, blocks, args.window, interpret)


def joined(
    partials: Sequence[Array],
    lengths: Array,
    sinks: Array | None,
    dtype: Any,
    blocks: Blocks,
    window: int | None,
    interpret: bool,
    padded: tuple[int, int, int] = (1, 1, 1),
) -> Array:
    """Joins top logit and sum f32 [slots, parts, rows] and mixture [slots, parts, rows, D] to [slots, heads, D].
    padded: (query heads of a KV head, rows in which they are, tokens of a slot in those rows)."""
    slots, _, rows, size = partials[2].shape
    slots, heads = slots * padded[2], rows // padded[1] * padded[0]
    return pl.pallas_call(
        partial(join_parts, blocks=blocks, window=window, padded=padded),
        out_shape=jax.ShapeDtypeStruct(
            (slots, heads, size), dtype, manual_axis_type=jax.typeof(partials[2]).manual_axis_type
        ),
        grid=(slots, heads),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="join_parts",
    )(*partials, lengths, sinks)


def blocks_of(found: Mapping[str, int]) -> Blocks:
    """Makes the blocks from a tuned choice, which may name its code."""
    return Blocks(*(found[name] for name in Blocks._fields))


def rows_of_heads(groups: int) -> tuple[int, int]:
    """Returns the rows of a program, and how many programs a KV head's query heads need."""
    rows = min(max(MIN_ROWS, pl.next_power_of_2(groups)), MAX_ROWS)
    return rows, pl.cdiv(groups, rows)


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages, runs: Runs) -> Blocks:
    """Returns the tuned choice, or one with enough programs in flight to be bound by memory."""
    values = stored(kv_pages)
    across = max(1, q.shape[0] * values.shape[1])
    found = tuned("paged_attention", q, kv_pages)
    if found and not found.get(MOSAIC):
        return blocks_of(found)
    parts = max(1, min(MAX_PARTS, PROGRAMS // across, PART_NUMBERS // max(1, q.size)))
    rows, _ = rows_of_heads(q.shape[1] // values.shape[1])
    warps = 8 if rows * padded_numbers(runs[:1]) > WIDE else 4
    return Blocks(parts, 2 if across <= 8 else 4, tile_tokens(q, kv_pages, runs), warps, stages=3)


def tile_tokens(q: Array, kv_pages: Array | QuantizedPages, runs: Runs) -> int:
    """Returns the tokens whose K and V, in the dtype of the products, fill TILE_BYTES: a power of two."""
    token_bytes = stored(kv_pages).shape[2] * padded_numbers(runs) * product_dtype(q.dtype, kv_pages).itemsize
    return max(16, min(128, pl.next_power_of_2(TILE_BYTES // token_bytes)))


def cut(length, window: int | None, blocks: Blocks):
    """Returns (first visible token, first tile, tiles of a part, parts) of a slot, with at most `blocks.parts`
    parts."""
    start = 0 if window is None else jnp.maximum(length - window, 0)
    first, stop = start // blocks.tile, pl.cdiv(length, blocks.tile)
    tiles = jnp.maximum(blocks.tiles, pl.cdiv(stop - first, blocks.parts))
    return start, first, tiles, pl.cdiv(stop - first, tiles)


def attend_part(
    q_ref,
    pool: Any,
    table_ref,
    lengths_ref,
    top_ref,
    total_ref,
    mixed_ref,
    *,
    blocks: Blocks,
    rows: int,
    row_blocks: int,
    rule: AttentionParams,
):
    """Computes one part of one slot, for up to `rows` query heads of one KV head."""
    slot, head_block, part = (pl.program_id(axis) for axis in range(3))
    groups, size = q_ref.shape[1] // stored(pool).shape[1], mixed_ref.shape[3]
    length = lengths_ref[slot]
    start, first, tiles, parts = cut(length, rule.window, blocks)
    first = first + part * tiles
    low = jnp.maximum(start, first * blocks.tile)
    high = jnp.minimum(length, (first + tiles) * blocks.tile)

    @pl.when(part < parts)
    def _():
        head, group = head_block // row_blocks, head_block % row_blocks * rows + jnp.arange(rows)
        heads = head * groups + group
        dims = jnp.arange(pl.next_power_of_2(size))
        own = (group < groups)[:, None] & (dims < size)[None, :]
        top, total, mixed = attend_tokens(
            read_queries(q_ref, (slot, heads[:, None]), group < groups, rule.runs, product_dtype(q_ref.dtype, pool)),
            jnp.full(rows, length - 1),
            pool,
            table_ref,
            (slot, head),
            (low, high, high),
            empty_softmax(rows, dims.shape[0]),
            tile=blocks.tile,
            rule=rule,
        )
        pltriton.store(top_ref.at[slot, part, heads], top, mask=group < groups)
        pltriton.store(total_ref.at[slot, part, heads], total, mask=group < groups)
        pltriton.store(mixed_ref.at[slot, part, heads[:, None], dims[None, :]], mixed, mask=own)


def join_parts(top_ref, total_ref, mixed_ref, lengths_ref, sinks_ref, out_ref, *, blocks: Blocks, window, padded):
    """Joins one query head of one slot: its parts weighted by their shares of the softmax, in order."""
    slot, head = pl.program_id(0), pl.program_id(1)
    groups, rows, times = padded
    held_by, row = slot // times, head // groups * rows + slot % times * groups + head % groups
    size = out_ref.shape[2]
    dims = jnp.arange(pl.next_power_of_2(size))
    *_, parts = cut(lengths_ref[slot], window, blocks)

    def step(index, carry):
        top, total, mixed = carry
        part = index * JOINED + jnp.arange(JOINED)
        held = part < parts
        tops = pltriton.load(top_ref.at[held_by, part, row], mask=held, other=NEVER)
        totals = pltriton.load(total_ref.at[held_by, part, row], mask=held, other=0.0)
        own = held[:, None] & (dims < size)[None, :]
        mixes = pltriton.load(mixed_ref.at[held_by, part[:, None], row, dims[None, :]], mask=own, other=0.0)
        higher = jnp.maximum(top, jnp.max(tops))
        share, keep = jnp.exp2(tops - higher), jnp.exp2(top - higher)
        total = total * keep + jnp.sum(totals * share)
        return higher, total, mixed * keep + jnp.sum(mixes * share[:, None], axis=0)

    # A sink counts as a part without values.
    sink = NEVER if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2_E
    carry = jnp.float32(sink), jnp.float32(0.0 if sinks_ref is None else 1.0), jnp.zeros(dims.shape[0])
    _, total, mixed = lax.fori_loop(0, pl.cdiv(parts, JOINED), step, carry)
    mixed = mixed / jnp.where(total > 0, total, 1.0)
    pltriton.store(out_ref.at[slot, head, dims], mixed.astype(out_ref.dtype), mask=dims < size)
