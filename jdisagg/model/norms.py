"""Norms of the network."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
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
