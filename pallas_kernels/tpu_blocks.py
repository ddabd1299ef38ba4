"""Reads pages block by block on a TPU, one block ahead; shared by both attention kernels.

A kernel's grid is [cores, n]: items (slots, or blocks of query rows) are distributed over the chip's cores, n to each.
An item reads consecutive blocks. A block is a few adjacent pages of its table row, and a page holds all heads of a
shard next to each other, so it is one DMA. While a block is multiplied the next one is fetched, the next item's first
block too, so that short items never wait for memory. Items with no pages to read are skipped.

Only pages that are seen are fetched. Behind them a buffer holds older pages, or its initial zeros: finite numbers,
which a weight of 0 cancels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized import QuantizedPages, stored, wider

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
LANES = 128
Ref = Any  # a Pallas reference in a kernel


def num_cores() -> int:
    """Returns the TensorCores that one kernel can use on the TPU compiled for: 2 on v4 and v5p (megacore), else 1."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:  # no TPU: the kernel is traced for another platform too, or interpreted
        return 1


def deal(work: Array, cores: int) -> Array:
    """Returns i32[N], the items of each core one after another, N / cores each: the heaviest first, 0 1 1 0 0 1 1 0.
    work: i32[N], the cost of each item; `cores` divides N."""
    if cores == 1:
        return jnp.arange(work.shape[0], dtype=jnp.int32)
    rounds = jnp.argsort(-work, stable=True).astype(jnp.int32).reshape(-1, cores)
    turned = jnp.arange(rounds.shape[0])[:, None] % 2 == 1
    return jnp.where(turned, rounds[:, ::-1], rounds).T.reshape(-1)


def next_with_work(work: Array, cores: int) -> Array:
    """Returns i32[cores * (n + 1)] for dealt `work` i32[cores * n]: at i + 1 of a core the first item after its i-th
    with work (n: none), at 0 its first item with work."""
    work = work.reshape(cores, -1)
    n = work.shape[1]
    held = lax.cummin(jnp.where(work > 0, jnp.arange(n, dtype=jnp.int32), n), axis=1, reverse=True)
    return jnp.pad(held, ((0, 0), (0, 1)), constant_values=n).reshape(-1)


def page_bytes(kv_pages: Array | QuantizedPages) -> int:
    """Returns the bytes of a page in VMEM, its last dimensions padded to whole lanes."""

    def padded(pool: Array) -> int:
        *outer, last = pool.shape[1:]
        numbers = -(-last // LANES) * LANES
        for length in outer:
            numbers *= length
        return numbers * pool.dtype.itemsize

    return sum(map(padded, jax.tree.leaves(kv_pages)))


def buffers(kv_pages: Array | QuantizedPages, pages: int) -> tuple[Any, ...]:
    """Returns scratch for two blocks of `pages` pages: buffers, a semaphore for each, and the block counter."""
    _, kv_heads, parts, page_size, size = stored(kv_pages).shape
    room: Any = pltpu.VMEM((2, kv_heads, parts, pages, page_size, size), stored(kv_pages).dtype)
    if isinstance(kv_pages, QuantizedPages):
        scales: Any = pltpu.VMEM((2, pages, *kv_pages.scales.shape[1:]), kv_pages.scales.dtype)
        room = QuantizedPages(room, scales)
    return room, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)


def pool_specs(kv_pages: Array | QuantizedPages) -> Any:
    """Returns block specs that leave the whole pool in HBM."""
    return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), kv_pages)


@dataclass(frozen=True)
class Blocks:
    """The refs of one kernel, and the blocks that its items read. `turn` counts a core's blocks: its parity selects a
    buffer."""

    pool: Ref | QuantizedPages
    room: Ref | QuantizedPages
    semaphores: Ref
    turn: Ref
    following: Ref  # next_with_work
    span: Callable[[Any], tuple[Any, Any]]  # item of this core -> (its first block, the block after the last)
    seen: Callable[[Any], tuple[Any, Any, Any]]  # item -> (index of its table row, first page it sees, page after last)
    table: Ref

    @property
    def pages(self) -> int:
        return stored(self.room).shape[3]

    def walk(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Runs `step(block, buffer, carry)` for each block of this grid step's item, with the block's pages in
        `buffer`."""
        item, items = pl.program_id(1), pl.num_programs(1)
        at = pl.program_id(0) * (items + 1)
        pl.when(item == 0)(lambda: self.begin(self.following[at], items))
        first, stop = self.span(item)
        turn = self.turn[0]

        def one(block: Any, carry: Any) -> Any:
            buffer = (turn + block - first) % 2
            is_last = block + 1 == stop
            item_after = jnp.where(is_last, self.following[at + item + 1], item)

            @pl.when(item_after < items)
            def _():
                block_after = jnp.where(is_last, self.span(item_after)[0], block + 1)
                self.copies(item_after, block_after, 1 - buffer, lambda copy: copy.start())

            self.copies(item, block, buffer, lambda copy: copy.wait())
            return step(block, buffer, carry)

        carry = lax.fori_loop(first, stop, one, carry)
        self.turn[0] = turn + stop - first
        return carry

    def begin(self, first_item: Any, items: Any) -> None:
        """Prepares a core's first item: fills the buffers with finite numbers and starts the first block's copy."""
        for room in jax.tree.leaves(self.room):
            room[...] = jnp.zeros_like(room)
        self.turn[0] = 0

        @pl.when(first_item < items)
        def _():
            self.copies(first_item, self.span(first_item)[0], 0, lambda copy: copy.start())

    def copies(self, item: Any, block: Any, buffer: Any, act: Callable[[Any], None]) -> None:
        """Calls `act` on the copy of each page of the block that the item sees."""
        row, first, stop = self.seen(item)

        @pl.loop(jnp.maximum(first, block * self.pages), jnp.minimum(stop, (block + 1) * self.pages))
        def _(page):
            held, at, semaphore = self.table[row + page], page - block * self.pages, self.semaphores.at[buffer]
            values = stored(self.room).at[buffer, :, :, at]
            act(pltpu.make_async_copy(stored(self.pool).at[held], values, semaphore))
            if isinstance(self.pool, QuantizedPages):
                scales = self.room.scales.at[buffer, at]
                act(pltpu.make_async_copy(self.pool.scales.at[held], scales, semaphore))

    def read_both(self, buffer: Any, heads: Any, dtype: Any, value_size: int) -> tuple[Array, Array]:
        """Returns K and V of a block; for pages of one part V is the first `value_size` numbers of K's rows."""
        keys = self.read(buffer, heads, 0, dtype)
        if stored(self.room).shape[2] == 1:
            return keys, keys[..., :value_size]
        return keys, self.read(buffer, heads, 1, dtype)

    def read(self, buffer: Any, heads: Any, part: int, dtype: Any) -> Array:
        """Returns one part of a block: `dtype` [heads, tokens, D], unscaled."""
        numbers = stored(self.room)[buffer, heads, part].astype(dtype)
        return numbers.reshape(*numbers.shape[:-3], -1, numbers.shape[-1])

    def scaled(self, rows: Array, buffer: Any, heads: Any, part: int) -> Array:
        """Returns f32 [heads, rows, tokens] times the scale of each token's K or V, if pages have scales."""
        if not isinstance(self.room, QuantizedPages):
            return rows
        page_size = stored(self.room).shape[4]
        tokens = slice(part * page_size, (part + 1) * page_size)
        scales = [self.room.scales[buffer, page, heads, tokens] for page in range(self.pages)]
        return rows * jnp.expand_dims(jnp.concatenate(scales, axis=-1), -2)


def exact_dtype(q_dtype: Any, kv_pages: Ref | QuantizedPages) -> Any:
    """Returns the dtype of products: the wider of queries and pages; int8 and e4m3 numbers are exact in bf16."""
    return q_dtype if isinstance(kv_pages, QuantizedPages) else wider(q_dtype, kv_pages.dtype)


def product_precision(dtype: Any) -> lax.Precision:
    """Returns the passes of the matrix unit: as many as f32 needs, one for bf16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
