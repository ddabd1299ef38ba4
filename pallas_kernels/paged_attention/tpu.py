"""Decode attention on a TPU (Mosaic): one grid step per slot, its pages fetched block by block, one block ahead.

Slots are distributed over the cores of the chip by the tokens they hold. The softmax runs online in f32 (Milakov and
Gimelshein 2018). Time follows the tokens held. The rows of a slot with a draft are further query heads, each with a
length of its own: a slot's pages are read once. The split of its tokens into blocks does not depend on lengths, so a
row's bits do not depend on the draft. Quantised pages are fetched into VMEM as codes: logits are multiplied by the
scales of K, weights by those of V, once per token instead of once per number.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.tpu_blocks import (
    NEVER,
    Blocks,
    buffers,
    deal,
    exact_dtype,
    next_with_work,
    num_cores,
    page_bytes,
    pool_specs,
    product_precision,
)
from pallas_kernels.tuning import tuned

BLOCK_BYTES = 1 << 20  # K and V in VMEM; two blocks hide the latency of HBM, and more would not fit f32 copies
BLOCK_TOKENS = 1024
TABLE_BYTES = 1 << 18  # most bytes of a page table in SMEM, a quarter of it
NOWHERE = jnp.iinfo(jnp.int32).max


@partial(jax.jit, static_argnames=("block_pages", "cores", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    block_pages: int | None = None,
    cores: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Computes `pallas_kernels.paged_attention`. Tables too large for SMEM are processed a few slots at a time."""
    q, kv_pages, page_table, lengths, _ = args.arrays
    slots, times = max(1, TABLE_BYTES // (4 * page_table.shape[1])), q.shape[0] // page_table.shape[0]
    a_row_each: Any = jax.ShapeDtypeStruct((page_table.shape[0], *q.shape[1:]), q.dtype)  # a choice is by slots
    pages = block_pages or tuned("paged_attention", a_row_each, kv_pages).get("block_pages", 0)
    pages = min(pages or pages_of_block(kv_pages), page_table.shape[1])
    options: Any = {"pages": pages, "cores": cores or num_cores(), "interpret": interpret}
    parts = []
    for at in range(0, page_table.shape[0], slots):
        rows = slice(at * times, (at + slots) * times)
        few = replace(args, q=q[rows], page_table=page_table[at : at + slots], lengths=lengths[rows])
        parts.append(attend_slots(few, **options))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def attend_slots(
    args: PagedAttentionArgs,
    *,
    pages: int,
    cores: int,
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    """Runs one kernel over slots: `pages` of a slot at a time, twice that in VMEM."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    (slots, width), (rows, heads, size) = page_table.shape, q.shape
    kv_heads, times = stored(kv_pages).shape[1], rows // slots
    cores = min(cores, slots)
    spare = -slots % cores  # empty slots, so that each core has the same number
    grouped = q.reshape(slots, times, kv_heads, heads // kv_heads, size).swapaxes(1, 2)
    grouped = jnp.pad(grouped, ((0, spare), *[(0, 0)] * 4)).reshape(-1, kv_heads, times * heads // kv_heads, size)
    lengths = jnp.pad(lengths.reshape(slots, times), ((0, spare), (0, 0)))
    longest, least = jnp.max(lengths, axis=1), jnp.min(jnp.where(lengths > 0, lengths, NOWHERE), axis=1)
    start = (
        jnp.zeros_like(longest) if args.window is None else jnp.maximum(jnp.minimum(least, longest) - args.window, 0)
    )
    work = longest - start
    order = deal(work, cores)
    sinks = sinks_of_rows(sinks, heads, kv_heads, times)
    share = grouped.shape[0] // cores
    value_size = args.value_size or size
    shape = (*grouped.shape[:3], value_size)

    def of_slot(array: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((1, *array[1:]), lambda core, at, order, *_: (order[core * share + at], 0, 0, 0))

    prefetch = order, page_table.reshape(-1), lengths.reshape(-1), start, longest, next_with_work(work[order], cores)
    out = pl.pallas_call(
        partial(attend_slot, width=width, times=times, scale=args.scale, window=args.window, soft_cap=args.soft_cap),
        out_shape=jax.ShapeDtypeStruct(shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(cores, share),
            in_specs=[of_slot(grouped.shape), pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)), pool_specs(kv_pages)],
            out_specs=of_slot(shape),
            scratch_shapes=buffers(kv_pages, pages),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(*prefetch, grouped, sinks, kv_pages)
    out = out[:slots].reshape(slots, kv_heads, times, -1, value_size)
    return out.swapaxes(1, 2).reshape(rows, heads, value_size)


def sinks_of_rows(sinks: Array | None, heads: int, kv_heads: int, times: int) -> Array:
    """Returns logits [Hkv, rows and groups, 1]; NEVER without sinks, which then take no share."""
    sinks = jnp.full(heads, NEVER) if sinks is None else sinks
    return jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, 1, -1), (1, times, 1)).reshape(kv_heads, -1, 1)


def pages_of_block(kv_pages: Array | QuantizedPages) -> int:
    """Returns the pages fetched together without a measurement."""
    page_size = stored(kv_pages).shape[3]
    return max(1, min(BLOCK_BYTES // page_bytes(kv_pages), BLOCK_TOKENS // page_size))


def attend_slot(
    order_ref,
    table_ref,
    lengths_ref,
    start_ref,
    longest_ref,
    next_ref,
    q_ref,
    sinks_ref,
    pool,
    out_ref,
    room,
    semaphores,
    turn_ref,
    *,
    width: int,
    times: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
):
    """Computes one slot with `times` rows."""
    _, _, parts, pages, page_size, _ = stored(room).shape
    tokens = pages * page_size
    core = pl.program_id(0) * pl.num_programs(1)

    def visible(at):
        """Returns the slot, the first token that a row of it sees and the token after the last."""
        slot = order_ref[core + at]
        return slot, start_ref[slot], longest_ref[slot]

    def span(at):
        _, start, length = visible(at)
        return start // tokens, pl.cdiv(length, tokens)

    def seen_pages(at):
        slot, start, length = visible(at)
        return slot * width, start // page_size, pl.cdiv(length, page_size)

    blocks = Blocks(pool, room, semaphores, turn_ref, next_ref, span, seen_pages, table_ref)
    slot, _, _ = visible(pl.program_id(1))
    heads = q_ref.shape[2] // times
    row = lax.broadcasted_iota(jnp.int32, (1, q_ref.shape[2], 1), 1)
    length = jnp.full(row.shape, lengths_ref[slot * times])
    for behind in range(1, times):
        length = jnp.where(row >= behind * heads, lengths_ref[slot * times + behind], length)
    exact = exact_dtype(q_ref.dtype, room)
    product = partial(lax.dot_general, precision=product_precision(exact), preferred_element_type=jnp.float32)
    queries, every = q_ref[0].astype(exact), slice(None)

    def step(block, buffer, carry):
        top, total, mixed = carry
        keys, values = blocks.read_both(buffer, every, exact, out_ref.shape[-1])
        logits = product(queries, keys, (((2,), (2,)), ((0,), (0,)))) * scale  # [Hkv, groups, tokens]
        logits = blocks.scaled(logits, buffer, every, 0)
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        position = block * tokens + lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        seen = position < length if window is None else (position < length) & (position >= length - window)
        logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, jnp.max(logits, axis=2, keepdims=True))
        weights, keep = jnp.exp(logits - higher), jnp.exp(top - higher)
        total = total * keep + jnp.sum(weights, axis=2, keepdims=True)
        weights = blocks.scaled(weights, buffer, every, parts - 1)
        mixed = mixed * keep + product(weights.astype(exact), values, (((2,), (1,)), ((0,), (0,))))
        return higher, total, mixed

    top = sinks_ref[...]
    carry = top, jnp.where(top > NEVER, 1.0, 0.0), jnp.zeros(out_ref.shape[1:], jnp.float32)
    _, total, mixed = blocks.walk(step, carry)
    mixed = jnp.where(length > 0, mixed / jnp.where(total > 0, total, 1.0), 0.0)  # a row that sees no token
    out_ref[0] = mixed.astype(out_ref.dtype)
