"""Prefill attention, the definition: every row is one query over the first tokens of its own sequence."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import reference
from pallas_kernels.quantized import QuantizedPages


def prefill_attention(
    q: Array,
    kv_pages: Array | QuantizedPages,
    page_table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_size: int | None = None,
) -> Array:
    """q [T, Hq, D], page_table i32[S, W], kv_lens i32[S], cu_q_lens i32[S + 1] -> [T, Hq, D].

    Row t of sequence s sits at position kv_lens[s] - (cu_q_lens[s + 1] - t), so it sees one token more than that.
    """
    rows = jnp.arange(q.shape[0])
    owner = jnp.searchsorted(cu_q_lens, rows, side="right") - 1
    owner = jnp.minimum(owner, kv_lens.shape[0] - 1)
    visible = jnp.where(rows < cu_q_lens[-1], kv_lens[owner] - cu_q_lens[owner + 1] + rows + 1, 0)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "value_size": value_size}
    return reference.paged_attention(q, kv_pages, page_table[owner], visible, sinks, **options)
