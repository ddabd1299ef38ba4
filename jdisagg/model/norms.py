"""RMS norms, and the overlap of all-reduces with products by splitting a chunk's rows in halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.products import PartialResult
from jdisagg.model.weight import over


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in f32 over the last dimension."""

    def __init__(self, size: int, config: ModelConfig, dtype: DTypeLike):
        self.offset, self.epsilon = config.norm_offset, config.rms_norm_eps
        self.scale = nnx.Param(jnp.full((size,), 1 - self.offset, dtype))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * self.rate(jnp.mean(wide * wide, axis=-1, keepdims=True))
        if self.offset:
            return (over(self.scale[...].astype(jnp.float32) + self.offset, x) * wide).astype(x.dtype)
        return over(self.scale[...], x) * wide.astype(x.dtype)

    def rate(self, squares: Array) -> Array:
        """Returns the factor of rows with this mean of squares."""
        return jax.lax.rsqrt(squares + self.epsilon)

    def scaled(self, x: Array, scale: Array) -> Array:
        """Applies a slice of the scale to some columns, without the factor of `rate`."""
        wide = scale.astype(jnp.float32) + self.offset if self.offset else scale
        return (over(wide, x) * x).astype(x.dtype)


class WideNorm(nnx.Module):
    """RMSNorm over all heads of all shards (OLMo 2, section 3), of which this shard holds some. `copies` is the number
    of shards that hold each head. Padding heads are zeros and add nothing."""

    def __init__(self, heads: int, whole: int, copies: int, config: ModelConfig, axis: str | None, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((heads * config.head_dim,), dtype))
        self.heads, self.numbers = heads, whole * copies * config.head_dim
        self.axis, self.epsilon = axis, config.rms_norm_eps

    def __call__(self, x: Array) -> Array:
        """Normalises this shard's heads [..., H, D]."""
        wide = x.astype(jnp.float32)
        squares = jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)
        squares = squares if self.axis is None else jax.lax.psum(squares, self.axis)
        wide = wide * jax.lax.rsqrt(squares / self.numbers + self.epsilon)
        scale = self.scale[...].reshape(self.heads, -1)
        return (jnp.expand_dims(scale, tuple(range(x.ndim - 2))) * wide).astype(x.dtype)


def head_norm(
    config: ModelConfig, heads: int, whole: int, copies: int, axis: str | None, dtype: DTypeLike
) -> RMSNorm | WideNorm | None:
    """Returns the norm of q or k for a shard with `heads` of `whole` heads; None if the family has none."""
    if not config.qk_norm:
        return None
    if config.qk_norm_is_wide:
        return WideNorm(heads, whole, copies, config, axis, dtype)
    return RMSNorm(config.head_dim, config, dtype)


def normed(norm: RMSNorm | WideNorm | None, x: Array) -> Array:
    """Applies a norm; returns `x` if it is None."""
    return x if norm is None else norm(x)


# A chunk's rows in two halves: the all-reduce of one half overlaps the products of the other.
#
# Rows depend on each other only in attention, whose keys and values are written before. The halves alternate: a product
# of the second starts when that of the first has ended, and only then is the first half's all-reduce awaited. Without
# these barriers the compiler would join both halves' products again.

# Fewest rows of one half: with fewer rows reading the matrices takes longer than multiplying, and each half reads them.
# Balance of FLOPs and bytes in bf16: v5p 166 rows, v5e 240, H100 295, v6e 560.
FEWEST_ROWS = 512
TILE = 128  # rows of a matrix unit; the size of the first half is a multiple of it


def halves(model: ModelConfig, rows: int, shards: int, *, out_first: bool, adapted: bool) -> int:
    """Returns into how many parts a chunk's rows are split: 2 or 1. Matrices stored [out, in] mean a CPU, which cannot
    overlap.

    Experts and latents have their own collectives, and adapter slots are set for all rows at once, so both are
    excluded.
    """
    dense = model.experts is None and model.latent is None
    return 2 if shards > 1 and dense and not out_first and not adapted and rows >= 2 * FEWEST_ROWS else 1


def cut(rows: Array) -> tuple[Array, Array]:
    """Splits [T, ...] into halves; the first is at least as long."""
    middle = -(-rows.shape[0] // (2 * TILE)) * TILE
    return rows[:middle], rows[middle:]


def in_turn(
    parts: Sequence[Array], begin: Callable[[Array], PartialResult], end: Callable[[PartialResult], Array]
) -> tuple[Array, ...]:
    """Returns each part's reduced product; the reduction of one part overlaps the product of the next."""
    begun, ended, product, summed = list[PartialResult](), list[Array](), None, None
    for part in parts:
        begun.append(begin(after(part, product)))
        product = begun[-1].sums
    for each in begun:
        # Without this barrier the compiler may schedule the second product or both reductions without overlap.
        summed = end(each._replace(sums=after(each.sums, summed)))
        ended.append(after(summed, product))
    return tuple(ended)


def after(array: Array, before: Array | None) -> Array:
    """Returns `array`, with a barrier that orders it after `before`."""
    return array if before is None else jax.lax.optimization_barrier((array, before))[0]
