"""Sums over the shards in two blocks of columns, one sent while the other is multiplied: for rows too few for halves.

A step of few rows takes as long as its matrices take to be read, and halves of its rows would read them twice. Cut by
columns each matrix is read once: the first block's sum goes on beside the product of the second, and the second one's
beside that part of the next matrix which multiplies the first. A norm between them is divided out behind the product.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.halves import after
from jdisagg.model.norms import RMSNorm
from jdisagg.model.weight import Weight, over
from jdisagg.parallel.compiler_flags import SENT_BESIDE_BYTES

BLOCKS = 2  # more would each take the time that a collective takes to start
LANES = 128  # of a tile: both blocks begin at one


def cuts(model: ModelConfig, shards: int, *weights: Weight) -> bool:
    """Whether a layer with these is cut so: a dense one, whose norms are before attention and MLP alone.

    A scaled product rounds whole rows, and what adapters add is summed as a whole.
    """
    dense = model.experts is None and model.latent is None and model.norms == "before"
    plain = all(each.low_rank is None and not each.form.is_scaled and not each.form.out_first for each in weights)
    return shards > 1 and dense and plain and model.hidden_size % (BLOCKS * LANES) == 0


def pays(hidden_size: int, rows: int) -> bool:
    """Whether a block of so many rows is sent beside products: the least are summed before one has begun."""
    return rows * (hidden_size // BLOCKS) * 2 >= SENT_BESIDE_BYTES


def block(array: Array, number: int, axis: int) -> Array:
    """One of both, read where it lies.

    A start told as a number would be folded into a slice of a loop's matrix, which a TPU then copies out of its stack.
    """
    size = array.shape[axis] // BLOCKS
    start = jax.lax.optimization_barrier(jnp.int32(number * size))
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def summed_in_turn(
    weight: Weight,
    rows: Array,
    axis: str | None,
    use: Callable[[int, Array], Array | None] = lambda number, block: None,
) -> list[Array]:
    """Both blocks of a row-sharded product's columns, summed. use: what is done with one while the next is sent."""
    kernel, begun, made = weight.kernel[...], list[Array](), list[Array]()
    for number in range(BLOCKS):
        begun.append(_product(after(rows, begun[-1] if begun else None), block(kernel, number, 1)).astype(rows.dtype))
    used: Array | None = begun[-1]
    for number, part in enumerate(begun):
        ready = after(part, made[-1] if made else None)  # or the compiler would join both sums
        total = after(ready if axis is None else jax.lax.psum(ready, axis), used)
        if weight.bias is not None:
            total = total + over(_columns(weight.bias[...], number), total)
        made.append(total)
        used = use(number, total)
    return made


class NormedProduct:
    """A norm and a product with what it makes, of rows that come block by block."""

    def __init__(self, norm: RMSNorm, weight: Weight) -> None:
        self.norm, self.weight = norm, weight
        self.sums: Array | float = 0.0  # f32[T, out], of rows that are not divided by their size yet
        self.squares: Array | float = 0.0  # f32[T, 1]

    def add(self, number: int, x: Array) -> Array:
        """Multiplies a block."""
        rows = self.norm.scaled(x, _columns(self.norm.scale[...], number))
        self.sums = self.sums + _product(rows, block(self.weight.kernel[...], number, 0))
        self.squares = self.squares + jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return self.sums

    def whole(self, x: Array) -> Array:
        """Of rows as long as those of `x`, in its dtype."""
        y = (self.sums * self.norm.rate(jnp.asarray(self.squares) / x.shape[-1])).astype(x.dtype)
        return y if self.weight.bias is None else y + over(self.weight.bias[...], y)


def _columns(vector: Array, number: int) -> Array:
    size = vector.shape[0] // BLOCKS
    return vector[number * size : (number + 1) * size]


def _product(rows: Array, matrix: Array) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
