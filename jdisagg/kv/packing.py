"""What one shard runs to send pages and to take them: packed, cut in head slices, checked, cut anew, written in place.

A head slice is some heads of some pages of some layers, as one to four arrays whose axis 2 counts heads (`HeadSlices`).
Pages travel as they are at the source; where the destination's are of another size, it cuts them anew when it writes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jdisagg.core.kv_layout import SCALED
from jdisagg.core.worker_config import RAW, Digests
from pallas_kernels import PackedPages, QuantizedPages, digest_pages, pack_kv_pages, unpack_kv_pages, wire_error
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool, bits_of

SAMPLE = 8  # pages a digest, where they are sampled
PAGE_WIRES = {"int8": "int8", "float8_e4m3fn": "fp8"}  # whose numbers pages of these dtypes hold


class HeadSlices(NamedTuple):
    """Arrays of one shard or submesh by kind; each list is in the order of heads, empty where nothing of it came."""

    values: list[Array]  # [L, n, heads, parts, page_size, D'], parts 2 or for latents 1
    scales: list[Array]  # f32 [L, n, heads, parts * page_size], where values are quantised
    digests: list[Array]  # u32 [L, pages that have one, heads]
    errors: list[Array]  # f32 [L, 1, heads]: what quantising lost (each head says what its shard's layer did)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds that came."""
        return tuple(name for name, arrays in zip(self._fields, self, strict=True) if arrays)

    @property
    def numbers(self) -> HeadSlices:
        """What is written into pages, without what only tells whether it may be."""
        return HeadSlices(self.values, self.scales, [], [])


def by_kind(arrays: Sequence[Array], kinds: Sequence[str]) -> HeadSlices:
    """As many arrays of each of these kinds, kind by kind -> the same by name."""
    number = len(arrays) // len(kinds)
    found = {kind: list(arrays[index * number : (index + 1) * number]) for index, kind in enumerate(kinds)}
    return HeadSlices(*(found.get(kind, []) for kind in HeadSlices._fields))


def pack_shard(
    pools: Sequence[Pool], pages: Array, *, slice_heads: int, wire: str, dtype: str, digests: Digests
) -> HeadSlices:
    """Pools of some layers and i32[n], or one pool of all of them and i32[layers, n] -> head slices of `slice_heads`
    heads.

    dtype: of raw numbers on their way, no wider than the pools'. Numbers for quantised pages are made what these hold
    before they leave: nobody asks what that loses. Those of quantised pages travel with scales, whoever takes them.
    """
    lost = None if wire == RAW else _lost(pools, pages, wire)
    if dtype in SCALED and not isinstance(pools[0], QuantizedPages):
        wire = PAGE_WIRES[dtype]
    elif wire == RAW and stored(pools[0]).dtype != dtype:
        count = jnp.arange(pages.size, dtype=jnp.int32)
        pools, pages = [stored(pool)[pages.reshape(-1)].astype(dtype) for pool in pools], count.reshape(pages.shape)
    packed = as_bytes(_packed(pools, pages, wire, digests=digests is Digests.FULL))
    sums = packed.digests
    if digests is Digests.SAMPLED:
        sums = _packed(pools, pages[..., ::SAMPLE], wire, digests=True).digests
    layers, heads = packed.values.shape[0], packed.values.shape[2]
    errors = None if lost is None else jnp.broadcast_to(lost[:, None, None], (layers, 1, heads))
    whole = packed.values, packed.scales, sums, errors
    return HeadSlices(*([] if each is None else jnp.split(each, heads // slice_heads, axis=2) for each in whole))


def as_bytes(packed: PackedPages) -> PackedPages:
    """Numbers of fp8 as their bits: not everything on the way knows the type."""
    values = packed.values
    return packed._replace(values=bits_of(values)) if values.dtype == jnp.float8_e4m3fn else packed


def _packed(pools: Sequence[Pool], pages: Array, wire: str, *, digests: bool) -> PackedPages:
    packed = pack_kv_pages(pools, pages.reshape(-1), wire=wire, digests=digests)
    if pages.ndim == 1:
        return packed
    return reshaped(packed, pages.shape)


def reshaped(packed: PackedPages, leading: tuple[int, ...]) -> PackedPages:
    """The same pages with other leading dimensions than [layers, n]."""
    values, scales, digests = (None if each is None else each.reshape(*leading, *each.shape[2:]) for each in packed)
    assert values is not None
    return PackedPages(values, scales, digests)


def _lost(pools: Sequence[Any], pages: Array, wire: str) -> Array:
    """f32[layers]."""
    if pages.ndim == 1:
        return wire_error(pools, pages, wire)
    return jnp.concatenate([wire_error(pools, layer, wire) for layer in pages])


def are_intact(slices: HeadSlices, *, error_bound: float) -> Array:
    """bool[1] of one shard: every digest is that of its page, and no error is over the bound.

    Fewer digests than pages: of every `SAMPLE`th.
    """
    values, _, digests, errors = slices
    good = jnp.bool_(True)
    for index, sent in enumerate(digests):
        step = 1 if sent.shape[1] == values[index].shape[1] else SAMPLE
        good &= jnp.all(_digests_of(slices, index, step) == sent)
    for lost in errors:
        good &= jnp.all(lost <= error_bound)
    return good[None]


def fold_shard(slices: HeadSlices, digests: Digests) -> list[Array]:
    """What `pack_shard` would have sent as the digests of these slices of one shard, read anew."""
    step = SAMPLE if digests is Digests.SAMPLED else 1
    return [_digests_of(slices, index, step) for index in range(len(slices.values))]


def _digests_of(slices: HeadSlices, index: int, step: int) -> Array:
    """Of every `step`-th page of one slice."""
    scales = slices.scales[index][:, ::step] if slices.scales else None
    return digest_pages(slices.values[index][:, ::step], scales)


def insert_shard(pools: list[Pool], pages: Array, slices: HeadSlices) -> list[Pool]:
    """Joins the head slices of a shard, cuts them into pages of the pools' size and writes those in place; pools and
    pages as `pack_shard` takes them."""
    page_size = stored(pools[0]).shape[3]
    packed = PackedPages(_joined(slices.values), _joined(slices.scales) if slices.scales else None, None)
    packed = recut(packed, page_size)
    if pages.ndim > 1:
        packed = reshaped(packed, (1, pages.size))
    held: Any = pools
    return unpack_kv_pages(held, packed, pages.reshape(-1), digests=False)[0]


def _joined(slices: list[Array]) -> Array:
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=2)


def recut(packed: PackedPages, page_size: int) -> PackedPages:
    """Pages of consecutive tokens -> the same tokens in pages of `page_size`, digests dropped."""
    values, scales, _ = packed
    parts, size = values.shape[3:5]
    if size == page_size:
        return PackedPages(values, scales, None)
    if scales is not None:
        layers, count, heads, _ = scales.shape
        scales = _recut_rows(scales.reshape(layers, count, heads, parts, size, 1), page_size)
        scales = scales.reshape(*scales.shape[:3], parts * page_size)
    return PackedPages(_recut_rows(values, page_size), scales, None)


def _recut_rows(rows: Array, page_size: int) -> Array:
    """[L, n, heads, parts, size, D] -> [L, n * size / page_size, heads, parts, page_size, D]; they fill whole pages."""
    layers, count, heads, parts, size, width = rows.shape
    assert count * size % page_size == 0, (rows.shape, page_size)
    tokens = rows.transpose(0, 1, 4, 2, 3, 5).reshape(layers, -1, page_size, heads, parts, width)
    return tokens.transpose(0, 1, 3, 4, 2, 5)
