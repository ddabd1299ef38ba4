"""How long this machine takes for a layer's products in each weight format, by matrices of the model's own shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.weight_format import WeightFormat
from jdisagg.model.products import MatrixForm, layout_of, product, quantized

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
