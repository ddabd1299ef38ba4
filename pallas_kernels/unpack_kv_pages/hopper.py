"""Unpacks KV on Hopper GPUs (Pallas Mosaic GPU): one block for each head of each packed page, pools in place.

The inverse of `pack_kv_pages.hopper`; pages for the null page are padding and are never written. Pages whose dtype
changes on arrival are unpacked by XLA.

Compiled for an H100; no run has been measured.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LINE, Chip, plgpu
from pallas_kernels.pack_kv_pages.hopper import LAYERS, fold, in_lines, weights_of
from pallas_kernels.wire_format import PackedPages


@partial(jax.jit, static_argnames=("wire", "digests", "layers_of_call", "interpret"))
def unpack_kv_pages(
    pools: Sequence[Array],
    packed: PackedPages,
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    layers_of_call: int = LAYERS,
    interpret: Any = None,
) -> tuple[list[Array], Array | None]:
    """Computes `pallas_kernels.unpack_kv_pages` for arguments of `mosaic.carries`; page 0 is not changed. interpret:
    parameters of Mosaic's interpreter."""
    assert wire == "raw" and packed.values.dtype == pools[0].dtype, (wire, packed.values.dtype)
    layers, count, kv_heads, parts, page_size, size = packed.values.shape
    arrived = in_lines(packed.values.reshape(layers * count, *packed.values.shape[2:]))
    arrived = arrived.reshape(layers, count, kv_heads, -1, LINE)
    sums: Any = lax.empty((layers, count, kv_heads), jnp.int32)
    written = []
    for start in range(0, layers, layers_of_call):
        group = [in_lines(pool) for pool in pools[start : start + layers_of_call]]
        *found, sums = mosaic.in_place(
            partial(unpack_page, start=start, digests=digests, chip=mosaic.chip_of(interpret)),
            [page_ids, weights_of(parts * page_size, size), arrived],
            [*group, sums],
            grid={"pages": count, "heads": kv_heads, "layers": len(group)},
            scratch=[plgpu.SMEM(arrived.shape[3:], arrived.dtype), plgpu.Barrier(num_arrivals=1)],
            name="unpack_kv_pages",
            interpret=interpret,
        )
        written += [lax.bitcast_convert_type(pool.reshape(pools[0].shape), pools[0].dtype) for pool in found]
    return written, lax.bitcast_convert_type(sums, jnp.uint32) if digests else None


def unpack_page(
    given: Sequence[Any], held: Sequence[Any], room, barrier, *, start: int, digests: bool, chip: type[Chip]
):
    """Unpacks one head of one packed page."""
    page_ids_ref, weights_ref, arrived = given
    *pools, sums = held
    page, head, layer = (lax.axis_index(name) for name in ("pages", "heads", "layers"))
    page_id = page_ids_ref[page]
    plgpu.copy_gmem_to_smem(arrived.at[start + layer, page, head], room, barrier)
    plgpu.barrier_wait(barrier)
    for index, pool in enumerate(pools):

        @pl.when((layer == index) & (page_id != 0))
        def _(pool=pool):
            plgpu.copy_smem_to_gmem(room, pool.at[page_id, head])

    if digests:
        sums[start + layer, page, head] = fold(room, weights_ref, chip)
    plgpu.wait_smem_to_gmem(0)
