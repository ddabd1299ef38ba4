"""Grouped product for XLA: its own operation on TPUs, blocks of rows where it would multiply by all matrices."""

import jax
import jax.numpy as jnp
from jax import Array

# Rows per block of one matrix. Products of 4 or 8 rows, as of any number that is not a multiple of YNNPACK's tile, are
# summed in another order: a row would have other bits in a step of its own than beside a chunk. Processor time, 16
# matrices 512 x 1024 in f32 on two busy cores, in blocks of 4, 4, 8 and 32 -> of 16: 4 rows 1.0 -> 1.4 ms, 16 rows 3.7
# -> 5.3, 64 rows 6.8 -> 8.8, 256 rows 10.5 -> 10.0.
BLOCK_ROWS = 16


def ragged_product(x: Array, matrices: Array, sizes: Array, *, out_first: bool) -> Array:
    """Computes `pallas_kernels.grouped_product` by XLA's operation. On a CPU it multiplies every row by every matrix.
    On a TPU matrices stored `out_first` are transposed at every call, all of them."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2 if out_first else 1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    rows = x.astype(matrices.dtype)
    product = jax.lax.ragged_dot_general(rows, matrices, sizes, numbers, preferred_element_type=jnp.float32)
    return jnp.where(grouped(x, sizes), product, 0).astype(x.dtype)


def product_by_blocks(x: Array, matrices: Array, sizes: Array, *, out_first: bool) -> Array:
    """Computes `pallas_kernels.grouped_product` block by block of one group's rows: only matrices with rows are read. A
    block that extends beyond its group's rows writes rows that the blocks after it overwrite."""
    block = BLOCK_ROWS
    blocks = -(-sizes // block)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    rows = jnp.pad(x.astype(matrices.dtype), ((0, block), (0, 0)))

    def one(index: Array, out: Array) -> Array:
        group = jnp.sum(ends <= index)
        row = starts[group] + (index - ends[group] + blocks[group]) * block
        matrix = jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        product = _of_one(jax.lax.dynamic_slice_in_dim(rows, row, block), matrix, out_first)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), row, 0)

    outputs = matrices.shape[1 if out_first else 2]
    out = jax.lax.fori_loop(0, ends[-1], one, jnp.zeros((len(rows), outputs), x.dtype))
    return jnp.where(grouped(x, sizes), out[: x.shape[0]], 0)


def _of_one(rows: Array, matrix: Array, out_first: bool) -> Array:
    if not out_first:
        return jnp.matmul(rows, matrix, preferred_element_type=jnp.float32)
    # The matrix is on the left, and barriers keep it there: otherwise XLA's CPU backend transposes it.
    columns = jax.lax.optimization_barrier(rows.T)
    return jax.lax.optimization_barrier(jnp.matmul(matrix, columns, preferred_element_type=jnp.float32)).T


def grouped(x: Array, sizes: Array) -> Array:
    """Returns bool[M, 1]: True for rows of some group."""
    return (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
