"""Writing KV, the definition: K and V each by one indexed assignment."""

from jax import Array

from pallas_kernels.quantized import QuantizedPages, quantize_rows


def write_kv_pages(
    kv_pages: Array | QuantizedPages, k: Array, v: Array, page_ids: Array, offsets: Array
) -> Array | QuantizedPages:
    """kv_pages [P, Hkv, 2, page_size, D], k and v [T, Hkv, D], page_ids and offsets i32[T] -> the pool."""
    if not isinstance(kv_pages, QuantizedPages):
        return assigned(kv_pages, k, v, page_ids, offsets)
    (k, k_scales), (v, v_scales) = (quantize_rows(rows, kv_pages.values.dtype) for rows in (k, v))
    scales = kv_pages.scales.reshape(kv_pages.values.shape[:-1])
    return QuantizedPages(
        assigned(kv_pages.values, k, v, page_ids, offsets),
        assigned(scales, k_scales, v_scales, page_ids, offsets).reshape(kv_pages.scales.shape),
    )


def assigned(pool: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """As above for numbers [P, Hkv, 2, page_size, D] or their scales, without D."""
    pool = pool.at[page_ids, :, 0, offsets].set(k.astype(pool.dtype))
    return pool.at[page_ids, :, 1, offsets].set(v.astype(pool.dtype))
