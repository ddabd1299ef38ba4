"""Prefill attention on a TPU (Mosaic): one grid step per block of query rows, its pages fetched one block ahead.

The blocks are those of the XLA code, each of one sequence, distributed over the cores of the chip by the tokens they
see. XLA gathers their rows head by head before the kernel and scatters them after it, at a small cost next to the
products. Quantised pages are fetched into VMEM as codes, as in decode attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.paged_attention.tpu import pages_of_block
from pallas_kernels.prefill_attention import xla
from pallas_kernels.quantized import stored
from pallas_kernels.tpu_blocks import (
    LANES,
    NEVER,
    Blocks,
    buffers,
    deal,
    exact_dtype,
    next_with_work,
    num_cores,
    pool_specs,
    product_precision,
)
from pallas_kernels.tuning import tuned

MAX_ROWS, MIN_ROWS = 256, 16  # most and fewest query rows of a block
GROUP_ROWS = 512  # rows of one KV head's queries in a block; times TILE_TOKENS, the logits in memory at once
TILE_TOKENS = 256  # with larger values of both, the unrolled products take minutes to compile
BLOCK_NUMBERS = 1 << 19  # queries of a block: with sums in f32 and blocks in flight, about 12 MB of VMEM
TABLE_BYTES = 1 << 19  # most bytes of a page table in SMEM, half of it; larger ones go to XLA
OPTIONS = "scale", "window", "soft_cap", "value_size"
VMEM_BYTES = 48 << 20  # every chip has 64 MB or more; the default limit of 16 MB is too low for these blocks


@partial(jax.jit, static_argnames=("block_pages", "block_rows", "cores", "interpret"))
def prefill_attention(
    args: PrefillAttentionArgs,
    *,
    block_pages: int | None = None,
    block_rows: int | None = None,
    cores: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Computes `pallas_kernels.prefill_attention`, see there."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    tokens, heads, size = q.shape
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    if page_table.size * 4 > TABLE_BYTES:
        return xla.prefill_attention(args)
    cores = cores or num_cores()
    found = tuned("prefill_attention", q, kv_pages)
    pages = block_pages or found.get("block_pages", min(pages_of_block(kv_pages), max(1, TILE_TOKENS // page_size)))
    pages = min(pages, page_table.shape[1])
    rows = block_rows or found.get("block_rows", rows_of_block(tokens, heads, heads // kv_heads, size))
    blocks = xla.list_blocks(
        tokens, kv_lens, cu_q_lens, tile_tokens=pages * page_size, window=args.window, query_rows=rows
    )
    spare = -blocks.start.shape[0] % cores  # empty blocks, so that each core has the same number
    sequence, start, position, first, stop = (jnp.pad(part, (0, spare)) for part in blocks[:5])
    split = jnp.pad(q, ((0, rows), (0, 0), (0, 0)))[start[:, None] + jnp.arange(rows)[None, :]]
    split = split.reshape(-1, rows, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
    folds = folds_of(heads // kv_heads, rows)
    split = split.reshape(-1, kv_heads * folds, heads // kv_heads // folds * rows, size)
    shape = (*split.shape[:3], args.value_size or size)
    sinks = jnp.full(heads, NEVER) if sinks is None else sinks
    sinks = jnp.repeat(sinks.astype(jnp.float32), rows).reshape(*shape[1:3], 1)
    share = split.shape[0] // cores

    def of_block(array: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((1, *array[1:]), lambda core, at, order, *_: (order[core * share + at], 0, 0, 0))

    order = deal(stop - first, cores)
    following = next_with_work((stop - first)[order], cores)
    prefetch = order, page_table.reshape(-1), sequence, kv_lens, position, first, stop, following
    out = pl.pallas_call(
        partial(
            attend_block,
            width=page_table.shape[1],
            rows=rows,
            scale=args.scale,
            window=args.window,
            soft_cap=args.soft_cap,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(cores, share),
            in_specs=[of_block(split.shape), pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)), pool_specs(kv_pages)],
            out_specs=of_block(shape),
            scratch_shapes=[
                *buffers(kv_pages, pages),
                pltpu.VMEM(sinks.shape, jnp.float32),
                pltpu.VMEM(sinks.shape, jnp.float32),
                pltpu.VMEM(shape[1:], jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*prefetch, split, sinks, kv_pages)
    out = out.reshape(-1, heads, rows, shape[3]).transpose(0, 2, 1, 3).reshape(-1, heads, shape[3])
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out[blocks.place], 0)


def folds_of(groups: int, rows: int) -> int:
    """Returns how often a KV head's query heads are folded, to limit the rows multiplied at once."""
    folds = 1
    while groups % (2 * folds) == 0 and groups // folds * rows > GROUP_ROWS:
        folds *= 2
    return folds


def rows_of_block(tokens: int, heads: int, groups: int, size: int) -> int:
    """Returns the query rows per block: a power of two, the most that VMEM and the chunk allow."""
    row_numbers = heads * -(-size // LANES) * LANES
    most = min(MAX_ROWS, BLOCK_NUMBERS // row_numbers, GROUP_ROWS // groups, 2 * tokens)
    rows = MAX_ROWS
    while rows > max(MIN_ROWS, most):
        rows //= 2
    return rows


def attend_block(
    order_ref,
    table_ref,
    sequence_ref,
    kv_lens_ref,
    position_ref,
    first_ref,
    stop_ref,
    next_ref,
    q_ref,
    sinks_ref,
    pool,
    out_ref,
    room,
    semaphores,
    turn_ref,
    top_ref,
    total_ref,
    mixed_ref,
    *,
    width: int,
    rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
):
    """Computes one block of query rows, over tiles of its sequence's pages."""
    _, kv_heads, parts, pages, page_size, _ = stored(room).shape
    heads = q_ref.shape[1]  # a KV head's query heads may be folded into several
    tokens = pages * page_size
    core = pl.program_id(0) * pl.num_programs(1)

    def span(at):
        block = order_ref[core + at]
        return first_ref[block], stop_ref[block]

    def seen_pages(at):
        """Returns the pages that the block's last row may see."""
        block = order_ref[core + at]
        sequence = sequence_ref[block]
        visible = jnp.minimum(position_ref[block] + rows, kv_lens_ref[sequence])
        return sequence * width, 0, pl.cdiv(visible, page_size)

    blocks = Blocks(pool, room, semaphores, turn_ref, next_ref, span, seen_pages, table_ref)
    position = position_ref[order_ref[core + pl.program_id(1)]]
    exact = exact_dtype(q_ref.dtype, room)
    product = partial(lax.dot_general, precision=product_precision(exact), preferred_element_type=jnp.float32)
    top_ref[...] = sinks_ref[...]
    total_ref[...] = jnp.where(sinks_ref[...] > NEVER, 1.0, 0.0)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)

    def step(tile, buffer, _):
        @pl.loop(0, heads)
        def _(head):
            held = head // (heads // kv_heads)
            keys, values = blocks.read_both(buffer, held, exact, out_ref.shape[-1])
            logits = product(q_ref[0, head].astype(exact), keys, (((1,), (1,)), ((), ()))) * scale
            logits = blocks.scaled(logits, buffer, held, 0)
            logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)  # [groups * rows, tokens]
            row, token = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
            behind = position + row % rows - tile * tokens - token
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            logits = jnp.where(seen, logits, NEVER)
            top = top_ref[head]
            higher = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
            weights, keep = jnp.exp(logits - higher), jnp.exp(top - higher)
            top_ref[head] = higher
            total_ref[head] = total_ref[head] * keep + jnp.sum(weights, axis=1, keepdims=True)
            weights = blocks.scaled(weights, buffer, held, parts - 1)
            mixed_ref[head] = mixed_ref[head] * keep + product(weights.astype(exact), values, (((1,), (0,)), ((), ())))

        return 0

    blocks.walk(step, 0)
    total = total_ref[...]
    out_ref[0] = (mixed_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
