"""Triton attention on a GPU: the inner loop over KV tokens that decode and prefill attention share.

Tokens are gathered one by one through the page table, so a page may have any size. Triton's arrays are powers of two,
and a tensor core takes 16 rows: head sizes and groups are padded by masks, in registers only. The softmax is online, in
f32 and in base 2, the chip's native exponential.
"""

from functools import partial
from math import log2
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.quantized import QuantizedPages, stored, wider

NEVER = -1e30  # a logit no softmax sees, finite so that NEVER - NEVER is 0
LOG2_E = log2(jnp.e)
MIN_ROWS = 16  # fewest query rows in a program: the minimum of a tensor core
Runs = tuple[tuple[int, int], ...]  # pieces of a row: (first number, count)
MAX_OFFSET = 1 << 31
WIDE_BYTES = 1 << 32  # larger arrays have 64-bit offsets


class AttentionParams(NamedTuple):
    """The parameters of attention that are the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    runs: Runs  # pieces of a row of K; with pages of one part the first is V too
    precision: lax.DotAlgorithmPreset | lax.Precision | None  # precision of the products


def offsets_reach(numbers: int, dtype: DTypeLike) -> bool:
    """True if a Triton kernel's offsets reach every number of an array of `numbers`.

    jax's lowering counts numbers in signed 32 bits up to arrays of 4 GiB, and in 64 above them (0.10.2,
    `_compute_offsets_from_indices`). Numbers of 2 bytes and more end where 31 bits do; of single bytes those past 2 GiB
    would be looked for before the array's begin.
    """
    return jnp.dtype(dtype).itemsize > 1 or not MAX_OFFSET < numbers <= WIDE_BYTES


def runs_of(size: int, value_size: int | None) -> Runs:
    """Returns the pieces of a row: K whole, or V's numbers and the rest. Padded to powers of two together they would be
    many more."""
    if value_size is None or value_size == size:
        return ((0, size),)
    return (0, value_size), (value_size, size - value_size)


def padded_numbers(runs: Runs) -> int:
    """Returns the numbers that a row takes in registers."""
    return sum(pl.next_power_of_2(width) for _, width in runs)


def within_reach(kv_pages: Array | QuantizedPages) -> bool:
    """True if the kernels' offsets reach every number of the pool."""
    values = stored(kv_pages)
    return offsets_reach(values.size, values.dtype)


def product_dtype(queries: jnp.dtype, kv_pages) -> jnp.dtype:
    """Returns the dtype of both products' operands, which holds the queries and the pool's numbers exactly; int8 and
    fp8 fit in bf16."""
    return queries if isinstance(kv_pages, QuantizedPages) else wider(queries, kv_pages.dtype)


def precision_of(products: jnp.dtype, interpret: bool) -> lax.DotAlgorithmPreset | lax.Precision | None:
    """Returns the precision that preserves f32: three products of TF32 parts, 22 bits; the plain one would keep 10 of
    the 23. Products of whole f32 numbers run outside the tensor cores, and their operands spill. The interpreting CPU
    has a precision of its own."""
    if products != jnp.float32:
        return None
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def read_queries(q_ref, at, real, runs: Runs, dtype) -> list:
    """Returns each piece of the query rows at `at`, `dtype` [rows, D], with zeros for rows that are not `real`."""
    found = []
    for first, width in runs:
        dims = jnp.arange(pl.next_power_of_2(width))
        own = real[:, None] & (dims < width)[None, :]
        found.append(pltriton.load(q_ref.at[*at, first + dims[None, :]], mask=own, other=0.0).astype(dtype))
    return found


def empty_softmax(rows: int, size: int) -> tuple[Array, Array, Array]:
    """Returns the top logit, sum and mixture of a softmax over no tokens: f32 [rows], [rows], [rows, size]."""
    return jnp.full(rows, NEVER), jnp.zeros(rows), jnp.zeros((rows, size))


def attend_tokens(
    queries,
    positions,
    pool: Any,
    table_ref,
    place,
    span,
    carry,
    *,
    tile: int,
    rule: AttentionParams,
):
    """Runs the inner loop of both attentions: the online softmax of `queries` over some tokens of one sequence.

    queries: [rows, D] for each of the rule's pieces. positions: i32[rows], each row's position; a row sees itself and
    the tokens before it, within the window. place: (table row, KV head). span: (low, shared, high): the tokens low to
    high are seen by some row; those of low to shared by all rows if there is no window, so whole tiles of them need no
    masks. carry: (top in base 2, total, mixed), f32, returned as it is after these tokens.
    """
    (row, head), (low, shared, high) = place, span
    page_size = stored(pool).shape[3]
    _, window, soft_cap, runs, precision = rule
    product = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def step(index, carry, *, masked: bool):
        top, total, mixed = carry
        token = index * tile + jnp.arange(tile)
        held = (token >= low) & (token < high) if masked else None
        # C division and remainder: `//` and `%` would spend three more operations on negative numbers.
        column, offset = lax.div(token, page_size), lax.rem(token, page_size)
        page = pltriton.load(table_ref.at[row, column], mask=held, other=0 if masked else None)
        read = partial(read_tile, pool, page, head, offset, held)
        dtype = queries[0].dtype
        keys = [read(run, dtype, which=0) for run in runs]
        logits = sum(product(rows, part, (((1,), (1,)), ((), ()))) for rows, part in zip(queries, keys, strict=True))
        # A quantised token's factor is applied to its logits and weights, which are fewer than its numbers.
        factor = read_factor(pool, page, head, offset, held, which=0)
        logits = logits * factor  # [rows, tile]
        if soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / soft_cap)) * (soft_cap * LOG2_E)
        if masked:
            behind = positions[:, None] - token[None, :]
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights, keep = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
        total = total * keep + jnp.sum(weights, axis=1)
        values = keys[0]
        if stored(pool).shape[2] == 2:
            values, factor = read(runs[0], dtype, which=1), read_factor(pool, page, head, offset, held, which=1)
        weights = (weights * factor).astype(dtype)
        mixed = mixed * keep[:, None] + product(weights, values, (((1,), (0,)), ((), ())))
        return higher, total, mixed

    first, stop = low // tile, pl.cdiv(high, tile)
    whole = first if window is not None else jnp.maximum(first, shared // tile)
    carry = lax.fori_loop(first, whole, partial(step, masked=False), carry)
    return lax.fori_loop(whole, stop, partial(step, masked=True), carry)


def read_tile(pool: Any, page, head, offset, held, run: tuple[int, int], dtype, *, which: int):
    """Returns a piece of K (0) or V (1) of a tile's tokens, `dtype` [tile, its numbers]. Tokens that are not `held`
    (None: all are) and the padding of the piece are zeros, and are not read."""
    values_ref: Any = stored(pool)
    (first, width), dims = run, jnp.arange(pl.next_power_of_2(run[1]))
    real = None if width == dims.shape[0] else (dims < width)[None, :]
    tokens = None if held is None else held[:, None]
    mask = tokens if real is None else real if tokens is None else real & tokens
    at = values_ref.at[page[:, None], head, which, offset[:, None], first + dims[None, :]]
    numbers = pltriton.load(at, mask=mask, other=None if mask is None else jnp.zeros((), values_ref.dtype))
    return numbers.astype(dtype)


def read_factor(pool: Any, page, head, offset, held, *, which: int):
    """Returns the factor of the numbers of a tile's tokens, f32 [1, tile], or 1."""
    if not isinstance(pool, QuantizedPages):
        return 1.0
    scales_ref: Any = pool.scales
    at = scales_ref.at[page, head, which * stored(pool).shape[3] + offset]
    factor = pltriton.load(at, mask=held, other=None if held is None else 0.0)
    return factor[None, :]
