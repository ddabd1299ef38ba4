"""Prefill attention on a GPU (Pallas Triton): one program per block of query rows and KV head, over the tiles it sees.

The blocks are those of the XLA code, each of one sequence, those with the most tiles first, so that short ones fill the
gaps at the end. All query heads of a KV head are adjacent in one block: a tile is loaded once for them, and a block
spans few tokens, so that little is computed past the diagonal. The inner loop is decode attention's.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.prefill_attention import xla
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

ROW_BYTES = 1 << 15  # queries of a block in the dtype of products: 128 rows of 128 numbers in bf16
MAX_ROWS = 128  # two warp groups of 64 rows, Hopper's matrix instruction
TILE_BYTES = 1 << 15  # K and V per stage of the pipeline


class Blocks(NamedTuple):
    """The split of the work; all fields are powers of two."""

    rows: int  # rows of a block: query tokens times the query heads of a KV head
    tile: int  # KV tokens per step
    warps: int
    stages: int


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def prefill_attention(
    args: PrefillAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """Computes `pallas_kernels.prefill_attention`; pools of single bytes of 2 to 4 GiB are handled by XLA."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    if not within_reach(kv_pages):
        return xla.prefill_attention(args)
    tokens, heads, size = q.shape
    kv_heads, runs = stored(kv_pages).shape[1], runs_of(size, args.value_size)
    blocks = blocks or choose_blocks(q, kv_pages, runs)
    rule = AttentionParams(
        args.scale, args.window, args.soft_cap, runs, precision_of(product_dtype(q.dtype, kv_pages), interpret)
    )
    lanes = min(pl.next_power_of_2(heads // kv_heads), blocks.rows)
    query_rows, lane_blocks = blocks.rows // lanes, pl.cdiv(heads // kv_heads, lanes)
    work = xla.list_blocks(
        tokens, kv_lens, cu_q_lens, tile_tokens=blocks.tile, window=args.window, query_rows=query_rows
    )
    out = pl.pallas_call(
        partial(attend_block, query_rows=query_rows, lanes=lanes, lane_blocks=lane_blocks, tile=blocks.tile, rule=rule),
        out_shape=jax.ShapeDtypeStruct(
            (tokens, heads, runs[0][1]), q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type
        ),
        grid=(work.sequence.shape[0], kv_heads * lane_blocks),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="prefill_attention",
    )(q, kv_pages, page_table, cu_q_lens, work.sequence, work.start, work.position, work.stop, sinks)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out, 0)  # no program writes the padding


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages, runs: Runs) -> Blocks:
    """Returns the tuned choice, or one whose sums stay in registers and whose tiles leave room for two programs per
    core."""
    values, products = stored(kv_pages), product_dtype(q.dtype, kv_pages)
    found = tuned("prefill_attention", q, kv_pages)
    if found and not found.get(MOSAIC):
        return Blocks(**found)
    row_bytes = padded_numbers(runs) * products.itemsize
    useful = pl.next_power_of_2(q.shape[0] * pl.next_power_of_2(q.shape[1] // values.shape[1]))
    rows = max(MIN_ROWS, min(MAX_ROWS, pl.next_power_of_2(ROW_BYTES // row_bytes), useful))
    tile = max(16, min(128, pl.next_power_of_2(TILE_BYTES // (values.shape[2] * row_bytes))))
    return Blocks(rows, tile, warps=8 if rows > 64 else 4, stages=3)


def attend_block(
    q_ref,
    pool: Any,
    table_ref,
    cu_q_lens_ref,
    sequence_ref,
    start_ref,
    position_ref,
    stop_ref,
    sinks_ref,
    out_ref,
    *,
    query_rows: int,
    lanes: int,
    lane_blocks: int,
    tile: int,
    rule: AttentionParams,
):
    """Computes one block. Its rows are `query_rows` tokens, with `lanes` query heads of a KV head each."""
    block, head_block = pl.program_id(0), pl.program_id(1)
    groups, size = q_ref.shape[1] // stored(pool).shape[1], out_ref.shape[2]

    @pl.when(stop_ref[block] > 0)
    def _():
        sequence, start, position = sequence_ref[block], start_ref[block], position_ref[block]
        row = jnp.arange(query_rows * lanes)
        head, group = head_block // lane_blocks, head_block % lane_blocks * lanes + row % lanes
        tokens, heads = start + row // lanes, head * groups + group
        end = jnp.minimum(cu_q_lens_ref[sequence + 1] - start, query_rows)  # rows of this sequence in the block
        real = (group < groups) & (row // lanes < end)
        low = 0 if rule.window is None else jnp.maximum(position - rule.window + 1, 0)
        dims = jnp.arange(pl.next_power_of_2(size))
        own = real[:, None] & (dims < size)[None, :]
        rows = tokens[:, None], heads[:, None]
        top, total, mixed = empty_softmax(row.shape[0], dims.shape[0])
        if sinks_ref is not None:
            top = pltriton.load(sinks_ref.at[heads], mask=real, other=NEVER).astype(jnp.float32) * LOG2_E
            total = jnp.ones_like(total)
        _, total, mixed = attend_tokens(
            read_queries(q_ref, rows, real, rule.runs, product_dtype(q_ref.dtype, pool)),
            position + row // lanes,
            pool,
            table_ref,
            (sequence, head),
            (low, position + 1, position + end),
            (top, total, mixed),
            tile=tile,
            rule=rule,
        )
        mixed = mixed / jnp.where(total > 0, total, 1.0)[:, None]
        pltriton.store(out_ref.at[*rows, dims[None, :]], mixed.astype(out_ref.dtype), mask=own)
