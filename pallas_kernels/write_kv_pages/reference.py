"""Writing KV, the definition: K and V each by one indexed assignment."""

from collections.abc import Sequence

from jax import Array

from pallas_kernels.quantized import QuantizedPages, quantize_rows


def write_kv_pages(
    kv_pages: Array | QuantizedPages, k: Array, v: Array | None, page_ids: Array, offsets: Array
) -> Array | QuantizedPages:
    """Writes k and v [T, Hkv, D] at page_ids and offsets i32[T] into kv_pages [P, Hkv, C, page_size, D]."""
    parts = [k] if v is None else [k, v]
    if not isinstance(kv_pages, QuantizedPages):
        return assigned(kv_pages, parts, page_ids, offsets)
    values, factors = zip(*(quantize_rows(rows, kv_pages.values.dtype) for rows in parts), strict=True)
    scales = kv_pages.scales.reshape(kv_pages.values.shape[:-1])
    return QuantizedPages(
        assigned(kv_pages.values, values, page_ids, offsets),
        assigned(scales, factors, page_ids, offsets).reshape(kv_pages.scales.shape),
    )


def assigned(pool: Array, parts: Sequence[Array], page_ids: Array, offsets: Array) -> Array:
    """Writes numbers [P, Hkv, C, page_size, D], or their scales without D, as `write_kv_pages`."""
    for at, rows in enumerate(parts):
        pool = pool.at[page_ids, :, at, offsets].set(rows.astype(pool.dtype))
    return pool
