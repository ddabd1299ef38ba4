"""Final states of a step's rows, summed per sequence on the device, for embeddings.

Sums must not depend on how a prompt is split into chunks, so they are sums of whole numbers in units of 1 / POOLED_ONE.
A state is a number of 46 bits, held as three numbers of 15 bits and sign. Each is the rest of the one before, without
rounding. Their sums over a step's rows fit the 32 bits that devices add.
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

MOST_STATE = 1 << 12  # largest number of a state: sums of a hundred thousand still fit
PART_BITS = 15
SHIFTS = (2 * PART_BITS - 1, PART_BITS - 1, 0)  # bit positions of the three numbers
assert log2(POOLED_ONE) + log2(MOST_STATE) == SHIFTS[0] + PART_BITS
MOST_ROWS = 1 << (31 - PART_BITS)  # most rows of a step


def pools(chunk: PrefillChunk) -> bool:
    """Returns True if states of the chunk's rows are returned: all for a mean, else that of the prompt's last token."""
    return chunk.sampling.pooling == "mean" or (chunk.last and bool(chunk.sampling.pooling))


def summed_rows(chunks: Sequence[PrefillChunk], sequences: int) -> np.ndarray:
    """Returns i32[2, S]: the first row and the end of the rows whose states are summed per chunk; empty if none are
    wanted."""
    rows, stop = np.zeros((2, sequences), np.int32), 0
    for index, chunk in enumerate(chunks):
        first, stop = stop, stop + len(chunk.tokens)
        if pools(chunk):
            rows[:, index] = first if chunk.sampling.pooling == "mean" else stop - 1, stop
    return rows


def pooled(states: Array, rows: Array) -> Array:
    """Sums states [T, hidden] over the rows i32[2, S] of `summed_rows`: returns i32[3, S, hidden], see `whole`."""
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
    """Combines i32[3, hidden] of one sequence to whole numbers in units of 1 / POOLED_ONE."""
    high, middle, low = (part.astype(np.int64) << shift for part, shift in zip(parts, SHIFTS, strict=True))
    return tuple((high + middle + low).tolist())
