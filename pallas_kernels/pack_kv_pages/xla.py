"""Packing KV for XLA, written for the CPU: a few pages of every layer at a time, so that what is computed stays cached.

Raw pages of all layers are one fused gather, without a copy on the way. Digests and codes come from a loop whose step
gathers `STEP_BYTES` and finishes with them: over whole buffers instead, XLA's CPU backend keeps their words and f32
copies, and the memory that the system hands out for those costs more than the arithmetic (32 MB to int8: 10 ms against
86, busy machine). A loop that reads a bf16 pool has it converted whole, so such pages are gathered first, as bits.
"""

from collections.abc import Sequence
from math import prod

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

STEP_BYTES = 1 << 19  # of f32 pages: half of a core's second-level cache


def pack_kv_pages(pools: Sequence[Array], page_ids: Array, *, wire: str, digests: bool = True) -> PackedPages:
    """As `pallas_kernels.pack_kv_pages`."""
    dtype, count = pools[0].dtype, page_ids.shape[0]
    sources, ids = [pool if dtype.itemsize == 4 else bits_of(pool) for pool in pools], page_ids
    raw = None
    if wire == "raw":
        raw = lax.bitcast_convert_type(jnp.stack([gather(source, page_ids) for source in sources]), dtype)
        if not digests:
            return PackedPages(raw, None, None)
    if dtype.itemsize < 4:
        sources, ids = [gather(source, page_ids) for source in sources], jnp.arange(count, dtype=jnp.int32)
    step = pages_of_step(pools[0].shape, count)

    def finish(pages: Array) -> tuple[Array, ...]:
        if wire == "raw":
            return (fold(pages, None),)
        values, scales = lax.optimization_barrier(quantise_pages(floats_of(pages, dtype), wire))
        return (values, scales, fold(values, scales)) if digests else (values, scales)

    def do_step(index: Array, kept: list[Array]) -> list[Array]:
        now = lax.dynamic_slice_in_dim(ids, index * step, step)  # the last step begins early where it would end late
        for layer, source in enumerate(sources):
            parts = finish(lax.optimization_barrier(gather(source, now)))
            kept = [put(old, part, layer, index * step) for old, part in zip(kept, parts, strict=True)]
        return kept

    kept = lax.fori_loop(0, -(-count // step), do_step, rooms(pools, count, wire, digests))
    values, scales = (raw, None) if raw is not None else kept[:2]
    return PackedPages(values, scales, kept[-1] if digests else None)


def gather(pool: Array, page_ids: Array) -> Array:
    """[P, Hkv, C, page_size, D] and i32[N] -> [N, Hkv, C, page_size, D], by flat rows of a head's page each.

    XLA's CPU loop over a long last dimension is the fastest, and the indices are computed once, not once an element.
    """
    rows = page_ids[:, None] * pool.shape[1] + jnp.arange(pool.shape[1])[None, :]
    rows = lax.optimization_barrier(rows.reshape(-1))
    flat = pool.reshape(pool.shape[0] * pool.shape[1], -1)
    return flat.at[rows].get(mode="promise_in_bounds").reshape(page_ids.shape[0], *pool.shape[1:])


def pages_of_step(shape: tuple[int, ...], count: int) -> int:
    """Pages of a pool of `shape` that a step takes: no more than the `count` there are."""
    return max(1, min(STEP_BYTES // (prod(shape[1:]) * 4), count))


def rooms(pools: Sequence[Array], count: int, wire: str, digests: bool) -> list[Array]:
    """What the loop fills: codes and scales [L, N, ...], digests u32 [L, N, Hkv].

    Made from a pool, so that inside `shard_map` they are known to differ from shard to shard as the pool does.
    """
    _, kv_heads, parts, page_size, size = pools[0].shape
    found = []
    if wire != "raw":
        rows = kv_heads, parts * page_size
        found += [((kv_heads, parts, page_size, packed_size(size, wire)), STORED[wire]), (rows, jnp.float32)]
    if digests:
        found.append(((kv_heads,), jnp.uint32))
    zero = jnp.zeros_like(pools[0][0, 0, 0, 0, 0])
    return [jnp.broadcast_to(zero.astype(dtype), (len(pools), count, *shape)) for shape, dtype in found]


def put(whole: Array, part: Array, layer: int, page: Array) -> Array:
    return lax.dynamic_update_slice(whole, part[None], (layer, page, *[0] * (whole.ndim - 2)))


def quantise_pages(pages: Array, wire: str) -> tuple[Array, Array]:
    """f32 [..., C, page_size, D] -> codes [..., C, page_size, D'] and scales f32 [..., C * page_size]."""
    *heads, parts, page_size, size = pages.shape
    codes, scales = quantise(pages.reshape(*heads, parts * page_size, size), wire)
    return codes.reshape(*heads, parts, page_size, codes.shape[-1]).astype(STORED[wire]), scales


def fold(values: Array, scales: Array | None) -> Array:
    """As `reference.digest_pages`, in one sum over a page's words with the products of the weights."""
    *_, parts, page_size, size = values.shape
    weights = page_weights(parts * page_size, size).reshape(-1)
    words = words_of(values).reshape(*values.shape[:-3], -1)
    total = jnp.sum(words * over(weights, words), axis=-1, dtype=jnp.uint32)
    return total if scales is None else total + fold_scales(scales, size)
