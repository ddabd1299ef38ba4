"""What one shard runs to send pages and to take them: packed, cut in head atoms, checked, cut anew, written in place.

An atom is some heads of some pages of some layers, as one to four arrays whose axis 2 counts heads:
values [L, n, heads, 2, page_size, D'], scales f32 [L, n, heads, 2 * page_size] where values are quantised, digests u32
[L, n that have one, heads], and errors f32 [L, 1, heads], what quantising lost (each head says what its shard's layer
did). They are told apart by rank and dtype. Pages travel as they are at the source; where the destination's are of
another size, it cuts them anew when it writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jdisagg.core.worker_config import RAW, Digests
from pallas_kernels import PackedPages, pack_kv_pages, unpack_kv_pages, wire_error
from pallas_kernels.pack_kv_pages.reference import digest_pages

SAMPLE = 8  # pages a digest, where they are sampled


class Atoms(NamedTuple):
    """Arrays of one shard or place by kind; each list is in the order of heads, and empty where nothing of it came."""

    values: list[Array]
    scales: list[Array]
    digests: list[Array]
    errors: list[Array]


def sorted_atoms(arrays: Iterable[Array]) -> Atoms:
    """As they came -> by kind."""
    found = Atoms([], [], [], [])
    for array in arrays:
        small = found.errors if array.dtype == jnp.float32 else found.digests
        {6: found.values, 4: found.scales, 3: small}[array.ndim].append(array)
    return found


def pack_shard(
    pools: Sequence[Array], pages: Array, *, atom_heads: int, wire: str, dtype: str, digests: Digests
) -> tuple[Array, ...]:
    """Pools of some layers and i32[n] -> atoms: all values, then scales, digests and errors as far as there are any.

    dtype: of raw numbers on their way, no wider than the pools'.
    """
    lost = None if wire == RAW else wire_error(pools, pages, wire)
    if wire == RAW and pools[0].dtype != dtype:
        pools, pages = [pool[pages].astype(dtype) for pool in pools], jnp.arange(pages.shape[0], dtype=jnp.int32)
    packed = pack_kv_pages(pools, pages, wire=wire, digests=digests is Digests.FULL)
    sums = packed.digests
    if digests is Digests.SAMPLED:
        sums = pack_kv_pages(pools, pages[::SAMPLE], wire=wire).digests
    heads = packed.values.shape[2]
    errors = None if lost is None else jnp.broadcast_to(lost[:, None, None], (len(pools), 1, heads))
    whole = [each for each in (packed.values, packed.scales, sums, errors) if each is not None]
    return tuple(atom for each in whole for atom in jnp.split(each, heads // atom_heads, axis=2))


def are_intact(atoms: Sequence[Array], *, error_bound: float) -> Array:
    """bool[1] of one shard: every digest is that of its page, and no error is over the bound.

    Fewer digests than pages: of every `SAMPLE`th.
    """
    values, scales, digests, errors = sorted_atoms(atoms)
    good = jnp.bool_(True)
    for index, sent in enumerate(digests):
        step = 1 if sent.shape[1] == values[index].shape[1] else SAMPLE
        scale = scales[index][:, ::step] if scales else None
        good &= jnp.all(digest_pages(values[index][:, ::step], scale) == sent)
    for lost in errors:
        good &= jnp.all(lost <= error_bound)
    return good[None]


def insert_shard(pools: list[Array], pages: Array, values: list[Array], scales: list[Array]) -> list[Array]:
    """Joins the atoms of a shard, cuts them into pages of the pools' size and writes those in place."""
    page_size = pools[0].shape[3]
    packed = PackedPages(_joined(values), _joined(scales) if scales else None, None)
    return unpack_kv_pages(pools, recut(packed, page_size), pages, digests=False)[0]


def _joined(atoms: list[Array]) -> Array:
    return atoms[0] if len(atoms) == 1 else jnp.concatenate(atoms, axis=2)


def recut(packed: PackedPages, page_size: int) -> PackedPages:
    """Pages of consecutive tokens -> the same tokens in pages of `page_size`, digests dropped."""
    values, scales, _ = packed
    size = values.shape[4]
    if size == page_size:
        return PackedPages(values, scales, None)
    if scales is not None:
        layers, count, heads, _ = scales.shape
        scales = _recut_rows(scales.reshape(layers, count, heads, 2, size, 1), page_size)
        scales = scales.reshape(*scales.shape[:3], 2 * page_size)
    return PackedPages(_recut_rows(values, page_size), scales, None)


def _recut_rows(rows: Array, page_size: int) -> Array:
    """[L, n, heads, 2, size, D] -> [L, n * size / page_size, heads, 2, page_size, D]; the tokens fill whole pages."""
    layers, count, heads, two, size, width = rows.shape
    assert count * size % page_size == 0, (rows.shape, page_size)
    tokens = rows.transpose(0, 1, 4, 2, 3, 5).reshape(layers, -1, page_size, heads, two, width)
    return tokens.transpose(0, 1, 3, 4, 2, 5)
