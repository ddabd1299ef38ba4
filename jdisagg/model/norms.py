"""Norms of the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.products import Partial
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
        """What rows whose squares have this mean are multiplied by."""
        return jax.lax.rsqrt(squares + self.epsilon)

    def scaled(self, x: Array, scale: Array) -> Array:
        """Some columns of rows by their part of the scale, and by no rate yet."""
        wide = scale.astype(jnp.float32) + self.offset if self.offset else scale
        return (over(wide, x) * x).astype(x.dtype)


class WideNorm(nnx.Module):
    """RMSNorm over all heads of all shards at once (OLMo 2, section 3), of which this shard holds some.

    copies: how many shards hold each of the heads. Heads that are padding are zeros and add nothing.
    """

    def __init__(self, heads: int, whole: int, copies: int, config: ModelConfig, axis: str | None, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((heads * config.head_dim,), dtype))
        self.heads, self.numbers = heads, whole * copies * config.head_dim
        self.axis, self.epsilon = axis, config.rms_norm_eps

    def __call__(self, x: Array) -> Array:
        """[..., H, D] of this shard."""
        wide = x.astype(jnp.float32)
        squares = jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)
        squares = squares if self.axis is None else jax.lax.psum(squares, self.axis)
        wide = wide * jax.lax.rsqrt(squares / self.numbers + self.epsilon)
        scale = self.scale[...].reshape(self.heads, -1)
        return (jnp.expand_dims(scale, tuple(range(x.ndim - 2))) * wide).astype(x.dtype)


def head_norm(
    config: ModelConfig, heads: int, whole: int, copies: int, axis: str | None, dtype: DTypeLike
) -> RMSNorm | WideNorm | None:
    """The norm of q or k of which a shard holds `heads` of `whole` heads; None where the family has none."""
    if not config.qk_norm:
        return None
    if config.qk_norm_is_wide:
        return WideNorm(heads, whole, copies, config, axis, dtype)
    return RMSNorm(config.head_dim, config, dtype)


def normed(norm: RMSNorm | WideNorm | None, x: Array) -> Array:
    """`x` where there is no norm."""
    return x if norm is None else norm(x)


# A chunk's rows in two halves, so that one's sums over the shards go on while the other's products run.
#
# A row's layer needs nothing of another's but in attention, whose keys and values are written before. Halves take
# turns: a product of the second begins when the first one's has ended, and only then is the first one's sum
# waited for. The compiler would otherwise join both halves' products into one again.

# Of one half: with fewer rows a device reads its matrices for longer than it multiplies, and each half reads them.
# Balance of FLOPs and bytes in bf16: v5p 166 rows, v5e 240, H100 295, v6e 560.
FEWEST_ROWS = 512
TILE = 128  # rows of a matrix unit: the first half ends at a multiple


def halves(model: ModelConfig, rows: int, shards: int, *, out_first: bool, adapted: bool) -> int:
    """Parts that a chunk's rows go in: 2 or 1. Matrices that lie [out, in] are a CPU's, which sends nothing by itself.

    Experts and latents have collectives of their own, and rows' adapters are told for all rows at once.
    """
    dense = model.experts is None and model.latent is None
    return 2 if shards > 1 and dense and not out_first and not adapted and rows >= 2 * FEWEST_ROWS else 1


def cut(rows: Array) -> tuple[Array, Array]:
    """Both halves of [T, ...], the first no shorter."""
    middle = -(-rows.shape[0] // (2 * TILE)) * TILE
    return rows[:middle], rows[middle:]


def in_turn(
    parts: Sequence[Array], begin: Callable[[Array], Partial], end: Callable[[Partial], Array]
) -> tuple[Array, ...]:
    """Of each part its product summed over the shards: while one is summed, the next one is multiplied."""
    begun, ended, product, summed = list[Partial](), list[Array](), None, None
    for part in parts:
        begun.append(begin(after(part, product)))
        product = begun[-1].sums
    for each in begun:
        # A scheduler that may choose puts the second product, or both sums, where nothing is beside them.
        summed = end(each._replace(sums=after(each.sums, summed)))
        ended.append(after(summed, product))
    return tuple(ended)


def after(array: Array, before: Array | None) -> Array:
    """The same, not before `before` is there."""
    return array if before is None else jax.lax.optimization_barrier((array, before))[0]
