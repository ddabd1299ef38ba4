"""Writes KV for XLA: one scatter of K and V together, which XLA's CPU backend runs in place on a donated f32 pool.

On the CPU, XLA converts a bf16 or fp8 pool whole, tens of milliseconds for 64 MB: see `platforms.moved_as_stored`.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantized import QuantizedPages, quantize_rows


def write_kv_pages(
    kv_pages: Array | QuantizedPages, k: Array, v: Array | None, page_ids: Array, offsets: Array
) -> Array | QuantizedPages:
    rows = joined(k, v)
    if isinstance(kv_pages, QuantizedPages):
        values, scales = quantize_rows(rows, kv_pages.values.dtype)
        parts, page_size = kv_pages.values.shape[2:4]
        places = (offsets[:, None] + jnp.arange(parts, dtype=offsets.dtype)[None, :] * page_size)[:, None]  # [T, 1, C]
        heads = jnp.arange(k.shape[1])[:, None]
        return QuantizedPages(
            kv_pages.values.at[page_ids, :, :, offsets].set(values),
            kv_pages.scales.at[page_ids[:, None, None], heads, places].set(scales),
        )
    return kv_pages.at[page_ids, :, :, offsets].set(rows.astype(kv_pages.dtype))


def joined(k: Array, v: Array | None) -> Array:
    """Returns a token's K and V of a head next to each other, [T, Hkv, C, D]; v is None for pages of one part."""
    return jnp.stack([k] if v is None else [k, v], axis=2)
