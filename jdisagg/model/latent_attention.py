"""Multi-head latent attention as a layer has it; what its queries and latents are is in `latents.py`."""

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
from jdisagg.model.rope import Rotation, rotate
from jdisagg.model.weight import Weight, summed

# Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries over latents, absorbed or expanded.
#
# What is kept of a token is one row, its latent (R numbers) and a rotated key that all heads share. A head's key
# is made of the latent by N rows of `up`, its value by V rows. So a query may attend in two ways, with the same
# result:
#
# * *absorbed*: the head's query is multiplied by the rows that make keys, attends to the rows as they are, and
# what it   mixes is multiplied by the rows that make values. A pair of query and key costs 2 (2 R + rotated), a
# token's query   2 R (N + V), and nothing is ever made of the tokens that are held. * *expanded*: keys and values
# of all heads are made of every row, for 2 R (N + V) each. A pair then costs   2 (N + rotated + V), less than a
# third of the other in DeepSeek-V3.


class LatentQueries(NamedTuple):
    """Queries of some rows, and what keys and values are made by."""

    nope: Array  # [..., H, N], of what is not rotated
    rope: Array  # [..., H, rotated]
    up: Array  # [H, N + V, R]: rows that make a head's key, then those that make its value

    def of(self, rows: slice) -> LatentQueries:
        """Some of the rows."""
        return LatentQueries(self.nope[rows], self.rope[rows], self.up)

    @property
    def key_size(self) -> int:
        """Numbers of a key that was made of a latent."""
        return self.nope.shape[-1] + self.rope.shape[-1]

    @property
    def value_size(self) -> int:
        """Numbers of a value."""
        return self.up.shape[1] - self.nope.shape[-1]

    @property
    def whole(self) -> Array:
        """[..., H, N + rotated], for keys that were made of latents."""
        return jnp.concatenate([self.nope, self.rope], axis=-1)

    @property
    def absorbed(self) -> Array:
        """[..., H, R + rotated], for rows as they are kept."""
        keys = self.up[:, : self.nope.shape[-1]]
        return jnp.concatenate([jnp.einsum("...hn,hnr->...hr", self.nope, keys), self.rope], axis=-1)

    def values_of(self, mixed: Array) -> Array:
        """Mixtures of latents [..., H, R] -> of values [..., H, V]."""
        return jnp.einsum("...hr,hvr->...hv", mixed, self.up[:, self.nope.shape[-1] :])

    def expanded(self, rows: Array) -> tuple[Array, Array]:
        """Rows as they are kept [..., R + rotated] -> keys [..., H, N + rotated] and values [..., H, V]."""
        rank, split = self.up.shape[2], self.nope.shape[-1]
        made = jnp.einsum("...r,hmr->...hm", rows[..., :rank], self.up)
        shared = jnp.broadcast_to(rows[..., None, rank:], (*made.shape[:-1], rows.shape[-1] - rank))
        return jnp.concatenate([made[..., :split], shared], axis=-1), made[..., split:]


def halves_of(x: Array) -> Array:
    """[..., D] whose pairs are neighbours -> first numbers of all pairs, then second ones, as `rotate` takes them."""
    return jax.lax.reshape(jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2), x.shape)


# (layer within the stage, queries, row [..., 1, R + rotated], None, None) -> [..., Hq, V]
AttendLatents = Callable[[int, LatentQueries, Array, None, None], Array]


class LatentAttention(nnx.Module):
    """Multi-head latent attention (`latents.py`); a shard has some of the heads, and every shard all of the latents."""

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
        up = self.heads * self.latent.up_size, self.latent.kv_lora_rank  # as the checkpoint has it: by heads
        self.kv_up = nnx.Param(self.latent.kv_lora_rank**-0.5 * jax.random.normal(rngs.params(), up, dtype))
        self.out = weight(self.heads * self.latent.v_head_dim, hidden, bias=config.o_bias)
        self.looped = False  # nothing is to be kept apart here

    def __call__(self, x: Array, rotation: Rotation, layer: int, attend: AttendLatents) -> Array:
        latent, split = self.latent, [self.latent.qk_nope_head_dim]
        q = self.q_up(x if self.q_down is None else normed(self.q_norm, self.q_down(x)))
        nope, rope = jnp.split(q.reshape(*x.shape[:-1], self.heads, latent.q_head_dim), split, axis=-1)
        row, shared = jnp.split(self.kv_down(x)[..., None, :], [latent.kv_lora_rank], axis=-1)
        row = jnp.concatenate([self.kv_norm(row), self._rotated(shared, rotation)], axis=-1)
        up = self.kv_up[...].reshape(self.heads, latent.up_size, latent.kv_lora_rank)
        mixed = attend(layer, LatentQueries(nope, self._rotated(rope, rotation), up), row, None, None)
        return summed(self.out, mixed.reshape(*x.shape[:-1], self.heads * latent.v_head_dim), self.axis)

    def _rotated(self, x: Array, rotation: Rotation) -> Array:
        return rotate(halves_of(x) if self.latent.interleaved else x, rotation)
