"""Decode attention on a TPU (Mosaic): one grid step a slot, its pages fetched block by block, one block ahead.

A page holds all heads of a shard next to each other, so it is one DMA. While a block of pages is multiplied the next
one is on its way, the next slot's first block too, so that short slots never wait for memory; empty slots are passed
over. The softmax runs online in f32 (Milakov and Gimelshein 2018). Only pages that hold visible tokens are fetched:
time follows the tokens held. Past a slot's last page a buffer holds older pages, or the zeros it began with: numbers,
so that a weight of 0 makes them vanish.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import xla
from pallas_kernels.quantized import QuantizedPages

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
LANES = 128
BLOCK_BYTES = 1 << 20  # of K and V in VMEM; two such blocks hide the latency of HBM, and more would not fit f32 copies
BLOCK_TOKENS = 1024
TABLE_BYTES = 1 << 18  # of a page table in SMEM, a quarter of it


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "block_pages", "interpret"))
def paged_attention(
    q: Array,
    kv_pages: Array | QuantizedPages,
    page_table: Array,
    lengths: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block_pages: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """As `pallas_kernels.paged_attention`. Tables too large for SMEM go a few slots at a time."""
    if isinstance(kv_pages, QuantizedPages):
        return xla.paged_attention(
            q, kv_pages, page_table, lengths, sinks, scale=scale, window=window, soft_cap=soft_cap
        )
    slots = max(1, TABLE_BYTES // (4 * page_table.shape[1]))
    pages = block_pages or pages_of_block(kv_pages, page_table.shape[1])
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "pages": pages, "interpret": interpret}
    parts = [
        attend_slots(
            q[at : at + slots], kv_pages, page_table[at : at + slots], lengths[at : at + slots], sinks, **options
        )
        for at in range(0, q.shape[0], slots)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def attend_slots(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    lengths: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    pages: int,
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    """One kernel: `pages` of a slot at a time, twice that in VMEM."""
    slots, heads, size = q.shape
    _, kv_heads, _, page_size, _ = kv_pages.shape
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, size)
    # Logits [Hkv, groups, 1]; NEVER where there are none, and then they take no share.
    sinks = jnp.full(heads, NEVER) if sinks is None else sinks
    sinks = sinks.astype(jnp.float32).reshape(*grouped.shape[1:3], 1)
    of_slot = pl.BlockSpec((1, *grouped.shape[1:]), lambda slot, *_: (slot, 0, 0, 0))
    prefetch = page_table.reshape(-1), lengths, next_slots(lengths)
    out = pl.pallas_call(
        partial(attend_slot, width=page_table.shape[1], scale=scale, window=window, soft_cap=soft_cap),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(slots,),
            in_specs=[
                of_slot,
                pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=of_slot,
            scratch_shapes=[
                pltpu.VMEM((2, kv_heads, 2, pages, page_size, size), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*prefetch, grouped, sinks, kv_pages)
    return out.reshape(q.shape)


def pages_of_block(kv_pages: Array, width: int) -> int:
    """Pages fetched together: no more than the `width` of a table row."""
    _, kv_heads, _, page_size, size = kv_pages.shape
    page_bytes = kv_heads * 2 * page_size * -(-size // LANES) * LANES * kv_pages.dtype.itemsize
    return max(1, min(BLOCK_BYTES // page_bytes, BLOCK_TOKENS // page_size, width))


def next_slots(lengths: Array) -> Array:
    """i32[B + 1]: at b + 1 the first slot after b that holds tokens (B: none), at 0 the first of all."""
    slots = lengths.shape[0]
    held = jnp.where(lengths > 0, jnp.arange(slots, dtype=jnp.int32), slots)
    return jnp.append(lax.cummin(held, reverse=True), jnp.int32(slots))


def attend_slot(
    table_ref,
    lengths_ref,
    next_ref,
    q_ref,
    sinks_ref,
    pool_ref,
    out_ref,
    blocks_ref,
    semaphores,
    turn_ref,
    *,
    width: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
):
    """One slot. `turn_ref` counts the blocks of all slots, so that its parity names the buffer of the next."""
    _, kv_heads, _, pages, page_size, size = blocks_ref.shape
    tokens = pages * page_size
    slot, slots = pl.program_id(0), pl.num_programs(0)
    length = lengths_ref[slot]

    def first_token(slot):
        return 0 if window is None else jnp.maximum(lengths_ref[slot] - window, 0)

    def of_each_page(slot, block, buffer, act):
        """`act` on the copies of the pages that hold visible tokens."""
        start = jnp.maximum(first_token(slot) // page_size, block * pages)
        stop = jnp.minimum(pl.cdiv(lengths_ref[slot], page_size), (block + 1) * pages)

        @pl.loop(start, stop)
        def _(page):
            held = pool_ref.at[table_ref[slot * width + page]]
            room = blocks_ref.at[buffer, :, :, page - block * pages]
            act(pltpu.make_async_copy(held, room, semaphores.at[buffer]))

    @pl.when(slot == 0)
    def _():
        blocks_ref[...] = jnp.zeros_like(blocks_ref)
        turn_ref[0] = 0
        first = next_ref[0]

        @pl.when(first < slots)
        def _():
            of_each_page(first, first_token(first) // tokens, 0, lambda copy: copy.start())

    first, stop = first_token(slot) // tokens, pl.cdiv(length, tokens)
    turn = turn_ref[0]
    exact = jnp.promote_types(q_ref.dtype, blocks_ref.dtype)
    precision = lax.Precision.HIGHEST if exact == jnp.float32 else lax.Precision.DEFAULT
    product = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    queries = q_ref[0].astype(exact)

    def step(block, carry):
        top, total, mixed = carry
        buffer = (turn + block - first) % 2
        is_last = block + 1 == stop
        slot_after = jnp.where(is_last, next_ref[slot + 1], slot)

        @pl.when(slot_after < slots)
        def _():
            block_after = jnp.where(is_last, first_token(slot_after) // tokens, block + 1)
            of_each_page(slot_after, block_after, 1 - buffer, lambda copy: copy.start())

        of_each_page(slot, block, buffer, lambda copy: copy.wait())
        keys, values = (blocks_ref[buffer, :, i].reshape(kv_heads, tokens, size).astype(exact) for i in (0, 1))
        logits = product(queries, keys, (((2,), (2,)), ((0,), (0,)))) * scale  # [Hkv, groups, tokens]
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        position = block * tokens + lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        seen = (position < length) & (position >= first_token(slot))
        logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, jnp.max(logits, axis=2, keepdims=True))
        weights, keep = jnp.exp(logits - higher), jnp.exp(top - higher)
        total = total * keep + jnp.sum(weights, axis=2, keepdims=True)
        mixed = mixed * keep + product(weights.astype(exact), values, (((2,), (1,)), ((0,), (0,))))
        return higher, total, mixed

    top = sinks_ref[...]
    carry = top, jnp.where(top > NEVER, 1.0, 0.0), jnp.zeros(queries.shape, jnp.float32)
    _, total, mixed = lax.fori_loop(first, stop, step, carry)
    turn_ref[0] = turn + stop - first
    out_ref[0] = (mixed / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
