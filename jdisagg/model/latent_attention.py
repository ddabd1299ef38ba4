"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), with absorbed or expanded queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.norms import RMSNorm, normed
from jdisagg.model.rope import RotaryTable, rotate
from jdisagg.model.weight import Weight, summed

# The KV cache holds one row per token: its latent (R elements) and a rotated key that all heads share. A head's key is
# computed from the latent by N rows of `up`, its value by V rows. A query can attend in two ways with the same result:
#
# * Absorbed: the query is multiplied by the key rows of `up` and attends to cached rows directly; the weighted sum of
#   latents is then multiplied by the value rows. A query-key pair of one head costs 2 (2 R + rotated) FLOPs and a
#   query 2 R (N + V). Cached tokens are never expanded.
# * Expanded: keys and values of all heads are computed from every row, for 2 R (N + V) FLOPs a head. A pair then costs
#   2 (N + rotated + V), less than a third of the absorbed cost in DeepSeek-V3.


class LatentQueries(NamedTuple):
    """The queries of some rows, and the matrix that expands latents to keys and values."""

    nope: Array  # [..., H, N]: the part that is not rotated
    rope: Array  # [..., H, rotated]
    up: Array  # [H, N + V, R]: a head's key rows, then its value rows

    def of(self, rows: slice) -> LatentQueries:
        return LatentQueries(self.nope[rows], self.rope[rows], self.up)

    @property
    def key_size(self) -> int:
        """Size of an expanded key of one head."""
        return self.nope.shape[-1] + self.rope.shape[-1]

    @property
    def value_size(self) -> int:
        """Size of an expanded value of one head."""
        return self.up.shape[1] - self.nope.shape[-1]

    @property
    def whole(self) -> Array:
        """Queries over expanded keys, [..., H, N + rotated]."""
        return jnp.concatenate([self.nope, self.rope], axis=-1)

    @property
    def absorbed(self) -> Array:
        """Queries over cached rows, [..., H, R + rotated]."""
        keys = self.up[:, : self.nope.shape[-1]]
        return jnp.concatenate([jnp.einsum("...hn,hnr->...hr", self.nope, keys), self.rope], axis=-1)

    def values_of(self, mixed: Array) -> Array:
        """Returns values [..., H, V] from weighted sums of latents [..., H, R]."""
        return jnp.einsum("...hr,hvr->...hv", mixed, self.up[:, self.nope.shape[-1] :])

    def expanded(self, rows: Array) -> tuple[Array, Array]:
        """Expands cached rows [..., R + rotated] to keys [..., H, N + rotated] and values [..., H, V]."""
        rank, split = self.up.shape[2], self.nope.shape[-1]
        made = jnp.einsum("...r,hmr->...hm", rows[..., :rank], self.up)
        shared = jnp.broadcast_to(rows[..., None, rank:], (*made.shape[:-1], rows.shape[-1] - rank))
        return jnp.concatenate([made[..., :split], shared], axis=-1), made[..., split:]


def halves_of(x: Array) -> Array:
    """Reorders [..., D] from adjacent rotation pairs to first elements then second elements, as `rotate` needs."""
    return jax.lax.reshape(jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2), x.shape)


# (layer within the stage, queries, row [..., 1, R + rotated], None, None) -> [..., Hq, V]
AttendLatents = Callable[[int, LatentQueries, Array, None, None], Array]


class LatentAttention(nnx.Module):
    """Multi-head latent attention of one shard, which has some of the heads and all of the latents."""

    def __init__(self, config: ModelConfig, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.latent is not None
        self.latent, self.heads, self.axis = config.latent, config.heads_of_shard(tp), axis
        hidden, rank, latents = config.hidden_size, config.latent.q_lora_rank, replace(config, rms_norm_eps=1e-6)
        weight = partial(Weight, scale=hidden**-0.5, dtype=dtype, rngs=rngs)
        self.q_down = None if rank is None else weight(hidden, rank, bias=config.qkv_bias)
        self.q_norm = None if rank is None else RMSNorm(rank, latents, dtype)
        self.q_up = weight(rank or hidden, self.heads * self.latent.q_head_dim, bias=False)
        self.kv_down = weight(hidden, self.latent.row_size, bias=config.qkv_bias)
        self.kv_norm = RMSNorm(self.latent.kv_lora_rank, latents, dtype)
        up = self.heads * self.latent.up_size, self.latent.kv_lora_rank  # [heads * (N + V), R] as in the checkpoint
        self.kv_up = nnx.Param(self.latent.kv_lora_rank**-0.5 * jax.random.normal(rngs.params(), up, dtype))
        self.out = weight(self.heads * self.latent.v_head_dim, hidden, bias=config.o_bias)
        self.looped = False  # no barrier is needed here, unlike in `Attention`

    def __call__(self, x: Array, rotation: RotaryTable, layer: int, attend: AttendLatents) -> Array:
        latent, split = self.latent, [self.latent.qk_nope_head_dim]
        q = self.q_up(x if self.q_down is None else normed(self.q_norm, self.q_down(x)))
        nope, rope = jnp.split(q.reshape(*x.shape[:-1], self.heads, latent.q_head_dim), split, axis=-1)
        row, shared = jnp.split(self.kv_down(x)[..., None, :], [latent.kv_lora_rank], axis=-1)
        row = jnp.concatenate([self.kv_norm(row), self._rotated(shared, rotation)], axis=-1)
        up = self.kv_up[...].reshape(self.heads, latent.up_size, latent.kv_lora_rank)
        mixed = attend(layer, LatentQueries(nope, self._rotated(rope, rotation), up), row, None, None)
        return summed(self.out, mixed.reshape(*x.shape[:-1], self.heads * latent.v_head_dim), self.axis)

    def _rotated(self, x: Array, rotation: RotaryTable) -> Array:
        return rotate(halves_of(x) if self.latent.interleaved else x, rotation)
