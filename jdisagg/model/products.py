"""Products with a model's matrices, written for the machine that takes them.

A matrix lies as its platform's products want it and holds what `WeightFormat` says; both are chosen when it is loaded
(`layout_of`, `jdisagg/model/params.py`), and `product` reads them off its `MatrixForm`. The CPU's products (YNNPACK
behind XLA) pack the right operand at every call and take the left one as it lies. Few rows therefore go as a product
*of* the matrix, [out, in] by [in, rows], with barriers so that XLA does not turn it round again; many rows pack less
than they multiply. Processor time of 576 x 3,072 in f32 on a 2-core AMD machine, [in, out] -> this: 1.7 -> 1.2 ms for
8 rows, 3.4 -> 2.2 for 32, 8.6 -> 8.1 for 128. One row is a loop of XLA's own, which is as fast as memory in f32 and
six times slower in any other dtype: there a second row is added.
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

FEW_ROWS = 128  # the most that go as a product of the matrix
# In bf16 all do: a product with it adds up in another order than one of it, and so a row would have other bits in a
# wide chunk than in a narrow one. It also took 16 to 28 % longer (512 rows, a CPU without bf16 products).
FEW = {"int8": 32, "bfloat16": 1 << 30}
# YNNPACK adds up a row's product in another order where rows are not a multiple of its tile's. They are filled up, so
# that a row has the same bits in a step of its own kind and beside others, in a narrow bucket and a wide one, whatever
# its company: 8 rows take a quarter to a third longer for it.
TILE_ROWS = 16
# With AVX-512 it adds up in yet another order where they are a multiple of 32 or 64, and where the matrix is on the
# right: they are filled up to odd multiples of 16, and all go as products of the matrix (512 rows take 18 % longer).
# Of the machine that compiles, and so for its own programs alone: what is compiled here for a TPU or a GPU is the same
# on any machine.
WIDE_VECTORS = has_feature("avx512f")
# Of fewer outputs (a router's, small adapters') rows are summed up in another order from 200 to 512 of them on.
LEAST_OUTPUTS = 64
STORED = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # the scaled number that the largest of a channel or token becomes
STEP = {dtype: 1 / largest for dtype, largest in LARGEST.items()}  # XLA would divide by its inverse as well
TINY = 1e-12  # of a scale: a channel of zeros stays one


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How one matrix lies and what it holds."""

    out_first: bool = False  # [out, in], and not [in, out]
    dtype: str = AS_ACTIVATIONS

    @property
    def is_scaled(self) -> bool:
        return self.dtype in LARGEST

    def stored(self, dtype: DTypeLike) -> DTypeLike:
        """Of the numbers, where activations are of `dtype`."""
        return STORED.get(self.dtype, dtype)


def layout_of(platform: str) -> bool:
    """Whether matrices lie [out, in] on "cpu", "gpu" or "tpu".

    XLA's TPU and GPU programs choose their own operand order and take either; theirs stay as they were measured.
    """
    return platform == "cpu"


class Partial(NamedTuple):
    """A shard's part of a product that is summed over shards: its rows, and the scale of each if they are scaled."""

    sums: Array
    scale: Array | None  # f32[rows, 1]


def product(x: Array, kernel: Array, scale: Array | None, form: MatrixForm, axis: str | None = None) -> Array:
    """[..., in] by a matrix of this form -> [..., out] in the dtype of x, summed over the shards of `axis`."""
    rows = x.reshape(-1, x.shape[-1])
    y = whole(partial_product(rows, kernel, scale, form, axis), scale, axis).astype(x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def partial_product(rows: Array, kernel: Array, scale: Array | None, form: MatrixForm, axis: str | None) -> Partial:
    """Of [rows, in]; what is left of it is `whole`."""
    if scale is not None:
        return _scaled(rows, kernel, form, axis)
    y = _dot(rows.astype(kernel.dtype), kernel, form, _sums(rows.dtype, kernel.dtype)).astype(rows.dtype)
    return Partial(y, None)


def whole(part: Partial, scale: Array | None, axis: str | None) -> Array:
    """The sum of all shards' parts; f32 of scaled ones."""
    sums = part.sums if axis is None else jax.lax.psum(part.sums, axis)
    if part.scale is None:
        return sums
    assert scale is not None
    return sums.astype(jnp.float32) * part.scale * scale[None, :]


def quantized(rows: Array, dtype: str) -> tuple[Array, Array]:
    """Each row in int8 or fp8 and its scale, f32[rows, 1]: symmetric, the largest number becomes the dtype's."""
    return _rounded(rows, _absmax(rows), dtype)


def _absmax(rows: Array) -> Array:
    return jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=-1, keepdims=True)


def _rounded(rows: Array, absmax: Array, dtype: str) -> tuple[Array, Array]:
    scale = jnp.maximum(absmax * STEP[dtype], TINY)
    parts = rows.astype(jnp.float32) / scale
    return (jnp.round(parts) if dtype == "int8" else parts).astype(STORED[dtype]), scale


def _scaled(rows: Array, kernel: Array, form: MatrixForm, axis: str | None) -> Partial:
    """Sums in int32, f32 of fp8.

    Shards share a token's scale, so that their integer sums add up to what one shard alone would have summed.
    """
    absmax = _absmax(rows)
    absmax = absmax if axis is None else jax.lax.pmax(absmax, axis)
    parts, row_scale = _rounded(rows, absmax, form.dtype)
    sums = _dot(jax.lax.optimization_barrier(parts), kernel, form, jnp.int32 if form.dtype == "int8" else jnp.float32)
    return Partial(sums, row_scale)


def _sums(*dtypes: DTypeLike) -> DTypeLike:
    """What a product is summed in, where XLA is told: two bf16 sum in f32 by themselves, and are rounded once."""
    return jnp.float32 if jnp.float32 in dtypes else dtypes[0]


def _dot(rows: Array, kernel: Array, form: MatrixForm, sums: DTypeLike) -> Array:
    """[rows, in] by the matrix -> [rows, out]."""
    if not form.out_first:
        return _contract(rows, kernel, 0, sums)
    if rows.shape[0] == 1 and kernel.dtype != jnp.float32:
        return _dot(jnp.concatenate([rows, rows]), kernel, form, sums)[:1]
    ordered = kernel.dtype != jnp.int8  # sums of integers have no order
    few = rows.shape[0] <= FEW.get(kernel.dtype.name, FEW_ROWS) or (ordered and wide_vectors())
    if rows.shape[0] == 1 or not few:
        return _contract(rows, kernel, 1, sums)
    if not ordered:
        return _of_matrix(kernel, rows, sums)
    return _of_matrix(kernel, filled(rows), sums)[: rows.shape[0]]


def wide_vectors() -> bool:
    """Whether what is traced now runs on a CPU with AVX-512."""
    return WIDE_VECTORS and traced_platform() in (None, "cpu")


def filled(rows: Array) -> Array:
    """With rows of zeros, so that there are a multiple of TILE_ROWS; an odd one with wide vectors (`wide_vectors`)."""
    tiles = -(-rows.shape[0] // TILE_ROWS)
    tiles += wide_vectors() and tiles % 2 == 0
    return jnp.pad(rows, ((0, tiles * TILE_ROWS - rows.shape[0]), (0, 0)))


def _contract(rows: Array, kernel: Array, dimension: int, sums: DTypeLike) -> Array:
    return jax.lax.dot_general(rows, kernel, (((1,), (dimension,)), ((), ())), preferred_element_type=sums)


def _of_matrix(kernel: Array, rows: Array, sums: DTypeLike) -> Array:
    """[out, in] by [rows, in], the matrix on the left -> [rows, out].

    In int8 the rows stay as they are: turned, the product is fifteen times slower.
    """
    barrier = jax.lax.optimization_barrier
    if kernel.dtype == jnp.int8:
        y = jax.lax.dot_general(kernel, rows, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return barrier(y).T
    outputs = kernel.shape[0]
    if outputs < LEAST_OUTPUTS:
        kernel = barrier(jnp.pad(kernel, ((0, LEAST_OUTPUTS - outputs), (0, 0))))
    y = jax.lax.dot_general(kernel, barrier(rows.T), (((1,), (0,)), ((), ())), preferred_element_type=sums)
    return barrier(y)[:outputs].T


# How long this machine takes for a layer's products in each weight format, by matrices of the model's own shapes.

MOST_LAYERS = 4  # that one run reads; programs of more take longer to compile than to time
TIMINGS = 7  # of processor time, which other processes disturb little; the least counts


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Seconds of the processor for one layer's products by rows: a decode step's, then a prefill chunk's."""

    seconds: dict[int, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def text(self) -> str:
        (few, few_s), (many, many_s) = self.seconds.items()
        return f"{1e3 * few_s:.2f} ms for {few} rows and {1e3 * many_s:.2f} ms for {many}"


def time_products(config: ModelConfig, dtype: str, rows: Sequence[int]) -> ProductTimes:
    """Of a dtype of `WeightFormat` with activations in f32, on the default device."""
    form = MatrixForm(layout_of(jax.default_backend()), dtype)
    matrices = _matrices(config, form)
    return ProductTimes({each: _timed(config, matrices, form, each) for each in rows})


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of a layer's dense matrices."""
    hidden, wide = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    return [(qkv, hidden), (hidden, config.q_size), (2 * wide, hidden), (hidden, wide)]


def _matrices(config: ModelConfig, form: MatrixForm) -> list[list[tuple[Array, Array | None]]]:
    """Those of a few layers of the model, or of all it has."""
    shapes, random = _shapes(config), np.random.default_rng(0)
    layers = min(MOST_LAYERS, config.num_layers)
    full = [random.standard_normal(shape, np.float32) for shape in shapes]
    return [[_formed(jnp.asarray(each), form) for each in full] for _ in range(layers)]


def _formed(rows: Array, form: MatrixForm) -> tuple[Array, Array | None]:
    scale = None
    if WeightFormat(form.dtype).is_scaled:
        rows, scale = quantized(rows, form.dtype)
        scale = scale[:, 0]
    rows = rows.astype(form.stored(jnp.float32))
    return jnp.array(rows if form.out_first else rows.T), scale


def _timed(config: ModelConfig, matrices: list[list[tuple[Array, Array | None]]], form: MatrixForm, rows: int) -> float:
    def run(layers: list[list[tuple[Array, Array | None]]], x: dict[int, Array]) -> Array:
        return sum((jnp.sum(product(x[inputs], kernel, scale, form)) for layer in layers
                    for (kernel, scale), (_, inputs) in zip(layer, _shapes(config), strict=True)),
                   start=jnp.zeros(()))  # fmt: skip

    program = jax.jit(run)
    x = {inputs: _ones(rows, inputs, jnp.float32) for _, inputs in _shapes(config)}
    jax.block_until_ready(program(matrices, x))
    seconds = []
    for _ in range(TIMINGS):
        began_s = time.process_time()
        jax.block_until_ready(program(matrices, x))
        seconds.append(time.process_time() - began_s)
    return min(seconds) / len(matrices)


def _ones(rows: int, inputs: int, dtype: DTypeLike) -> Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((rows, inputs)), dtype)
