"""Prefill attention, the definition: every row is one query over the first tokens of its own sequence."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.arguments import OPTIONS, PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.paged_attention import reference


def prefill_attention(
    args: PrefillAttentionArgs,
) -> Array:
    """Computes q [T, Hq, D], page_table i32[S, W], kv_lens i32[S], cu_q_lens i32[S + 1] -> [T, Hq, D]. Row t of
    sequence s is at position kv_lens[s] - (cu_q_lens[s + 1] - t), so it sees one token more than that."""
    q, kv_pages, page_table, kv_lens, cu_q_lens, sinks = args.arrays
    rows = jnp.arange(q.shape[0])
    owner = jnp.searchsorted(cu_q_lens, rows, side="right") - 1
    owner = jnp.minimum(owner, kv_lens.shape[0] - 1)
    visible = jnp.where(rows < cu_q_lens[-1], kv_lens[owner] - cu_q_lens[owner + 1] + rows + 1, 0)
    options = {name: getattr(args, name) for name in OPTIONS}
    return reference.paged_attention(PagedAttentionArgs(q, kv_pages, page_table[owner], visible, sinks, **options))
