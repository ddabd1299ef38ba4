"""Decode attention over paged KV: one query token per slot, or a few. Checks arguments, picks the platform's code."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.checks import (
    check_contents,
    check_decode,
    check_ints,
    check_options,
    check_queries,
    check_table,
    check_value_size,
    require,
)
from pallas_kernels.paged_attention import gpu, hopper, tpu, xla
from pallas_kernels.platforms import by_generation, on_platform
from pallas_kernels.quantized import QuantizedPages, stored


def paged_attention(
    q: Array,
    kv_pages: Array | QuantizedPages,
    page_table: Array,
    lengths: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    value_size: int | None = None,
    debug: bool = False,
) -> Array:
    """Computes attention of one token per slot, or of several tokens of each, to the tokens that its slot holds.

    q: [B, Hq, D], f32 or bf16; query head h reads KV head h // (Hq // Hkv). [B * R, Hq, D] if each slot has R
    consecutive rows, a token and its draft: TPUs and Hopper GPUs then read its pages once, not R times. kv_pages: [P,
    Hkv, C, page_size, D], f32 or bf16, or QuantizedPages; only the pages that hold valid tokens count. page_table:
    i32[B, W], the pages of a slot in order; entries past the slot's length may be anything in [0, P). lengths: i32[B]
    or i32[B * R], tokens that a row sees including its own, at most W * page_size; length 0 gives zeros. scale: factor
    of the logits, D**-0.5 by default. window: only the last `window` tokens are seen, the current one counted.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap). sinks: [Hq], a logit that takes its share of the softmax
    and adds no value. value_size: for pages of one part, and only for those, how many of a row's first numbers are V.
    Returns [B, Hq, D] in q's dtype, for pages of one part [B, Hq, value_size]; sums are in f32.

    debug: refuses lengths that the table cannot hold and page ids outside the pool, by a call to the host under jit.

    Raises KernelError with both values if arguments do not fit each other.
    """
    check_queries(q, kv_pages, sinks)
    slots, rows = page_table.shape[0], q.shape[0]
    require(slots > 0 and rows % slots == 0, f"q must have as many rows for each of {slots} slots, got {rows}")
    check_table(page_table, slots)
    check_ints("lengths", lengths, q.shape[:1])
    check_options(window, soft_cap)
    check_value_size(kv_pages, value_size)
    if debug:
        rule = partial(check_decode, pages=stored(kv_pages).shape[0], page_size=stored(kv_pages).shape[3])
        page_table, lengths = check_contents(rule, by_rows(page_table, rows), lengths)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options: Any = {"scale": scale, "window": window, "soft_cap": soft_cap, "value_size": value_size}
    return _on_its_platform(PagedAttentionArgs(q, kv_pages, page_table, lengths, sinks, **options))


def _row_by_row(attend: Callable[[PagedAttentionArgs], Array], args: PagedAttentionArgs) -> Array:
    """Runs attention with code that supports one row per slot. That code splits a slot's tokens by the row's length
    alone, so a row has the same bits with any draft behind it."""
    return attend(replace(args, page_table=by_rows(args.page_table, args.q.shape[0])))


def by_rows(page_table: Array, rows: int) -> Array:
    """Repeats i32[B, W] to i32[rows, W], each slot's table for each of its rows."""
    return page_table if page_table.shape[0] == rows else jnp.repeat(page_table, rows // page_table.shape[0], axis=0)


on_gpu = by_generation("paged_attention", hopper.paged_attention, partial(_row_by_row, gpu.paged_attention))


@partial(jax.jit, inline=True)
def _on_its_platform(args: PagedAttentionArgs) -> Array:
    """Traces the code once for all layers and programs of these shapes: every platform's, or the known platform's."""
    return on_platform(args, tpu=tpu.paged_attention, cuda=on_gpu, default=partial(_row_by_row, xla.paged_attention))
