"""A layer's products and its experts' made into programs, and the floors that they are held against: the copy of the
matrices where rows are few, a square product where they are many."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels_cases import Case
from benchmarks.kernels_floors import Contest, Sizes, chained, copy_floor, layers_for, matmul_floor, random_block
from benchmarks.kernels_timing import Contestant
from jdisagg.model.products import MatrixFormat, layout_of, product, quantized
from pallas_kernels import grouped_product
from pallas_kernels.grouped_product import xla

FEW_ROWS = 256  # of one matrix: with more, data sheets have multiplying take longer than reading it
SCALED = ("int8", "fp8")
EXPERTS = 8  # that each token asks: rows are dealt to that many at a time


def product_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    inputs, outputs = case.matrix
    form = MatrixFormat(layout_of(platform), case.weights if case.weights in SCALED else sizes_name(sizes))
    number_bytes = 1 if form.is_scaled else jnp.dtype(sizes.dtype).itemsize
    seeds = range(layers_for(inputs * outputs * number_bytes))
    layers = [stored_matrix(case, sizes, form, seed) for seed in seeds]
    rows = random_block((case.tokens, inputs), sizes.dtype)
    ours = chained(lambda x, layer: product(x, layer[0], layer[1], form), rows, layers)
    if case.tokens <= FEW_ROWS:
        return Contest(case, ours, *copy_floor(sizes, inputs * outputs * number_bytes + 2 * rows.nbytes))
    return Contest(case, ours, *matmul_floor(sizes, 2.0 * case.tokens * inputs * outputs))


def sizes_name(sizes: Sizes) -> str:
    return jnp.dtype(sizes.dtype).name


def stored_matrix(case: Case, sizes: Sizes, form: MatrixFormat, seed: int) -> tuple[Array, Array | None]:
    """As a loaded model has it: numbers, and a scale of each output."""
    inputs, outputs = case.matrix
    matrix = random_block((outputs, inputs), jnp.float32, seed) * inputs**-0.5
    if not form.is_scaled:
        return (matrix if form.out_first else matrix.T).astype(sizes.dtype), None
    codes, scales = quantized(matrix, form.dtype)
    return codes if form.out_first else codes.T, scales[:, 0]


def dealt_rows(case: Case) -> np.ndarray:
    """i32[E]: rows of each expert, of tokens that ask several at random."""
    experts, rng = case.matrix[0], np.random.default_rng(0)
    asked = min(EXPERTS, experts)
    dealt = [rng.permutation(experts)[:asked] for _ in range(-(-case.tokens // asked))]
    return np.bincount(np.concatenate(dealt)[: case.tokens], minlength=experts).astype(np.int32)


def expert_layers(case: Case, sizes: Sizes) -> tuple[Array, list[tuple[Array, Array]], Array]:
    """Rows, the matrices of each layer up and down, rows of each expert."""
    experts, inputs, inner = case.matrix
    one = experts * inputs * inner * jnp.dtype(sizes.dtype).itemsize
    made = [
        tuple((random_block(shape, sizes.dtype, seed) * shape[1] ** -0.5).astype(sizes.dtype) for shape in shapes)
        for seed in range(layers_for(2 * one))
        for shapes in [((experts, inputs, inner), (experts, inner, inputs))]
    ]
    layers: list[Any] = made
    return random_block((case.tokens, inputs), sizes.dtype), layers, jnp.asarray(dealt_rows(case))


def grouped_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    """Up and down again: two of our operations, and counted as one."""
    del platform
    rows, layers, dealt = expert_layers(case, sizes)

    def up_and_down(x: Array, layer: tuple[Array, Array]) -> Array:
        up, down = layer
        return grouped_product(grouped_product(x, up, dealt, out_first=False), down, dealt, out_first=False)

    ours = chained(up_and_down, rows, layers)
    experts, inputs, inner = case.matrix
    asked = int(np.count_nonzero(dealt_rows(case)))
    if case.tokens <= FEW_ROWS * experts:
        read = 2 * asked * inputs * inner * jnp.dtype(sizes.dtype).itemsize
        moved = 2 * case.tokens * (inputs + inner) * jnp.dtype(sizes.dtype).itemsize
        return Contest(case, ours, *copy_floor(sizes, read + moved))
    return Contest(case, ours, *matmul_floor(sizes, 4.0 * case.tokens * inputs * inner))


def ragged_peer(case: Case, sizes: Sizes) -> Contestant:
    """The same by XLA's own grouped product."""
    rows, layers, dealt = expert_layers(case, sizes)
    ragged = partial(xla.ragged_product, sizes=dealt, out_first=False)
    return chained(lambda x, layer: ragged(ragged(x, layer[0]), layer[1]), rows, layers)
