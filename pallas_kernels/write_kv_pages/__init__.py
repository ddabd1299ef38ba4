"""New K and V into their pages, in place. Checks the arguments, picks the platform's code."""

import jax
from jax import Array

from pallas_kernels.checks import check_ints, check_pool, require
from pallas_kernels.write_kv_pages import tpu, xla


def write_kv_pages(kv_pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """The pool with row t of k and v at token `offsets[t]` of page `page_ids[t]`.

    kv_pages: [P, Hkv, 2, page_size, D]; updated in place where the caller's jit donates it and nobody else reads it.
    k, v: [T, Hkv, D], any float, stored in the pool's dtype. page_ids, offsets: i32[T]; rows that must not be kept
    carry page 0. A place named twice (page 0 apart) holds either row.
    """
    check_pool(kv_pages)
    rows = (k.shape[0], kv_pages.shape[1], kv_pages.shape[4])
    require(k.shape == rows, f"k must be [T, {rows[1]}, {rows[2]}] for this pool, got {k.shape}")
    require(v.shape == rows, f"v must have k's shape {rows}, got {v.shape}")
    check_ints("page_ids", page_ids, rows[:1])
    check_ints("offsets", offsets, rows[:1])
    return jax.lax.platform_dependent(
        kv_pages, k, v, page_ids, offsets, tpu=tpu.write_kv_pages, default=xla.write_kv_pages
    )
