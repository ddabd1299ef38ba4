"""Prefill attention for XLA, written for the CPU: blocks of query rows, each of one sequence, over that sequence's KV.

There are two loops with dynamic bounds: the outer over groups of blocks that hold real rows, the inner over the tiles
of KV that a group can see, with an online softmax (Dao et al. 2022). Blocks of similar work share a group, so that no
block waits for another. Cost therefore follows the useful products: no product spans two sequences, and padding rows,
empty sequences and tiles before a window are never visited.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.paged_attention.xla import first_carry, read_tiles
from pallas_kernels.quantized import stored

QUERY_ROWS = 64  # 32 wins on prompts of under 40 tokens and loses a quarter on long ones
TILE_TOKENS = 64
BLOCKS_A_STEP = 2  # from two on XLA splits a step's softmax over two cores; more costs cache


class Blocks(NamedTuple):
    """Runs of at most `query_rows` rows of one sequence, those with the most tiles first; at most N."""

    sequence: Array  # i32[N]
    start: Array  # i32[N], the block's first row of q
    position: Array  # i32[N], that row's position in its sequence
    first: Array  # i32[N], first tile that the block sees
    stop: Array  # i32[N], the tile after the last one; 0 for unused entries
    total: Array  # i32[], how many of the N are real
    place: Array  # i32[T], index of each row of q in the concatenated blocks


def prefill_attention(
    args: PrefillAttentionArgs,
) -> Array:
    """Computes `pallas_kernels.prefill_attention`, see there."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    tokens, heads, size = q.shape
    kv_heads, page_size = stored(kv_pages).shape[1:4:2]
    tile_pages = min(max(1, TILE_TOKENS // page_size), page_table.shape[1])
    tile_tokens = tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))
    blocks = list_blocks(tokens, kv_lens, cu_q_lens, tile_tokens=tile_tokens, window=args.window)
    width = min(BLOCKS_A_STEP, blocks.start.shape[0])
    wide = jnp.pad(q.astype(jnp.float32) * args.scale, ((0, QUERY_ROWS), (0, 0), (0, 0)))

    def group(index: Array, out: Array) -> Array:
        own = (lax.dynamic_slice_in_dim(part, index * width, width) for part in blocks[:5])
        sequence, start, position, first, stop = own
        rows = wide[start[:, None] + jnp.arange(QUERY_ROWS)[None, :]]  # [width, rows, Hq, D]
        rows = rows.reshape(width, QUERY_ROWS, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
        at = position[:, None] + jnp.arange(QUERY_ROWS)[None, :]

        def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, mixed = carry
            tile = jnp.minimum(first + index, table.shape[1] // tile_pages - 1)
            pages = table[sequence[:, None], tile[:, None] * tile_pages + jnp.arange(tile_pages)[None, :]]
            keys, values = read_tiles(kv_pages, pages)
            logits = jnp.einsum("nhgtd,nhsd->nhgts", rows, keys)
            logits = logits if args.soft_cap is None else args.soft_cap * jnp.tanh(logits / args.soft_cap)
            token = ((first + index) * tile_tokens)[:, None, None] + jnp.arange(tile_tokens)[None, None, :]
            behind = at[:, :, None] - token
            seen = behind >= 0 if args.window is None else (behind >= 0) & (behind < args.window)
            logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
            higher = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights, keep = jnp.exp(logits - higher[..., None]), jnp.exp(top - higher)
            total = total * keep + jnp.sum(weights, axis=-1)
            mixed = mixed * keep[..., None] + jnp.einsum("nhgts,nhsd->nhgtd", weights, values)
            return higher, total, mixed

        carry = first_carry(rows, None if sinks is None else sinks.reshape(kv_heads, -1, 1))
        _, total, mixed = lax.fori_loop(0, jnp.max(stop - first), step, carry)
        mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
        done = mixed.transpose(0, 3, 1, 2, 4).reshape(width * QUERY_ROWS, heads, size)
        return lax.dynamic_update_slice_in_dim(out, done, index * width * QUERY_ROWS, 0)

    out = jnp.zeros_like(wide, shape=(blocks.start.shape[0] * QUERY_ROWS, heads, size))
    out = lax.fori_loop(0, -(-blocks.total // width), group, out)
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, out[blocks.place][..., : args.value_size], 0.0).astype(q.dtype)


def list_blocks(
    tokens: int,
    kv_lens: Array,
    cu_q_lens: Array,
    *,
    tile_tokens: int,
    window: int | None,
    query_rows: int = QUERY_ROWS,
) -> Blocks:
    """Returns the blocks of one call. It reads no KV, so XLA computes it once for all layers of a program."""
    sequences = kv_lens.shape[0]
    most = -(-tokens // query_rows) + sequences
    most += -most % min(BLOCKS_A_STEP, most)
    rows = cu_q_lens[1:] - cu_q_lens[:-1]
    before = jnp.cumulative_sum(-(-rows // query_rows), include_initial=True)
    item = jnp.arange(most)
    sequence = owner(before, item)
    start = cu_q_lens[sequence] + (item - before[sequence]) * query_rows
    position = kv_lens[sequence] - cu_q_lens[sequence + 1] + start
    stop = -(-jnp.minimum(position + query_rows, kv_lens[sequence]) // tile_tokens)
    stop = jnp.where(item < before[-1], stop, 0)
    first = jnp.zeros_like(stop) if window is None else jnp.maximum(position - window + 1, 0) // tile_tokens
    first = jnp.minimum(first, stop)
    order = jnp.argsort(first - stop, stable=True)
    row = jnp.arange(tokens)
    mine = owner(cu_q_lens, row)
    within = row - cu_q_lens[mine]
    block = jnp.argsort(order)[jnp.minimum(before[mine] + within // query_rows, most - 1)]
    place = block * query_rows + within % query_rows
    start = jnp.minimum(start, tokens)  # unused blocks read padding
    return Blocks(sequence[order], start[order], position[order], first[order], stop[order], before[-1], place)


def owner(starts: Array, items: Array) -> Array:
    """Returns which run of `starts` i32[S + 1] holds each item; items past the end get the last run."""
    return jnp.minimum(jnp.sum(starts[None, 1:] <= items[:, None], axis=1), starts.shape[0] - 2)
