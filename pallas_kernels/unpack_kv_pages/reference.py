"""Unpacking KV, the definition: the digest of the received pages, rows dequantised, one assignment per layer."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.pack_kv_pages.reference import digest_pages
from pallas_kernels.wire_format import PackedPages


def unpack_kv_pages(
    pools: Sequence[Array], packed: PackedPages, page_ids: Array, *, wire: str
) -> tuple[list[Array], Array]:
    """Unpacks pages at i32[N] into L pools [P, Hkv, C, page_size, D] -> the pools, and u32 [L, N, Hkv]."""
    values, scales, _ = packed
    pages = values if scales is None else dequantise(values, scales, wire)
    digests = digest_pages(values, scales)
    return [pool.at[page_ids].set(part.astype(pool.dtype)) for pool, part in zip(pools, pages, strict=True)], digests


def dequantise(values: Array, scales: Array, wire: str) -> Array:
    """Converts codes [..., C, page_size, D'] and scales f32 [..., C * page_size] to f32 [..., C, page_size, D]."""
    if wire == "fp8":
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    if wire == "int4":
        signed = lax.bitcast_convert_type(values, jnp.int8)
        values = jnp.concatenate([signed << 4 >> 4, signed >> 4], axis=-1)
    return values.astype(jnp.float32) * scales.reshape(*values.shape[:-1], 1)
