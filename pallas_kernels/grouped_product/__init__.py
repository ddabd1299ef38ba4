"""Grouped product: each row times the matrix of its group. Checks the arguments, picks the platform's code."""

from functools import partial

import jax
from jax import Array

from pallas_kernels.checks import FLOATS, check_ints, require
from pallas_kernels.grouped_product import hopper, xla
from pallas_kernels.platforms import multiplies_by_mosaic, on_platform


def on_gpu(x: Array, matrices: Array, sizes: Array, *, out_first: bool) -> Array:
    """Multiplies by Mosaic GPU's kernel if the GPU and the arguments allow it, else by XLA in blocks of rows. XLA's own
    grouped product makes masked copies on a GPU: compiled for an H100, 524 MiB of temporaries for 1,024 bf16 rows and
    the experts of Qwen3-30B-A3B, where blocks of rows take 13 MiB."""
    multiply = hopper.grouped_product if multiplies_by_mosaic(x, matrices, out_first) else xla.product_by_blocks
    return multiply(x, matrices, sizes, out_first=out_first)


def grouped_product(x: Array, matrices: Array, sizes: Array, *, out_first: bool) -> Array:
    """Multiplies each row of x by its group's matrix; the first sizes[0] rows are of group 0, those after them of group
    1.

    x: [M, K], f32 or bf16; matrices: [G, K, N], or [G, N, K] if stored `out_first`, f32 or bf16: rows are rounded to
    their dtype. sizes: i32[G], whose sum is at most M. Rows past that sum give zeros. Returns [M, N] in x's dtype, sums
    are in f32; a row that is not finite does not affect other rows. Raises KernelError with both values if arguments do
    not fit each other.
    """
    require(x.ndim == 2 and x.dtype.name in FLOATS, f"x must be [M, K] of one of {FLOATS}, got {x.dtype.name}{x.shape}")
    fits = matrices.ndim == 3 and matrices.shape[2 if out_first else 1] == x.shape[1]
    wanted = f"[G, N, {x.shape[1]}]" if out_first else f"[G, {x.shape[1]}, N]"
    require(fits, f"matrices must be {wanted} for x {x.shape}, got {matrices.shape}")
    require(matrices.dtype.name in FLOATS, f"matrices must be one of {FLOATS}, got {matrices.dtype.name}")
    check_ints("sizes", sizes, matrices.shape[:1])
    return _on_its_platform(x, matrices, sizes, out_first)


@partial(jax.jit, inline=True, static_argnums=3)
def _on_its_platform(x: Array, matrices: Array, sizes: Array, out_first: bool) -> Array:
    """Traces the code of each platform once for all layers and programs of these shapes."""
    variants = xla.ragged_product, on_gpu, xla.product_by_blocks
    tpu, cuda, blocks = (partial(each, out_first=out_first) for each in variants)
    return on_platform(x, matrices, sizes, tpu=tpu, cuda=cuda, default=blocks)
