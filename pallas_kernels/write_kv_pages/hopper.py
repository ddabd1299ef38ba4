"""Writes KV on Hopper GPUs (Pallas Mosaic GPU): one block per token copies its rows by TMA into their page.

The rows of all heads are one copy in and one out, for any shape of page, without registers. Scales of quantised pages
are single numbers, too small for a copy: they are stored one by one. Rows for the null page are skipped. Two blocks
that name one token index race: each number is then of either row.

Compiled for an H100; no run has been measured.
"""

from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.quantized import QuantizedPages, quantize_rows, stored
from pallas_kernels.write_kv_pages import xla


@partial(jax.jit, static_argnames=("interpret",))
def write_kv_pages(
    kv_pages: Array | QuantizedPages,
    k: Array,
    v: Array | None,
    page_ids: Array,
    offsets: Array,
    *,
    interpret: Any = None,
) -> Array | QuantizedPages:
    """Computes `pallas_kernels.write_kv_pages` for arguments of `mosaic.copies`; page 0 is not changed. interpret:
    parameters of Mosaic's interpreter."""
    rows: Any = xla.joined(k, v)
    rows = (
        QuantizedPages(*quantize_rows(rows, kv_pages.values.dtype))
        if isinstance(kv_pages, QuantizedPages)
        else rows.astype(kv_pages.dtype)
    )
    _, kv_heads, parts, page_size, size = stored(kv_pages).shape
    room = plgpu.SMEM((kv_heads, parts, size), stored(kv_pages).dtype)
    written: Any = mosaic.in_place(
        partial(write_token, page_size=page_size),
        [*jax.tree.leaves(rows), page_ids, offsets],
        jax.tree.leaves(kv_pages),
        grid={"tokens": k.shape[0]},
        scratch=[room, plgpu.Barrier(num_arrivals=1)],
        name="write_kv_pages",
        interpret=interpret,
    )
    return jax.tree.unflatten(jax.tree.structure(kv_pages), written)


def write_token(rows: list[Any], pools: list[Any], room, barrier, *, page_size: int):
    """Writes one token. The pools are the numbers and, if they are quantised, their scales."""
    *arrived, page_ids_ref, offsets_ref = rows
    token = lax.axis_index("tokens")
    page, offset = page_ids_ref[token], offsets_ref[token]

    @pl.when(page != 0)
    def _():
        plgpu.copy_gmem_to_smem(arrived[0].at[token], room, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(room, pools[0].at[page, :, :, offset])
        for scales, held in zip(arrived[1:], pools[1:], strict=True):
            for head in range(scales.shape[1]):
                for part in range(scales.shape[2]):
                    held[page, head, part * page_size + offset] = scales[token, head, part]
        plgpu.wait_smem_to_gmem(0)
