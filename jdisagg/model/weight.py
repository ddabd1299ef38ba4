"""A matrix of the network, whole or one shard's part of it, and the product with it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.model.lora import LowRank
from jdisagg.model.products import MatrixForm, Partial, partial_product, product, quantized, whole


class Weight(nnx.Module):
    """A matrix and, where the family has one, its bias [out].

    It is made [in, out] in the dtype of activations, which is what is trained; `become` gives it a machine's form.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, scale: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None
        self.scale: nnx.Param | None = nnx.data(None)  # f32[out], of int8 and fp8
        self.form = MatrixForm()
        self.low_rank: LowRank | None = nnx.data(None)  # what adapters add, where a step may hold any

    def __call__(self, x: Array) -> Array:
        return summed(self, x, None)

    def become(self, form: MatrixForm) -> None:
        """The same matrix in another form, rounded where that is coarser."""
        assert self.form == MatrixForm(), self.form
        rows = self.kernel[...].T  # [out, in]
        if form.is_scaled:
            rows, scale = quantized(rows, form.dtype)
            self.scale = nnx.Param(scale[:, 0])
        rows = rows.astype(form.stored(rows.dtype))
        self.kernel, self.form = nnx.Param(rows if form.out_first else rows.T), form


def summed(weight: Weight, x: Array, axis: str | None) -> Array:
    """A row-sharded product: partial sums are added over the shards, then the bias once."""
    scale = None if weight.scale is None else weight.scale[...]
    if weight.low_rank is None:
        y = product(x, weight.kernel[...], scale, weight.form, axis)
    else:
        y = _adapted(weight, weight.low_rank, x, scale, axis)
    return y if weight.bias is None else y + over(weight.bias[...], y)


def begun(weight: Weight, rows: Array, axis: str | None) -> Partial:
    """This shard's part of `summed`, of [rows, in] that no adapter adds to; `ended` is the rest of it."""
    assert weight.low_rank is None, "rows with adapters are not cut"
    scale = None if weight.scale is None else weight.scale[...]
    return partial_product(rows, weight.kernel[...], scale, weight.form, axis)


def ended(weight: Weight, part: Partial, axis: str | None, dtype: DTypeLike) -> Array:
    """Partial sums over the shards, then the bias once."""
    y = whole(part, None if weight.scale is None else weight.scale[...], axis).astype(dtype)
    return y if weight.bias is None else y + over(weight.bias[...], y)


def _adapted(weight: Weight, low_rank: LowRank, x: Array, scale: Array | None, axis: str | None) -> Array:
    """With what each row's adapter adds: before the sum over the shards, but for scaled numbers, which are summed as
    integers."""
    more = low_rank(x, as_products=weight.form.out_first)
    if scale is None:
        y = product(x, weight.kernel[...], None, weight.form) + more
        return y if axis is None else jax.lax.psum(y, axis)
    y = product(x, weight.kernel[...], scale, weight.form, axis)
    return y + (more if axis is None else jax.lax.psum(more, axis))


def over(vector: Array, x: Array) -> Array:
    """[size] with leading dimensions of 1, as many as [..., size] has."""
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))
