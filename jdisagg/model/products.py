"""Products with a model's matrices, in the form that each platform computes fastest.

A matrix's orientation and number format are chosen when it is loaded (`layout_of`, `jdisagg/model/params.py`), and
`product` takes them from its `MatrixFormat`. The CPU's products (YNNPACK behind XLA) repack the right operand at every
call and use the left one as stored. A few rows are therefore computed as matrix [out, in] times [in, rows], with
barriers that keep XLA from transposing it back; for many rows repacking costs less than multiplying. CPU time of 576 x
3,072 in f32 on a 2-core AMD machine, [in, out] -> this form: 1.7 -> 1.2 ms for 8 rows, 3.4 -> 2.2 for 32, 8.6 -> 8.1
for 128. One row runs in a loop of XLA, which reaches memory speed in f32 and is six times slower in any other dtype;
there a second row is added.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import AS_ACTIVATIONS, ModelConfig, WeightFormat
from jdisagg.parallel.topology import has_feature
from pallas_kernels.platforms import traced_platform

FEW_ROWS = 128  # most rows computed with the matrix as the left operand
# In bf16 always: with the matrix as the right operand sums have another order, so a row's bits would differ between a
# wide chunk and a narrow one. It also took 16 to 28 % longer (512 rows, a CPU without bf16 products).
FEW = {"int8": 32, "bfloat16": 1 << 30}
# YNNPACK sums in another order if the number of rows is not a multiple of its tile. Rows are padded to a multiple, so
# that a row has the same bits in any batch and any bucket. For 8 rows this takes a quarter to a third longer.
TILE_ROWS = 16
# With AVX-512 the order also differs for multiples of 32 or 64 rows, and with the matrix as the right operand. Rows are
# padded to odd multiples of 16 and the matrix is always the left operand (512 rows take 18 % longer). The flag is that
# of the compiling machine and used only for its own CPU programs; programs compiled for a TPU or GPU do not depend on
# it.
WIDE_VECTORS = has_feature("avx512f")
# With fewer outputs (routers, small adapters) the order changes from 200 to 512 rows on.
LEAST_OUTPUTS = 64
STORED = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # the quantised value of the largest element of a channel or token
STEP = {dtype: 1 / largest for dtype, largest in LARGEST.items()}  # XLA would also multiply by the inverse
TINY = 1e-12  # smallest scale: a channel of zeros stays zero


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """The orientation and number format of one matrix."""

    out_first: bool = False  # stored as [out, in] instead of [in, out]
    dtype: str = AS_ACTIVATIONS

    @property
    def is_scaled(self) -> bool:
        return self.dtype in LARGEST

    def stored(self, dtype: DTypeLike) -> DTypeLike:
        """Returns the dtype of the stored numbers if activations are of `dtype`."""
        return STORED.get(self.dtype, dtype)


def layout_of(platform: str) -> bool:
    """Returns True if matrices are stored [out, in] on the platform "cpu", "gpu" or "tpu". XLA chooses the operand
    order of TPU and GPU programs itself and takes either; there [in, out] is the measured form."""
    return platform == "cpu"


class PartialResult(NamedTuple):
    """One shard's partial sums of a row-parallel product, with the scale of each row if they are quantised."""

    sums: Array
    scale: Array | None  # f32[rows, 1]


def product(x: Array, kernel: Array, scale: Array | None, form: MatrixFormat, axis: str | None = None) -> Array:
    """Multiplies x [..., in] with a matrix of this form: [..., out] in the dtype of x, reduced over the shards of
    `axis`."""
    rows = x.reshape(-1, x.shape[-1])
    y = whole(partial_product(rows, kernel, scale, form, axis), scale, axis).astype(x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def partial_product(
    rows: Array, kernel: Array, scale: Array | None, form: MatrixFormat, axis: str | None
) -> PartialResult:
    """Returns this shard's partial sums for [rows, in]; `whole` completes them."""
    if scale is not None:
        return _scaled(rows, kernel, form, axis)
    y = _dot(rows.astype(kernel.dtype), kernel, form, _sums(rows.dtype, kernel.dtype)).astype(rows.dtype)
    return PartialResult(y, None)


def whole(part: PartialResult, scale: Array | None, axis: str | None) -> Array:
    """Returns the sum of all shards' partial sums; f32 for quantised ones."""
    sums = part.sums if axis is None else jax.lax.psum(part.sums, axis)
    if part.scale is None:
        return sums
    assert scale is not None
    return sums.astype(jnp.float32) * part.scale * scale[None, :]


def quantized(rows: Array, dtype: str) -> tuple[Array, Array]:
    """Returns each row in int8 or fp8 and its scale f32[rows, 1]: symmetric, with the largest element at the dtype's
    maximum."""
    return _rounded(rows, _absmax(rows), dtype)


def _absmax(rows: Array) -> Array:
    return jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=-1, keepdims=True)


def _rounded(rows: Array, absmax: Array, dtype: str) -> tuple[Array, Array]:
    scale = jnp.maximum(absmax * STEP[dtype], TINY)
    parts = rows.astype(jnp.float32) / scale
    return (jnp.round(parts) if dtype == "int8" else parts).astype(STORED[dtype]), scale


def _scaled(rows: Array, kernel: Array, form: MatrixFormat, axis: str | None) -> PartialResult:
    """Returns quantised partial sums in int32, or in f32 for fp8. Shards share a row's scale, so that their integer
    sums equal the sum of a single shard."""
    absmax = _absmax(rows)
    absmax = absmax if axis is None else jax.lax.pmax(absmax, axis)
    parts, row_scale = _rounded(rows, absmax, form.dtype)
    sums = _dot(jax.lax.optimization_barrier(parts), kernel, form, jnp.int32 if form.dtype == "int8" else jnp.float32)
    return PartialResult(sums, row_scale)


def _sums(*dtypes: DTypeLike) -> DTypeLike:
    """Returns the accumulation dtype passed to XLA; bf16 products accumulate in f32 by default and are rounded once."""
    return jnp.float32 if jnp.float32 in dtypes else dtypes[0]


def _dot(rows: Array, kernel: Array, form: MatrixFormat, sums: DTypeLike) -> Array:
    """Multiplies [rows, in] with the matrix: [rows, out]."""
    if not form.out_first:
        return _contract(rows, kernel, 0, sums)
    if rows.shape[0] == 1 and kernel.dtype != jnp.float32:
        return _dot(jnp.concatenate([rows, rows]), kernel, form, sums)[:1]
    ordered = kernel.dtype != jnp.int8  # integer sums do not depend on the order
    few = rows.shape[0] <= FEW.get(kernel.dtype.name, FEW_ROWS) or (ordered and wide_vectors())
    if rows.shape[0] == 1 or not few:
        return _contract(rows, kernel, 1, sums)
    if not ordered:
        return _of_matrix(kernel, rows, sums)
    return _of_matrix(kernel, filled(rows), sums)[: rows.shape[0]]


def wide_vectors() -> bool:
    """Returns True if the program being traced runs on a CPU with AVX-512."""
    return WIDE_VECTORS and traced_platform() in (None, "cpu")


def filled(rows: Array) -> Array:
    """Pads the rows with zeros to a multiple of TILE_ROWS; to an odd multiple with `wide_vectors`."""
    tiles = -(-rows.shape[0] // TILE_ROWS)
    tiles += wide_vectors() and tiles % 2 == 0
    return jnp.pad(rows, ((0, tiles * TILE_ROWS - rows.shape[0]), (0, 0)))


def _contract(rows: Array, kernel: Array, dimension: int, sums: DTypeLike) -> Array:
    return jax.lax.dot_general(rows, kernel, (((1,), (dimension,)), ((), ())), preferred_element_type=sums)


def _of_matrix(kernel: Array, rows: Array, sums: DTypeLike) -> Array:
    """Multiplies the matrix [out, in] as left operand with [rows, in]: [rows, out]. int8 rows are not transposed: with
    transposed rows the product is fifteen times slower."""
    barrier = jax.lax.optimization_barrier
    if kernel.dtype == jnp.int8:
        y = jax.lax.dot_general(kernel, rows, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return barrier(y).T
    outputs = kernel.shape[0]
    if outputs < LEAST_OUTPUTS:
        kernel = barrier(jnp.pad(kernel, ((0, LEAST_OUTPUTS - outputs), (0, 0))))
    y = jax.lax.dot_general(kernel, barrier(rows.T), (((1,), (0,)), ((), ())), preferred_element_type=sums)
    return barrier(y)[:outputs].T


# Timing of a layer's products on this machine in each weight format, with matrices of the model's shapes.

MOST_LAYERS = 4  # layers of one run; a program with more takes longer to compile than to time
TIMINGS = 7  # runs; CPU time is used because other processes disturb it little, and the minimum counts


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """CPU seconds of one layer's products by number of rows: a decode step's, then a prefill chunk's."""

    seconds: dict[int, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def text(self) -> str:
        (few, few_s), (many, many_s) = self.seconds.items()
        return f"{1e3 * few_s:.2f} ms for {few} rows and {1e3 * many_s:.2f} ms for {many}"


def time_products(config: ModelConfig, dtype: str, rows: Sequence[int]) -> ProductTimes:
    """Measures products in a dtype of `WeightFormat` with f32 activations on the default device."""
    form = MatrixFormat(layout_of(jax.default_backend()), dtype)
    matrices = _matrices(config, form)
    return ProductTimes({each: _timed(config, matrices, form, each) for each in rows})


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Returns the shapes [out, in] of a layer's dense matrices."""
    hidden, wide = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    return [(qkv, hidden), (hidden, config.q_size), (2 * wide, hidden), (hidden, wide)]


def _matrices(config: ModelConfig, form: MatrixFormat) -> list[list[tuple[Array, Array | None]]]:
    """Returns random matrices of up to MOST_LAYERS layers."""
    shapes, random = _shapes(config), np.random.default_rng(0)
    layers = min(MOST_LAYERS, config.num_layers)
    full = [random.standard_normal(shape, np.float32) for shape in shapes]
    return [[_formed(jnp.asarray(each), form) for each in full] for _ in range(layers)]


def _formed(rows: Array, form: MatrixFormat) -> tuple[Array, Array | None]:
    scale = None
    if WeightFormat(form.dtype).is_scaled:
        rows, scale = quantized(rows, form.dtype)
        scale = scale[:, 0]
    rows = rows.astype(form.stored(jnp.float32))
    return jnp.array(rows if form.out_first else rows.T), scale


def _timed(
    config: ModelConfig, matrices: list[list[tuple[Array, Array | None]]], form: MatrixFormat, rows: int
) -> float:
    def run(layers: list[list[tuple[Array, Array | None]]], x: dict[int, Array]) -> Array:
        return sum((jnp.sum(product(x[inputs], kernel, scale, form)) for layer in layers
                    for (kernel, scale), (_, inputs) in zip(layer, _shapes(config), strict=True)),
                   start=jnp.zeros(()))  # fmt: skip

    program = jax.jit(run)
    x = {inputs: _random_rows(rows, inputs, jnp.float32) for _, inputs in _shapes(config)}
    jax.block_until_ready(program(matrices, x))
    seconds = []
    for _ in range(TIMINGS):
        began_s = time.process_time()
        jax.block_until_ready(program(matrices, x))
        seconds.append(time.process_time() - began_s)
    return min(seconds) / len(matrices)


def _random_rows(rows: int, inputs: int, dtype: DTypeLike) -> Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((rows, inputs)), dtype)
