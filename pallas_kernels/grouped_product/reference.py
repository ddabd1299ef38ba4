"""Grouped product, the definition: every row times every group's matrix, of which its own is kept."""

import jax.numpy as jnp
from jax import Array


def grouped_product(x: Array, matrices: Array, sizes: Array, *, out_first: bool) -> Array:
    """Computes `pallas_kernels.grouped_product`, see there."""
    ends = jnp.cumsum(sizes)
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends[None, :], axis=1)
    every = jnp.einsum(
        "mk,gnk->mgn" if out_first else "mk,gkn->mgn",
        x.astype(matrices.dtype),
        matrices,
        preferred_element_type=jnp.float32,
    )
    own = jnp.take_along_axis(every, jnp.minimum(group, len(ends) - 1)[:, None, None], axis=1)[:, 0]
    return jnp.where((group < len(ends))[:, None], own, 0).astype(x.dtype)
