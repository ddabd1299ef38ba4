"""Writing KV for XLA: one scatter of K and V together, which XLA's CPU backend runs in place on a donated f32 pool.

(A bf16 or fp8 pool is converted whole on the CPU, tens of milliseconds for 64 MB: keep f32 or int8 pools there.)
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantized import QuantizedPages, quantize_rows


def write_kv_pages(
    kv_pages: Array | QuantizedPages, k: Array, v: Array, page_ids: Array, offsets: Array
) -> Array | QuantizedPages:
    rows = jnp.stack([k, v], axis=2)  # [T, Hkv, 2, D]
    if isinstance(kv_pages, QuantizedPages):
        values, scales = quantize_rows(rows, kv_pages.values.dtype)
        places = jnp.stack([offsets, offsets + kv_pages.values.shape[3]], axis=1)[:, None]  # [T, 1, 2]
        heads = jnp.arange(k.shape[1])[:, None]
        return QuantizedPages(
            kv_pages.values.at[page_ids, :, :, offsets].set(values),
            kv_pages.scales.at[page_ids[:, None, None], heads, places].set(scales),
        )
    return kv_pages.at[page_ids, :, :, offsets].set(rows.astype(kv_pages.dtype))
