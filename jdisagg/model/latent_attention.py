"""Multi-head latent attention as a layer has it; what its queries and latents are is in `latents.py`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.latents import LatentQueries, halves_of
from jdisagg.model.norms import RMSNorm, normed
from jdisagg.model.rope import Rotation, rotate
from jdisagg.model.weight import Weight, summed

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
