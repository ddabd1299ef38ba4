"""Attention of a step over the pages of a layer group: new keys and values are written, then the pages are read."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jdisagg.model.network import Attend
from pallas_kernels import paged_attention, prefill_attention, write_kv_pages


def fit_to_keep(k: Array, v: Array) -> tuple[Array, Array]:
    """[T, Hkv, D] as they may lie in a page: a value that is no number is kept as 0, and its key as NaN.

    A page is read past its owner's tokens, where it holds what its last owner left, and of the null page anything: by
    weights of 0, but 0 * NaN is NaN. So one sequence's NaN would end those that get its pages. The key says the same
    to whoever attends to that token, and to nobody else: logits that are not to be seen are left out, not multiplied.
    """
    sound = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def decode_attend(
    pools: list[Array], table: Array, positions: Array, alive: Array, window_of: Callable[[int], int | None]
) -> Attend:
    """Attention of one new token a slot; `pools` (a list of this program's own) is updated in place.

    table i32[B, W]; positions i32[B]: tokens held before this one; alive bool[B]: the others write to the null page
    and attend to nothing.
    """
    page_size = pools[0].shape[3]
    index = positions // page_size
    alive = alive & (index < table.shape[1])
    pages = jnp.take_along_axis(table, jnp.minimum(index, table.shape[1] - 1)[:, None], axis=1)[:, 0]
    pages, offsets = jnp.where(alive, pages, 0), positions % page_size
    lengths = jnp.where(alive, positions + 1, 0)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        pools[layer] = write_kv_pages(pools[layer], *fit_to_keep(k, v), pages, offsets)
        return paged_attention(q, pools[layer], table, lengths, window=window_of(layer))

    return attend


def prefill_attend(
    pools: list[Array],
    table: Array,
    pages: Array,
    offsets: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    window_of: Callable[[int], int | None],
) -> Attend:
    """Attention of packed chunks; row t is written to `offsets[t]` of page `pages[t]` (0: padding)."""

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        pools[layer] = write_kv_pages(pools[layer], *fit_to_keep(k, v), pages, offsets)
        return prefill_attention(q, pools[layer], table, kv_lens, cu_q_lens, window=window_of(layer))

    return attend
