"""States of a step's rows, summed by sequence on the device: what embeddings are made of.

Sums must be the same in whatever chunks a prompt is cut, so they are of whole numbers, in parts of POOLED_ONE. A state
is one of 46 bits: three numbers of 15 and sign hold it, each cut off the last one's rest without a rounding, and their
sums over a step's rows fit 32 bits, which is all that devices add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.request import POOLED_ONE
from jdisagg.core.steps import PrefillChunk

MOST_STATE = 1 << 12  # of one number of a state: sums of a hundred thousand still fit
PART_BITS = 15
SHIFTS = (2 * PART_BITS - 1, PART_BITS - 1, 0)  # of the three parts
assert log2(POOLED_ONE) + log2(MOST_STATE) == SHIFTS[0] + PART_BITS
MOST_ROWS = 1 << (31 - PART_BITS)  # of a step


def pools(chunk: PrefillChunk) -> bool:
    """Whether something of its rows' states is told: of the last token's alone where no more is asked for."""
    return chunk.sampling.pooling == "mean" or (chunk.last and bool(chunk.sampling.pooling))


def summed_rows(chunks: Sequence[PrefillChunk], sequences: int) -> np.ndarray:
    """i32[2, S]: of each chunk, from which row to which its states are summed; none where nobody asks."""
    rows, stop = np.zeros((2, sequences), np.int32), 0
    for index, chunk in enumerate(chunks):
        first, stop = stop, stop + len(chunk.tokens)
        if pools(chunk):
            rows[:, index] = first if chunk.sampling.pooling == "mean" else stop - 1, stop
    return rows


def pooled(states: Array, rows: Array) -> Array:
    """[T, hidden] and i32[2, S] as `summed_rows` makes it -> i32[3, S, hidden]: see `whole`."""
    assert states.shape[0] < MOST_ROWS, states.shape
    row, sequences = jnp.arange(states.shape[0])[:, None], rows.shape[1]
    within = (rows[:1] <= row) & (row < rows[1:])
    owner = jnp.where(within.any(axis=1), jnp.argmax(within, axis=1), sequences)
    rest, parts = jnp.clip(jnp.nan_to_num(states.astype(jnp.float32)), -MOST_STATE, MOST_STATE), list[Array]()
    for shift in SHIFTS:
        scale = float(POOLED_ONE >> shift)
        part = jnp.rint(rest * scale)
        rest = rest - part / scale
        parts.append(part.astype(jnp.int32))
    sums = jax.vmap(lambda part: jax.ops.segment_sum(part, owner, sequences + 1))(jnp.stack(parts))
    return sums[:, :sequences]


def whole(parts: np.ndarray) -> tuple[int, ...]:
    """i32[3, hidden] of one sequence -> its numbers in parts of POOLED_ONE."""
    high, middle, low = (part.astype(np.int64) << shift for part, shift in zip(parts, SHIFTS, strict=True))
    return tuple((high + middle + low).tolist())
