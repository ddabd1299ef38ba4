"""Packs KV for XLA, written for the CPU: a few pages of every layer at a time, so that intermediates stay cached.

Raw pages of all layers are one fused gather, without a further copy, and digests are folded from its result, page by
page. Codes are made by a loop whose step gathers `STEP_BYTES` and finishes with them. Over whole buffers instead, XLA's
CPU backend stores their words and f32 copies, and allocating that memory costs more than the arithmetic (32 MB to int8:
10 ms against 86; their digests: 3 ms of CPU against 16). A loop that reads a bf16 pool makes XLA convert all of it, so
such pages are gathered first, as bits.
"""

from collections.abc import Sequence
from math import gcd, prod

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.wire_format import (
    STORED,
    PackedPages,
    bits_of,
    floats_of,
    fold_scales,
    over,
    packed_size,
    page_weights,
    quantise,
    words_of,
)

STEP_BYTES = 1 << 19  # bytes of f32 pages: half of a core's second-level cache
LANES = 512  # parallel sums of a page's words


def pack_kv_pages(pools: Sequence[Array], page_ids: Array, *, wire: str, digests: bool = True) -> PackedPages:
    """Computes `pallas_kernels.pack_kv_pages`, see there."""
    dtype, count = pools[0].dtype, page_ids.shape[0]
    sources, ids = [pool if dtype.itemsize == 4 else bits_of(pool) for pool in pools], page_ids
    if wire == "raw":
        raw, folded = jnp.stack([gather(source, page_ids) for source in sources]), None
        if digests:
            raw, folded = and_digests(raw, None)
        return PackedPages(lax.bitcast_convert_type(raw, dtype), None, folded)
    if dtype.itemsize < 4:
        sources, ids = [gather(source, page_ids) for source in sources], jnp.arange(count, dtype=jnp.int32)
    step = pages_of_step(pools[0].shape, count)

    def finish(pages: Array) -> tuple[Array, ...]:
        values, scales = lax.optimization_barrier(quantise_pages(floats_of(pages, dtype), wire))
        return (values, scales, fold(values, scales)) if digests else (values, scales)

    def do_step(index: Array, kept: list[Array]) -> list[Array]:
        now = lax.dynamic_slice_in_dim(
            ids, index * step, step
        )  # the last step begins early enough to end with the list
        for layer, source in enumerate(sources):
            parts = finish(lax.optimization_barrier(gather(source, now)))
            kept = [put(old, part, layer, index * step) for old, part in zip(kept, parts, strict=True)]
        return kept

    kept = lax.fori_loop(0, -(-count // step), do_step, rooms(pools, count, wire, digests))
    return PackedPages(kept[0], kept[1], kept[2] if digests else None)


def gather(pool: Array, page_ids: Array) -> Array:
    """Gathers [P, Hkv, C, page_size, D] at i32[N] -> [N, Hkv, C, page_size, D], by flat rows of a head's page each.
    XLA's CPU loop over a long last dimension is the fastest, and the indices are computed once, not once per
    element."""
    rows = page_ids[:, None] * pool.shape[1] + jnp.arange(pool.shape[1])[None, :]
    rows = lax.optimization_barrier(rows.reshape(-1))
    flat = pool.reshape(pool.shape[0] * pool.shape[1], -1)
    return flat.at[rows].get(mode="promise_in_bounds").reshape(page_ids.shape[0], *pool.shape[1:])


def pages_of_step(shape: tuple[int, ...], count: int) -> int:
    """Returns the pages of a pool of `shape` per step, at most `count`."""
    return max(1, min(STEP_BYTES // (prod(shape[1:]) * 4), count))


def rooms(pools: Sequence[Array], count: int, wire: str, digests: bool) -> list[Array]:
    """Returns the arrays that the loop fills: codes and scales [L, N, ...], digests u32 [L, N, Hkv]. Made from a pool,
    so that inside `shard_map` their shards differ as those of the pool do."""
    _, kv_heads, parts, page_size, size = pools[0].shape
    rows = kv_heads, parts * page_size
    found = [((kv_heads, parts, page_size, packed_size(size, wire)), STORED[wire]), (rows, jnp.float32)]
    if digests:
        found.append(((kv_heads,), jnp.uint32))
    zero = jnp.zeros_like(pools[0][0, 0, 0, 0, 0])
    return [jnp.broadcast_to(zero.astype(dtype), (len(pools), count, *shape)) for shape, dtype in found]


def put(whole: Array, part: Array, layer: int, page: Array) -> Array:
    return lax.dynamic_update_slice(whole, part[None], (layer, page, *[0] * (whole.ndim - 2)))


def quantise_pages(pages: Array, wire: str) -> tuple[Array, Array]:
    """Quantises f32 [..., D] pages to codes [..., C, page_size, D'] and scales f32 [..., C * page_size]."""
    *heads, parts, page_size, size = pages.shape
    codes, scales = quantise(pages.reshape(*heads, parts * page_size, size), wire)
    return codes.reshape(*heads, parts, page_size, codes.shape[-1]).astype(STORED[wire]), scales


def digest_pages(values: Array, scales: Array | None) -> Array:
    """Computes `reference.digest_pages` of [L, N, Hkv, ...], one page after another."""
    return and_digests(values if values.dtype.itemsize == 4 else bits_of(values), scales)[1]


def and_digests(values: Array, scales: Array | None) -> tuple[Array, Array]:
    """Returns the arguments and their digests. Values pass through the loop: XLA would copy a result that is also
    read."""
    layers, count, kv_heads = values.shape[:3]

    def fold_page(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        held, folded = carry
        at = index // count, index % count
        words = fold(one_page(held, at), None if scales is None else one_page(scales, at))
        return held, lax.dynamic_update_slice(folded, words, (*at, 0))

    nothing = jnp.zeros_like(values[0, 0, 0, 0, 0, 0]).astype(jnp.uint32)  # made from the values, as in `rooms`
    folded = jnp.broadcast_to(nothing, (layers, count, kv_heads))
    return lax.fori_loop(0, layers * count, fold_page, (values, folded))


def one_page(whole: Array, at: tuple[Array, Array]) -> Array:
    """Slices [L, N, ...] to [1, 1, ...]."""
    return lax.dynamic_slice(whole, (*at, *[0] * (whole.ndim - 2)), (1, 1, *whole.shape[2:]))


def fold(values: Array, scales: Array | None) -> Array:
    """Computes `reference.digest_pages` of few pages: `LANES` sums of a page's words, then the sum of those. XLA's CPU
    backend vectorises sums over all dimensions but the last, and the barrier separates them from the last."""
    *_, parts, page_size, size = values.shape
    lanes = gcd(parts * page_size * size, LANES)
    weights = page_weights(parts * page_size, size).reshape(-1, lanes)
    words = words_of(values).reshape(*values.shape[:-3], -1, lanes)
    sums = lax.optimization_barrier(jnp.sum(words * over(weights, words), axis=-2, dtype=jnp.uint32))
    total = jnp.sum(sums, axis=-1, dtype=jnp.uint32)
    return total if scales is None else total + fold_scales(scales, size)
