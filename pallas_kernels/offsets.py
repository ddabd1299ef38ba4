"""How far Triton's offsets reach.

jax's lowering counts numbers in signed 32 bits up to arrays of 4 GiB, and in 64 above them (0.10.2,
`_compute_offsets_from_indices`). Numbers of 2 bytes and more end where 31 bits do; of single bytes those past 2 GiB
would be looked for before the array's begin.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

MAX_OFFSET = 1 << 31
WIDE_BYTES = 1 << 32  # over which offsets have 64 bits


def within_reach(numbers: int, dtype: DTypeLike) -> bool:
    """Whether kernels' offsets reach every number of an array of so many."""
    return jnp.dtype(dtype).itemsize > 1 or not MAX_OFFSET < numbers <= WIDE_BYTES
