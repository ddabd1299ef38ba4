"""Writing KV, the definition: K and V each by one indexed assignment."""

from jax import Array


def write_kv_pages(kv_pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """kv_pages [P, Hkv, 2, page_size, D], k and v [T, Hkv, D], page_ids and offsets i32[T] -> the pool."""
    kv_pages = kv_pages.at[page_ids, :, 0, offsets].set(k.astype(kv_pages.dtype))
    return kv_pages.at[page_ids, :, 1, offsets].set(v.astype(kv_pages.dtype))
