"""Decode attention on a GPU (Pallas Triton): a slot's tokens are cut into parts, one program a part and KV head.

One long sequence so fills the chip (Flash-Decoding, Dao et al. 2023); a second kernel joins a slot's parts in their
order. How a slot is cut follows from its own length: its bits depend neither on its company nor on the table's width.
Programs whose part holds no visible token leave at once: time follows the tokens held. Tokens are gathered one by one
through the page table, so a page may be of any size; those that nobody sees are not read.

Triton's arrays are powers of two, and a tensor core takes 16 rows: head sizes and groups are padded by masks, in
registers alone. Softmax is online, in f32 and in base 2 (the chip's own exponential).

Compiled for an H100, head size 128, no register is spilled and pages come by asynchronous copies of 8 or 16 bytes;
nothing is measured yet. jax 0.11.2 calls the Triton backend deprecated: what comes after `jax<0.12` may need another.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import offsets
from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.paged_attention import xla
from pallas_kernels.quantized import QuantizedPages, stored, wider
from pallas_kernels.tuning import MOSAIC, tuned

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
LOG2_E = log2(jnp.e)
MIN_ROWS, MAX_ROWS = 16, 64  # query heads of one KV head in a program: the least a tensor core takes, and the most
TILE_BYTES = 1 << 15  # of K and V in shared memory, for each stage of the pipeline
JOINED = 16  # parts joined in one step
MAX_PARTS, PROGRAMS = 256, 8192  # of a slot and KV head; of a call, 60 for each core of an H100
PART_NUMBERS = 1 << 23  # f32 numbers that wait to be joined: 32 MiB, whatever the lengths
WIDE = 1 << 14  # sums of a program that four warps hold in registers


Runs = tuple[tuple[int, int], ...]  # of numbers of a row, taken apart: (the first, how many)


class Blocks(NamedTuple):
    """How the work is cut. None of it may depend on the table's width, or the bits of a result would."""

    parts: int  # of a slot at most
    tiles: int  # of a part at least
    tile: int  # tokens of one step of a program's loop
    warps: int
    stages: int  # of the loop's pipeline: tiles in flight


class Rule(NamedTuple):
    """What is computed, the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    runs: Runs  # of a row of K: the first are V as well where pages have one part
    precision: lax.DotAlgorithmPreset | lax.Precision | None  # of the products


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """As `pallas_kernels.paged_attention`; pools of bytes of 2 to 4 GiB go to XLA."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    if not within_reach(kv_pages):
        return xla.paged_attention(args)
    slots, heads, size = q.shape
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    rows, row_blocks = rows_of_heads(heads // kv_heads)
    runs = runs_of(size, args.value_size)
    blocks = blocks or choose_blocks(q, kv_pages, runs)
    rule = Rule(args.scale, args.window, args.soft_cap, runs, precision_of(product_dtype(q.dtype, kv_pages), interpret))
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
    """Top logit and sum f32 [slots, parts, rows], mixture [slots, parts, rows, D] -> [slots, heads, D].

    padded: (query heads of a KV head, rows that they lie in, tokens of a slot that lie there).
    """
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
    """Of a tuned choice, which may say whose it is."""
    return Blocks(*(found[name] for name in Blocks._fields))


def runs_of(size: int, value_size: int | None) -> Runs:
    """A row of K whole, or V's numbers and the rest apart: padded to powers of two together they would be many more."""
    if value_size is None or value_size == size:
        return ((0, size),)
    return (0, value_size), (value_size, size - value_size)


def padded_numbers(runs: Runs) -> int:
    """Numbers that a row takes in registers."""
    return sum(pl.next_power_of_2(width) for _, width in runs)


def within_reach(kv_pages: Array | QuantizedPages) -> bool:
    """Whether the kernels' offsets reach every number of the pool."""
    values = stored(kv_pages)
    return offsets.within_reach(values.size, values.dtype)


def rows_of_heads(groups: int) -> tuple[int, int]:
    """Rows of a program, and how many programs a KV head's query heads take."""
    rows = min(max(MIN_ROWS, pl.next_power_of_2(groups)), MAX_ROWS)
    return rows, pl.cdiv(groups, rows)


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages, runs: Runs) -> Blocks:
    """The tuned choice, or one that has enough programs in flight for memory to be the bound."""
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
    """Tokens whose K and V, in the dtype of the products, fill TILE_BYTES: a power of two."""
    token_bytes = stored(kv_pages).shape[2] * padded_numbers(runs) * product_dtype(q.dtype, kv_pages).itemsize
    return max(16, min(128, pl.next_power_of_2(TILE_BYTES // token_bytes)))


def product_dtype(queries: jnp.dtype, kv_pages) -> jnp.dtype:
    """Both products' operands: what holds the queries and the pool's numbers exactly; int8 and fp8 fit in bf16."""
    return queries if isinstance(kv_pages, QuantizedPages) else wider(queries, kv_pages.dtype)


def precision_of(products: jnp.dtype, interpret: bool) -> lax.DotAlgorithmPreset | lax.Precision | None:
    """How f32 stays f32: three products of TF32 parts, 22 bits; the plain one would keep 10 of the 23.

    (Products of whole f32 numbers run outside the tensor cores, and their operands spill.) The CPU that interprets has
    its own.
    """
    if products != jnp.float32:
        return None
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def cut(length, window: int | None, blocks: Blocks):
    """(first visible token, first tile, tiles of a part, parts) of a slot: no more parts than there may be."""
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
    rule: Rule,
):
    """One part of one slot, for up to `rows` query heads of one KV head."""
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


def read_queries(q_ref, at, real, runs: Runs, dtype) -> list:
    """Each run of the query rows at `at`, `dtype` [rows, D], those that are not `real` zeros."""
    found = []
    for first, width in runs:
        dims = jnp.arange(pl.next_power_of_2(width))
        own = real[:, None] & (dims < width)[None, :]
        found.append(pltriton.load(q_ref.at[*at, first + dims[None, :]], mask=own, other=0.0).astype(dtype))
    return found


def empty_softmax(rows: int, size: int) -> tuple[Array, Array, Array]:
    """Top logit, sum and mixture of a softmax that has seen nothing: f32 [rows], [rows], [rows, size]."""
    return jnp.full(rows, NEVER), jnp.zeros(rows), jnp.zeros((rows, size))


def attend_tokens(
    queries,
    positions,
    pool: Any,
    table_ref,
    place,
    span,
    carry,
    *,
    tile: int,
    rule: Rule,
):
    """The inner loop of both attentions: the running softmax of `queries` over some tokens of one sequence.

    queries: [rows, D] of each of the rule's runs.

    positions: i32[rows], each row's own place; it sees itself and what lies before it, as far as the window goes.
    place: row of the table, KV head. span: (low, shared, high), the tokens that some row sees, and up to where those
    of low on are seen by all if there is no window: whole tiles of those take no masks.
    carry: (top in base 2, total, mixed), f32, returned as it is after these tokens.
    """
    (row, head), (low, shared, high) = place, span
    page_size = stored(pool).shape[3]
    _, window, soft_cap, runs, precision = rule
    product = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def step(index, carry, *, masked: bool):
        top, total, mixed = carry
        token = index * tile + jnp.arange(tile)
        held = (token >= low) & (token < high) if masked else None
        # Division and remainder of C: `//` and `%` would spend three operations more on negative numbers.
        column, offset = lax.div(token, page_size), lax.rem(token, page_size)
        page = pltriton.load(table_ref.at[row, column], mask=held, other=0 if masked else None)
        read = partial(read_tile, pool, page, head, offset, held)
        dtype = queries[0].dtype
        keys = [read(run, dtype, which=0) for run in runs]
        logits = sum(product(rows, part, (((1,), (1,)), ((), ()))) for rows, part in zip(queries, keys, strict=True))
        # A quantised token's factor is cheaper on its logits and weights than on its numbers.
        factor = read_factor(pool, page, head, offset, held, which=0)
        logits = logits * factor  # [rows, tile]
        if soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / soft_cap)) * (soft_cap * LOG2_E)
        if masked:
            behind = positions[:, None] - token[None, :]
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights, keep = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
        total = total * keep + jnp.sum(weights, axis=1)
        values = keys[0]
        if stored(pool).shape[2] == 2:
            values, factor = read(runs[0], dtype, which=1), read_factor(pool, page, head, offset, held, which=1)
        weights = (weights * factor).astype(dtype)
        mixed = mixed * keep[:, None] + product(weights, values, (((1,), (0,)), ((), ())))
        return higher, total, mixed

    first, stop = low // tile, pl.cdiv(high, tile)
    whole = first if window is not None else jnp.maximum(first, shared // tile)
    carry = lax.fori_loop(first, whole, partial(step, masked=False), carry)
    return lax.fori_loop(whole, stop, partial(step, masked=True), carry)


def read_tile(pool: Any, page, head, offset, held, run: tuple[int, int], dtype, *, which: int):
    """A run of K (0) or V (1) of a tile's tokens, `dtype` [tile, its numbers].

    Tokens that are not `held` (None: all are) and what pads the run are zeros, and are not read.
    """
    values_ref: Any = stored(pool)
    (first, width), dims = run, jnp.arange(pl.next_power_of_2(run[1]))
    real = None if width == dims.shape[0] else (dims < width)[None, :]
    tokens = None if held is None else held[:, None]
    mask = tokens if real is None else real if tokens is None else real & tokens
    at = values_ref.at[page[:, None], head, which, offset[:, None], first + dims[None, :]]
    numbers = pltriton.load(at, mask=mask, other=None if mask is None else jnp.zeros((), values_ref.dtype))
    return numbers.astype(dtype)


def read_factor(pool: Any, page, head, offset, held, *, which: int):
    """What the numbers of a tile's tokens are multiplied by, f32 [1, tile], or 1."""
    if not isinstance(pool, QuantizedPages):
        return 1.0
    scales_ref: Any = pool.scales
    at = scales_ref.at[page, head, which * stored(pool).shape[3] + offset]
    factor = pltriton.load(at, mask=held, other=None if held is None else 0.0)
    return factor[None, :]


def join_parts(top_ref, total_ref, mixed_ref, lengths_ref, sinks_ref, out_ref, *, blocks: Blocks, window, padded):
    """One query head of one slot: its parts weighed by their shares of the softmax, in their own order."""
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

    # A sink takes part as a part that adds nothing.
    sink = NEVER if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2_E
    carry = jnp.float32(sink), jnp.float32(0.0 if sinks_ref is None else 1.0), jnp.zeros(dims.shape[0])
    _, total, mixed = lax.fori_loop(0, pl.cdiv(parts, JOINED), step, carry)
    mixed = mixed / jnp.where(total > 0, total, 1.0)
    pltriton.store(out_ref.at[slot, head, dims], mixed.astype(out_ref.dtype), mask=dims < size)
