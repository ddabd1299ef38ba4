"""KV stored small: int8 or fp8 (e4m3) numbers with one f32 scale per (page, head, K or V, token).

Symmetric, the scale is the row's largest magnitude over the type's largest number (as KIVI's per-token values, Liu et
al. 2024, section 3); a row of zeros has scale 0. Rows are quantised alone, so that writing a token never touches its
neighbours, and a page keeps its meaning wherever it is moved.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class QuantizedPages(NamedTuple):
    """A pool of quantised pages: what the float pool [P, Hkv, 2, page_size, D] is to f32 and bf16."""

    values: Array  # int8 or float8_e4m3fn [P, Hkv, 2, page_size, D]
    scales: Array  # f32 [P, Hkv, 2, page_size]: a number is values * scales


def quantize_rows(rows: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Float [..., D] -> values [..., D] of `dtype` (int8, float8_e4m3fn) and scales f32 [...]."""
    largest = LARGEST[jnp.dtype(dtype).name]
    rows = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(rows), axis=-1) / largest
    scaled = jnp.clip(rows / jnp.where(scales > 0, scales, 1.0)[..., None], -largest, largest)
    values = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return values.astype(dtype), scales


def quantize_pages(kv_pages: Array, dtype: jnp.dtype) -> QuantizedPages:
    """A float pool, every token quantised."""
    return QuantizedPages(*quantize_rows(kv_pages, dtype))


def dequantize(pages: QuantizedPages) -> Array:
    """f32 [P, Hkv, 2, page_size, D]."""
    return pages.values.astype(jnp.float32) * pages.scales[..., None]
