"""Prefill attention: packed, ragged, causal chunks over paged KV. Checks the arguments, picks the platform's code."""

from functools import partial
from typing import Any

import jax
from jax import Array

from pallas_kernels.arguments import PrefillAttentionArgs
from pallas_kernels.checks import (
    check_contents,
    check_ints,
    check_options,
    check_packed,
    check_queries,
    check_table,
    check_value_size,
)
from pallas_kernels.platforms import by_generation, on_platform
from pallas_kernels.prefill_attention import gpu, hopper, tpu, xla
from pallas_kernels.quantized import QuantizedPages, stored


def prefill_attention(
    q: Array,
    kv_pages: Array | QuantizedPages,
    page_table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    value_size: int | None = None,
    debug: bool = False,
) -> Array:
    """Computes causal attention of the last tokens of S sequences, packed one after another, to all tokens of their
    sequence.

    q: [T, Hq, D], f32 or bf16. Sequence s owns rows cu_q_lens[s]:cu_q_lens[s + 1]; they are the last of its kv_lens[s]
    tokens, whose K and V are in its pages already, this chunk's and any cached prefix's. Rows from cu_q_lens[S] on are
    padding and give zeros; a sequence may own no row. kv_pages: [P, Hkv, C, page_size, D], f32 or bf16, or
    QuantizedPages. page_table: i32[S, W]. kv_lens: i32[S], at most W * page_size and at least the sequence's rows.
    cu_q_lens: i32[S + 1], 0 first, never falling. scale, window, soft_cap, sinks, value_size: as in `paged_attention`,
    the window counted from each query's own position. Returns [T, Hq, D] in q's dtype, for pages of one part [T, Hq,
    value_size]; sums are in f32.

    debug: refuses arguments that break these rules, and page ids outside the pool, by a call to the host under jit.

    Raises KernelError with both values if arguments do not fit each other.
    """
    check_queries(q, kv_pages, sinks)
    sequences = page_table.shape[0]
    check_table(page_table, sequences)
    check_ints("kv_lens", kv_lens, (sequences,))
    check_ints("cu_q_lens", cu_q_lens, (sequences + 1,))
    check_options(window, soft_cap)
    check_value_size(kv_pages, value_size)
    if debug:
        pages, page_size = stored(kv_pages).shape[:4:3]
        rule = partial(check_packed, pages=pages, page_size=page_size, tokens=q.shape[0])
        page_table, kv_lens, cu_q_lens = check_contents(rule, page_table, kv_lens, cu_q_lens)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options: Any = {"scale": scale, "window": window, "soft_cap": soft_cap, "value_size": value_size}
    return _on_its_platform(PrefillAttentionArgs(q, kv_pages, page_table, kv_lens, cu_q_lens, sinks, **options))


on_gpu = by_generation("prefill_attention", hopper.prefill_attention, gpu.prefill_attention)


@partial(jax.jit, inline=True)
def _on_its_platform(args: PrefillAttentionArgs) -> Array:
    """Traces the code once for all layers and programs of these shapes: every platform's, or the known platform's."""
    return on_platform(args, tpu=tpu.prefill_attention, cuda=on_gpu, default=xla.prefill_attention)
