"""Writing KV for XLA: one scatter of K and V together, which XLA's CPU backend runs in place on a donated f32 pool.

(A bf16 pool is converted whole on the CPU, tens of milliseconds for 64 MB: keep f32 pools there.)
"""

import jax.numpy as jnp
from jax import Array


def write_kv_pages(kv_pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    rows = jnp.stack([k, v], axis=2).astype(kv_pages.dtype)  # [T, Hkv, 2, D]
    return kv_pages.at[page_ids, :, :, offsets].set(rows)
