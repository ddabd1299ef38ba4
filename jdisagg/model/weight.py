"""A matrix of the network, whole or one shard's part, and the product with it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.model.lora import LowRank
from jdisagg.model.products import MatrixFormat, PartialResult, partial_product, product, quantized, whole


class Weight(nnx.Module):
    """A matrix with an optional bias [out]. It is created as [in, out] in the activation dtype, which is also the
    trained form; `become` converts it to a platform's form."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, scale: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None
        self.scale: nnx.Param | None = nnx.data(None)  # f32[out], for int8 and fp8
        self.form = MatrixFormat()
        self.low_rank: LowRank | None = nnx.data(None)  # adapter slots, if the worker serves adapters

    def __call__(self, x: Array) -> Array:
        return summed(self, x, None)

    def become(self, form: MatrixFormat) -> None:
        """Converts the matrix in place to another form, rounding it if that form is coarser."""
        assert self.form == MatrixFormat(), self.form
        rows = self.kernel[...].T  # [out, in]
        if form.is_scaled:
            rows, scale = quantized(rows, form.dtype)
            self.scale = nnx.Param(scale[:, 0])
        rows = rows.astype(form.stored(rows.dtype))
        self.kernel, self.form = nnx.Param(rows if form.out_first else rows.T), form


def summed(weight: Weight, x: Array, axis: str | None) -> Array:
    """Returns a row-parallel product: partial sums reduced over the shards, then the bias added once."""
    scale = None if weight.scale is None else weight.scale[...]
    if weight.low_rank is None:
        y = product(x, weight.kernel[...], scale, weight.form, axis)
    else:
        y = _adapted(weight, weight.low_rank, x, scale, axis)
    return y if weight.bias is None else y + over(weight.bias[...], y)


def begun(weight: Weight, rows: Array, axis: str | None) -> PartialResult:
    """Returns this shard's partial sums of `summed` for [rows, in] without adapters; `ended` completes them."""
    assert weight.low_rank is None, "rows with adapters are not cut"
    scale = None if weight.scale is None else weight.scale[...]
    return partial_product(rows, weight.kernel[...], scale, weight.form, axis)


def ended(weight: Weight, part: PartialResult, axis: str | None, dtype: DTypeLike) -> Array:
    y = whole(part, None if weight.scale is None else weight.scale[...], axis).astype(dtype)
    return y if weight.bias is None else y + over(weight.bias[...], y)


def _adapted(weight: Weight, low_rank: LowRank, x: Array, scale: Array | None, axis: str | None) -> Array:
    """Returns the product plus the adapters' contribution. The contribution is added before the reduction over shards.
    Quantised products are reduced as integers, so there the contribution has its own reduction."""
    more = low_rank(x, as_products=weight.form.out_first)
    if scale is None:
        y = product(x, weight.kernel[...], None, weight.form) + more
        return y if axis is None else jax.lax.psum(y, axis)
    y = product(x, weight.kernel[...], scale, weight.form, axis)
    return y + (more if axis is None else jax.lax.psum(more, axis))


def over(vector: Array, x: Array) -> Array:
    """Expands a vector [size] with leading dimensions of 1 to the rank of x [..., size]."""
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))
