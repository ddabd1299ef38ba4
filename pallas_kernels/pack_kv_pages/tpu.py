"""Packs KV on a TPU (Mosaic): one DMA per page, a block of pages ahead of the computation, layer after layer.

A page holds all heads of a shard next to each other. The pages of a block are loaded together while the block before is
quantised and digested. Blocks are stored by the pipeline of the grid, directly at their index in the buffer. The blocks
of all layers make one list, split between the chip's cores. Pages that need no computation take the same path: copies
through VMEM cost no more of HBM's time than copies from HBM to HBM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_blocks import num_cores, page_bytes
from pallas_kernels.wire_format import STORED, PackedPages, packed_size, page_weights, quantise, scale_weights, words_of

BLOCK_BYTES = 1 << 20  # bytes of a block of pages in VMEM: two are loaded while two are stored
PAGE_BYTES = 1 << 19  # largest page whose arithmetic fits in the lowest default limit of VMEM
VMEM_BYTES = 56 << 20  # limit for larger pages


@dataclass(frozen=True)
class BlockSchedule:
    """The distribution of the pages of all layers: item i is block `i % blocks` of layer `i // blocks`."""

    layers: int
    count: int  # pages per layer
    block: int  # pages per item; the last of a layer may have fewer
    blocks: int  # blocks per layer
    cores: int
    steps: int  # items per core; the last core may have fewer

    @property
    def items(self) -> int:
        return self.layers * self.blocks

    def here(self) -> Any:
        """Returns the item of this grid step; it may be past the last."""
        return pl.program_id(0) * self.steps + pl.program_id(1)

    def first(self, item: Any) -> Any:
        return item % self.blocks * self.block

    def pages(self, item: Any) -> Any:
        return jnp.minimum(self.block, self.count - self.first(item))

    def spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Returns the spec of the item's block of an array [L, N, *shape]. Past the last item a core's block does not
        change."""

        def place(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
            item = jnp.minimum(core * self.steps + step, self.items - 1)
            return item // self.blocks, item % self.blocks, *[0] * len(shape)

        return pl.BlockSpec((1, self.block, *shape), place)


@partial(jax.jit, static_argnames=("wire", "digests", "block_pages", "cores", "interpret"))
def pack_kv_pages(
    pools: Sequence[Array],
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    block_pages: int | None = None,
    cores: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> PackedPages:
    """Computes `pallas_kernels.pack_kv_pages`; for wire "raw" also pools of 8-bit numbers."""
    pool = pools[0]
    _, kv_heads, parts, page_size, size = pool.shape
    cut = cut_pages(pool, len(pools), page_ids.shape[0], block_pages, cores)
    width = packed_size(size, wire)
    outs: list[Any] = [((kv_heads, parts, page_size, width), pool.dtype if wire == "raw" else STORED[wire])]
    outs += [((kv_heads, parts * page_size), jnp.float32)] if wire != "raw" else []
    outs += [((1, kv_heads), jnp.int32)] if digests else []
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(pool).manual_axis_type)
    weights = weights_of(parts * page_size, width)
    room: Any = pltpu.VMEM((2, cut.block, *pool.shape[1:]), pool.dtype)
    found = pl.pallas_call(
        partial(pack_item, cut=cut, wire=wire, digests=digests),
        out_shape=[shape((cut.layers, cut.count, *each), dtype) for each, dtype in outs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cut.cores, cut.steps),
            in_specs=[*map(whole_spec, weights), *[pl.BlockSpec(memory_space=pltpu.HBM)] * cut.layers],
            out_specs=[cut.spec(each) for each, _ in outs],
            scratch_shapes=[room, pltpu.SemaphoreType.DMA((2,))],
        ),
        compiler_params=compiler_params(pool),
        interpret=interpret,
        name="pack_kv_pages",
    )(page_ids, *weights, *pools)
    return PackedPages(found[0], None if wire == "raw" else found[1], as_digests(found[-1]) if digests else None)


def cut_pages(pool: Array, layers: int, count: int, block: int | None, cores: int | None) -> BlockSchedule:
    """Returns blocks of BLOCK_BYTES, or of `block` pages; every core gets a block."""
    block = min(block or max(1, BLOCK_BYTES // page_bytes(pool)), count)
    blocks = pl.cdiv(count, block)
    cores = min(cores or num_cores(), layers * blocks)
    return BlockSchedule(layers, count, block, blocks, cores, pl.cdiv(layers * blocks, cores))


def weights_of(rows: int, size: int) -> tuple[Array, Array]:
    """Returns i32 [rows, size], the weights of the words of a head's page, and [1, rows] of its scales: Mosaic sums
    signed numbers."""
    words, scales = page_weights(rows, size), scale_weights(rows, size)[None]
    return jnp.asarray(words.view(np.int32)), jnp.asarray(scales.view(np.int32))


def whole_spec(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *_: (0, 0))


def compiler_params(pool: Array) -> pltpu.CompilerParams:
    limit = None if page_bytes(pool) * 4 // pool.dtype.itemsize <= 2 * PAGE_BYTES else VMEM_BYTES
    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit)


def as_digests(sums: Array) -> Array:
    """Converts i32 [L, N, 1, Hkv] to u32 [L, N, Hkv]."""
    return lax.bitcast_convert_type(sums[:, :, 0], jnp.uint32)


def pack_item(ids_ref, page_weights_ref, scale_weights_ref, *refs, cut: BlockSchedule, wire: str, digests: bool):
    """Packs one block of one layer. `refs` are the pools, the results, the buffers of two blocks and their
    semaphores."""
    pools, outs, (room_ref, semaphores) = refs[: cut.layers], refs[cut.layers : -2], refs[-2:]
    item, step = cut.here(), pl.program_id(1)

    def copy(pool, page_id, item, page):
        return pltpu.make_async_copy(pool.at[page_id], room_ref.at[item % 2, page], semaphores.at[item % 2])

    def fetch(item):
        for layer, pool in enumerate(pools):

            @pl.when(item // cut.blocks == layer)
            def _(pool=pool):
                @pl.loop(0, cut.pages(item))
                def _(page):
                    copy(pool, ids_ref[cut.first(item) + page], item, page).start()

    pl.when(step == 0)(lambda: fetch(item))
    pl.when((step + 1 < cut.steps) & (item + 1 < cut.items))(lambda: fetch(item + 1))

    @pl.when(item < cut.items)
    def _():
        pl.loop(0, cut.pages(item))(lambda page: copy(pools[0], 0, item, page).wait())

        @pl.loop(0, cut.pages(item))
        def _(page):
            numbers, scales = room_ref[item % 2, page], None
            kv_heads, parts, page_size, size = numbers.shape
            if wire == "raw":
                outs[0][0, page] = numbers
                words = words_of(numbers.reshape(kv_heads, parts * page_size, size)) if digests else None
            else:
                rows = numbers.reshape(kv_heads, parts * page_size, size).astype(jnp.float32)
                words, scales = quantise(rows, wire)
                outs[0][0, page] = words.reshape(kv_heads, parts, page_size, -1).astype(outs[0].dtype)
                outs[1][0, page] = scales
            if digests:
                outs[-1][0, page] = digest(words, scales, page_weights_ref[...], scale_weights_ref[...])


def digest(words: Any, scales: Any, page_weights: Any, scale_weights: Any) -> Any:
    """Returns i32 [1, Hkv] for words [Hkv, C * page_size, D'], of 32 bits or 8-bit codes, and scales [Hkv, C *
    page_size]."""
    words = words & 0xFF if words.dtype == jnp.int32 else lax.bitcast_convert_type(words, jnp.int32)
    total = jnp.sum(jnp.sum(words * page_weights[None], axis=1), axis=-1)
    if scales is not None:
        total += jnp.sum(lax.bitcast_convert_type(words_of(scales), jnp.int32) * scale_weights, axis=-1)
    return total[None]
