"""Packs KV on Hopper GPUs (Pallas Mosaic GPU): one block for each head of each page of each layer.

A head's page is loaded to shared memory by one TMA copy and stored by another; digests are folded from shared memory,
`STEP` words at a time, meanwhile. A call packs a few layers, selected by the block's number. Pages that are quantised
in transfer are packed by XLA.

Compiled for an H100; no run has been measured.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LINE, Chip, plgpu
from pallas_kernels.wire_format import PackedPages, bits_of, page_weights

LAYERS = 8  # most layers of a call: each is a branch in the kernel
STEP = 32  # lines in registers at once, 32 words per thread
LOW_BITS = {1: 0xFF, 2: 0xFFFF}  # by bytes per number


@partial(jax.jit, static_argnames=("wire", "digests", "layers_of_call", "interpret"))
def pack_kv_pages(
    pools: Sequence[Array],
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    layers_of_call: int = LAYERS,
    interpret: Any = None,
) -> PackedPages:
    """Computes `pallas_kernels.pack_kv_pages` for arguments of `mosaic.carries`; interpret: Mosaic's interpreter's
    parameters."""
    assert wire == "raw", wire
    (_, kv_heads, parts, page_size, size), dtype = pools[0].shape, pools[0].dtype
    lines = [in_lines(pool) for pool in pools]
    count, shape = page_ids.shape[0], lines[0].shape[2:]
    packed: Any = lax.empty((len(pools), count, kv_heads, *shape), lines[0].dtype)
    sums: Any = lax.empty((len(pools), count, kv_heads), jnp.int32)
    for start in range(0, len(pools), layers_of_call):
        group = lines[start : start + layers_of_call]
        packed, sums = mosaic.in_place(
            partial(pack_page, start=start, digests=digests, chip=mosaic.chip_of(interpret)),
            [page_ids, weights_of(parts * page_size, size), *group],
            [packed, sums],
            grid={"pages": count, "heads": kv_heads, "layers": len(group)},
            scratch=[plgpu.SMEM(shape, lines[0].dtype), plgpu.Barrier(num_arrivals=1)],
            name="pack_kv_pages",
            interpret=interpret,
        )
    values = packed.reshape(len(pools), count, kv_heads, parts, page_size, size)
    folded = lax.bitcast_convert_type(sums, jnp.uint32) if digests else None
    return PackedPages(lax.bitcast_convert_type(values, dtype), None, folded)


def in_lines(pool: Array) -> Array:
    """Returns [P, Hkv, C, page_size, D] as the same bits in signed integers, [P, Hkv, lines, LINE]: a copy's dimensions
    are short."""
    bits = lax.bitcast_convert_type(bits_of(pool), jnp.dtype(f"int{8 * pool.dtype.itemsize}"))
    return bits.reshape(*pool.shape[:2], -1, LINE)


def weights_of(rows: int, size: int) -> Array:
    """Returns i32 [lines, LINE], the weights of the words of a head's page."""
    return jnp.asarray(page_weights(rows, size).view(np.int32).reshape(-1, LINE))


def pack_page(given: Sequence[Any], held: Sequence[Any], room, barrier, *, start: int, digests: bool, chip: type[Chip]):
    """Packs one head of one page of one layer."""
    page_ids_ref, weights_ref, *pools = given
    packed, sums = held
    page, head, layer = (lax.axis_index(name) for name in ("pages", "heads", "layers"))
    for index, pool in enumerate(pools):

        @pl.when(layer == index)
        def _(pool=pool):
            plgpu.copy_gmem_to_smem(pool.at[page_ids_ref[page], head], room, barrier)

    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(room, packed.at[start + layer, page, head])
    if digests:
        sums[start + layer, page, head] = fold(room, weights_ref, chip)
    plgpu.wait_smem_to_gmem(0)


def fold(room: Any, weights_ref: Any, chip: type[Chip]) -> Array:
    """Returns i32: the digest of a head's page in shared memory."""
    lines = room.shape[0]
    step = next(each for each in range(min(STEP, lines), 0, -1) if lines % each == 0)

    def add(index, total):
        here = pl.ds(index * step, step)
        words = chip.words(room.at[here])
        low = LOW_BITS.get(room.dtype.itemsize)
        words = words ^ lax.shift_right_logical(words, jnp.full_like(words, 16)) if low is None else words & low
        return total + jnp.sum(words * chip.words(weights_ref.at[here]))

    return lax.fori_loop(0, lines // step, add, jnp.int32(0))
