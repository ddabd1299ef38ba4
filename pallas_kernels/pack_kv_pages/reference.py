"""Packing KV, the definition: gathers pages, quantises rows one by one, and computes the digest of the result."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.wire_format import LARGEST, TINY, PackedPages, column_weights, over, row_weights, words_of


def pack_kv_pages(pools: Sequence[Array], page_ids: Array, *, wire: str) -> PackedPages:
    """Packs the pages i32[N] of L pools [P, Hkv, C, page_size, D]."""
    pages = jnp.stack([pool[page_ids] for pool in pools])
    values, scales = (pages, None) if wire == "raw" else quantise(pages, wire)
    return PackedPages(values, scales, digest_pages(values, scales))


def quantise(pages: Array, wire: str) -> tuple[Array, Array]:
    """Quantises floats [..., C, page_size, D] to codes [..., C, page_size, D'] and scales f32 [..., C * page_size].
    int4 stores number d of a row in the low nibble of byte d, number d + D / 2 in its high one."""
    pages = pages.astype(jnp.float32)
    top = jnp.maximum(jnp.max(jnp.abs(pages), axis=-1), TINY)
    scaled = jnp.clip(pages * (LARGEST[wire] / top)[..., None], -LARGEST[wire], LARGEST[wire])
    scales = (top * jnp.float32(1 / LARGEST[wire])).reshape(*top.shape[:-2], -1)
    if wire == "fp8":
        return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8), scales
    codes = jnp.round(scaled).astype(jnp.int8)
    if wire == "int8":
        return codes, scales
    low, high = jnp.split(lax.bitcast_convert_type(codes, jnp.uint8) & 0xF, 2, axis=-1)
    return low | high << 4, scales


def digest_pages(values: Array, scales: Array | None) -> Array:
    """Returns u32 [...], one digest per head's page, for values [..., C, page_size, D'] and scales f32 [..., C *
    page_size].

    Multilinear hashing mod 2**32 (Lemire and Kaser 2014) with fixed odd weights of row times column: any change of one
    word changes the sum, and exchanged tokens, or K and V, do so except by chance. Page, layer and head numbers take no
    part, so a page keeps its digest wherever it is moved and however heads and layers are split.
    """
    columns = column_weights(values.shape[-1])
    rows = jnp.sum(words_of(values) * over(columns[:-1], values), axis=-1, dtype=jnp.uint32)
    rows = rows.reshape(*rows.shape[:-2], -1)
    rows = rows if scales is None else rows + words_of(scales) * columns[-1]
    return jnp.sum(rows * over(row_weights(rows.shape[-1]), rows), axis=-1, dtype=jnp.uint32)
