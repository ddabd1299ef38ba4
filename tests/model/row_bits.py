"""The bits that one row of a product has beside so many others, in every form of a matrix that lies [out, in].

python -m tests.model.row_bits       # JSON of all, for a process that compiles as a user's
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.model.network import scored
from jdisagg.model.products import STORED, MatrixFormat, product, quantized
from pallas_kernels import grouped_product

INPUTS, OUTPUTS, FEW, EXPERTS = 96, 160, 12, 8
COUNTS = (2, 4, 8, 12, 16, 72, 128, 136, 520)  # of decode alone, beside chunks, and of chunks in every bucket
FORMS = ("float32", "bfloat16", "int8", "fp8", "head", "head in bfloat16", "experts", "experts in bfloat16", "few")


def bits_of(form: str) -> dict[int, str]:
    """Of the first two rows, by how many there are."""
    random = np.random.default_rng(520)
    x, rows = (random.standard_normal(shape, np.float32) for shape in ((max(COUNTS), INPUTS), (OUTPUTS, INPUTS)))
    program, matrix = jax.jit(_call(form)), _matrix(jnp.asarray(rows), form)
    return {count: np.asarray(program(x[:count], *matrix))[:2].tobytes().hex() for count in COUNTS}


def _matrix(rows: Array, form: str) -> tuple[Array, ...]:
    if form in ("int8", "fp8"):
        kernel, scale = quantized(rows, form)
        return kernel, scale[:, 0]
    rows = rows[:FEW] if form == "few" else rows  # outputs: a router's, or a small adapter's
    rows = rows.astype(STORED.get(form.rpartition(" ")[2], jnp.float32))
    return (jnp.stack([rows] * EXPERTS) if form.startswith("experts") else rows,)


def _call(form: str) -> Callable[..., Array]:
    if form.startswith("head"):
        return scored
    if form.startswith("experts"):
        return _of_experts
    return lambda x, kernel, scale=None: product(
        x, kernel, scale, MatrixFormat(True, "float32" if form == "few" else form)
    )


def _of_experts(x: Array, matrices: Array) -> Array:
    """Rows sent to each expert in turn."""
    group = np.arange(len(x)) % EXPERTS
    order, sizes = np.argsort(group, kind="stable"), np.bincount(group, minlength=EXPERTS)
    return grouped_product(x[order], matrices, jnp.asarray(sizes, jnp.int32), out_first=True)[np.argsort(order)]


if __name__ == "__main__":
    json.dump({form: bits_of(form) for form in FORMS}, sys.stdout)
