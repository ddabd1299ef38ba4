"""Quantised KV pages: int8 or fp8 (e4m3) numbers with one f32 scale per (page, head, K or V, token).

Quantisation is symmetric: the scale is the row's largest magnitude over the type's largest number (as KIVI's per-token
values, Liu et al. 2024, section 3). A row of zeros has scale 0. Rows are quantised one by one, so writing a token never
changes its neighbours, and a page can be moved.

The scales of a head's page are one row, K's and then V's. A TPU pads the last dimension to 128 lanes: as [2, page_size]
the scales of a page of 16 tokens, 8 heads, would take 8 KB beside 32 KB of numbers. As one row of 2 * page_size they
take 4 KB, and from pages of 64 tokens on there is no padding.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class QuantizedPages(NamedTuple):
    """A pool of quantised pages, in place of the float pool [P, Hkv, C, page_size, D]."""

    values: Array  # int8 or float8_e4m3fn [P, Hkv, C, page_size, D]
    scales: Array  # f32 [P, Hkv, C * page_size], K's and then V's: a number is values * scales


def stored(kv_pages: Array | QuantizedPages) -> Array:
    """Returns the numbers of a pool without their scales, [P, Hkv, C, page_size, D]."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    """Returns the dtype, of f32 and bf16, that holds the numbers of both."""
    return max(jnp.dtype(one), jnp.dtype(other), key=lambda dtype: dtype.itemsize)


def quantize_rows(rows: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Quantises float [..., D] to values [..., D] of `dtype` (int8, float8_e4m3fn) and scales f32 [...]."""
    largest = LARGEST[jnp.dtype(dtype).name]
    rows = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(rows), axis=-1) / largest
    scaled = jnp.clip(rows / jnp.where(scales > 0, scales, 1.0)[..., None], -largest, largest)
    values = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return values.astype(dtype), scales


def quantize_pages(kv_pages: Array, dtype: jnp.dtype) -> QuantizedPages:
    """Quantises every token of a float pool."""
    values, scales = quantize_rows(kv_pages, dtype)
    return QuantizedPages(values, scales.reshape(*scales.shape[:2], -1))


def dequantize(pages: QuantizedPages) -> Array:
    """Returns the numbers as f32 [P, Hkv, C, page_size, D]."""
    return pages.values.astype(jnp.float32) * pages.scales.reshape(*pages.values.shape[:-1], 1)
