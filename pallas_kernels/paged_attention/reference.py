"""Decode attention, the definition: gathers everything, masks, softmax. Slow and plain on purpose."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.quantized import QuantizedPages, dequantize


def paged_attention(
    args: PagedAttentionArgs,
) -> Array:
    """Computes q [B, Hq, D], kv_pages [P, Hkv, C, page_size, D], page_table i32[B, W], lengths i32[B] -> [B, Hq, D]. V
    is the last part. If K is the only part, V is the first `value_size` numbers of K."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    kv_pages = dequantize(kv_pages) if isinstance(kv_pages, QuantizedPages) else kv_pages
    slots, heads, _ = q.shape
    groups = heads // kv_pages.shape[1]
    held = jnp.moveaxis(kv_pages[page_table], (2, 3), (1, 2)).astype(jnp.float32)  # [B, Hkv, C, W, page_size, D]
    held = jnp.repeat(held.reshape(*held.shape[:3], -1, held.shape[-1]), groups, axis=1)  # [B, Hq, C, S, D]
    logits = jnp.einsum("bhd,bhsd->bhs", q.astype(jnp.float32), held[:, :, 0]) * args.scale
    if args.soft_cap is not None:
        logits = args.soft_cap * jnp.tanh(logits / args.soft_cap)
    position, length = jnp.arange(logits.shape[-1])[None, None, :], lengths[:, None, None]
    seen = position < length if args.window is None else (position < length) & (position >= length - args.window)
    sink = (
        jnp.full((slots, heads, 1), -jnp.inf) if sinks is None else jnp.broadcast_to(sinks[:, None], (slots, heads, 1))
    )
    logits = jnp.concatenate([jnp.where(seen, logits, -jnp.inf), sink.astype(jnp.float32)], axis=-1)
    weights = jnp.where(length > 0, jax.nn.softmax(logits, axis=-1)[..., :-1], 0.0)
    values = jnp.where(seen[..., None], held[:, :, -1, :, : args.value_size], 0.0)
    return jnp.einsum("bhs,bhsd->bhd", weights, values).astype(q.dtype)
