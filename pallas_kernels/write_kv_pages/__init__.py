"""Writes new K and V into their pages, in place. Checks the arguments, picks the platform's code."""

from functools import partial
from typing import Any, TypeVar

import jax
from jax import Array

from pallas_kernels.checks import check_contents, check_ints, check_places, check_pool, require
from pallas_kernels.platforms import on_platform, takes_mosaic
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.write_kv_pages import hopper, tpu, xla

Pool = TypeVar("Pool", Array, QuantizedPages)


def on_gpu(kv_pages: Pool, k: Array, *rest: Any) -> Any:
    """Writes by Mosaic GPU's kernel if the GPU and the arguments allow it, else by XLA's scatter."""
    code = hopper if takes_mosaic("write_kv_pages", k, kv_pages) else xla
    return code.write_kv_pages(kv_pages, k, *rest)


def write_kv_pages(
    kv_pages: Pool, k: Array, v: Array | None, page_ids: Array, offsets: Array, *, debug: bool = False
) -> Pool:
    """Returns the pool with row t of k and v at token `offsets[t]` of page `page_ids[t]`.

    kv_pages: [P, Hkv, C, page_size, D] or QuantizedPages; updated in place if the caller's jit donates it and no other
    computation reads it. k, v: [T, Hkv, D], any float, stored in the pool's dtype; quantised by `quantize_rows`, each
    row alone; v is None for pages of one part (C = 1), and only for those. page_ids, offsets: i32[T]; rows that must
    not be kept have page 0. A token index named twice (page 0 apart) holds either row. debug: refuses indices outside
    the pool, by a call to the host under jit. Raises KernelError with both values if arguments do not fit each other.
    """
    check_pool(kv_pages)
    pages, kv_heads, parts, page_size, size = stored(kv_pages).shape
    rows = (k.shape[0], kv_heads, size)
    require(k.shape == rows, f"k must be [T, {rows[1]}, {rows[2]}] for this pool, got {k.shape}")
    require((v is None) == (parts == 1), f"v must be {'None' if parts == 1 else 'given'} for kv_pages of {parts} parts")
    require(v is None or v.shape == rows, f"v must have k's shape {rows}, got {None if v is None else v.shape}")
    check_ints("page_ids", page_ids, rows[:1])
    check_ints("offsets", offsets, rows[:1])
    if debug:
        rule = partial(check_places, pages=pages, page_size=page_size)
        page_ids, offsets = check_contents(rule, page_ids, offsets)
    return _on_its_platform(kv_pages, k, v, page_ids, offsets)


@partial(jax.jit, inline=True)
def _on_its_platform(kv_pages: Pool, k: Array, v: Array | None, page_ids: Array, offsets: Array) -> Pool:
    """Traces the code of each platform once for all layers and programs of these shapes."""
    written: Any = on_platform(
        kv_pages,
        k,
        v,
        page_ids,
        offsets,
        tpu=tpu.write_kv_pages,
        cuda=on_gpu,
        default=xla.write_kv_pages,
    )
    return written
