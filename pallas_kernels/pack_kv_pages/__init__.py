"""Packs a layer group's pages into one buffer for transfer. Checks the arguments, picks the platform's code."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.pack_kv_pages import hopper, reference, tpu, xla
from pallas_kernels.platforms import on_platform, rows_of, takes_mosaic
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.wire_format import STORED, PackedPages, Pool, check_pools, fold_scales


def on_gpu(pools: Sequence[Array], page_ids: Array, *, wire: str, digests: bool = True) -> PackedPages:
    """Packs by Mosaic GPU's kernel if the GPU and the arguments allow it, else by the definition under XLA.
    `xla.pack_kv_pages` is a loop over few pages at a time, for a CPU's cache: on a GPU each step would be a launch."""
    dtype = pools[0].dtype if wire == "raw" else STORED[wire]
    if takes_mosaic("pack_kv_pages", rows_of(pools[0], page_ids, dtype), pools[0]):
        return hopper.pack_kv_pages(pools, page_ids, wire=wire, digests=digests)
    packed = reference.pack_kv_pages(pools, page_ids, wire=wire)
    return packed if digests else packed._replace(digests=None)


def pack_kv_pages(pools: Sequence[Pool], page_ids: Array, *, wire: str = "raw", digests: bool = True) -> PackedPages:
    """Packs page `page_ids[n]` of every pool contiguously, quantised if the wire says so.

    pools: one per layer, L in all, [P, Hkv, C, page_size, D] of f32 or bf16, or `QuantizedPages`, which are sent raw.
    page_ids: i32[N], N at least 1; page 0 for padding. wire: "raw" (the pool's own bits), or "int8", "fp8" (e4m3),
    "int4" with a scale for each row: a token's K or V of a head. With `top` the row's largest magnitude, a number is
    off by at most top / 254 in int8, top / 14 in int4, and in fp8 by 1 / 16 of itself or top / 2**18, whichever is
    more. digests: whether to compute them; they depend only on what is sent (`reference.digest_pages`). Raises
    KernelError for arguments that do not fit.
    """
    check_pools(pools, page_ids, wire)
    layers: Any = list(pools)  # either all float pools or all quantised ones
    if isinstance(layers[0], QuantizedPages):
        return pack_quantized(layers, page_ids, digests)
    return pack_numbers(layers, page_ids, wire, digests)


def pack_numbers(pools: Sequence[Array], page_ids: Array, wire: str, digests: bool) -> PackedPages:
    """Packs pools of one dtype: floats, or for wire "raw" the values of quantised ones."""
    options = {"wire": wire, "digests": digests}
    return on_platform(
        list(pools),
        jnp.asarray(page_ids),
        cuda=partial(on_gpu, **options),
        tpu=partial(tpu.pack_kv_pages, **options),
        default=partial(xla.pack_kv_pages, **options),
    )


def pack_quantized(pools: Sequence[QuantizedPages], page_ids: Array, digests: bool) -> PackedPages:
    """Packs values by the platform's code; scales, a small part, by XLA's gather."""
    packed = pack_numbers([pool.values for pool in pools], page_ids, "raw", digests)
    scales = jnp.stack([pool.scales[page_ids] for pool in pools])
    if packed.digests is None:
        return packed._replace(scales=scales)
    folded = packed.digests + fold_scales(scales, packed.values.shape[-1])
    return packed._replace(scales=scales, digests=folded)


def digest_pages(values: Array, scales: Array | None) -> Array:
    """Returns digests of received pages, u32 [L, N, Hkv]: `values` [L, N, Hkv, C, page_size, D'] and `scales` as
    packed. The definition makes one pass over the bytes if XLA compiles it for a TPU or GPU; on a CPU it would store
    words."""
    return on_platform(
        values, scales, cuda=reference.digest_pages, tpu=reference.digest_pages, default=xla.digest_pages
    )
