"""Decode attention for XLA: pages are gathered by the table and read by two batched products."""

import jax.numpy as jnp
from jax import Array


def paged_attention(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    lengths: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    slots, heads, size = q.shape
    kv_heads, page_size = kv_pages.shape[1], kv_pages.shape[3]
    grouped = (q.astype(jnp.float32) * scale).reshape(slots, kv_heads, heads // kv_heads, size)
    pages = kv_pages[page_table].astype(jnp.float32)  # [B, W, Hkv, 2, page_size, D]
    logits = jnp.einsum("bhgd,bwhsd->bhgws", grouped, pages[:, :, :, 0])
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    position = jnp.arange(page_table.shape[1] * page_size).reshape(-1, page_size)
    length = lengths[:, None, None, None, None]
    seen = position < length
    if window is not None:
        seen &= position >= length - window
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=(3, 4), keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1))
    weights = jnp.where(seen, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=(3, 4))
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32).reshape(kv_heads, -1) - top[..., 0, 0])
    mixed = jnp.einsum("bhgws,bwhsd->bhgd", weights, pages[:, :, :, 1])
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed.reshape(slots, heads, size).astype(q.dtype)
