"""Rotary positions (RoFormer, section 3.2), in the half-split order that Hugging Face checkpoints use."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """f32[D/2]: radians a token for each pair of channels, after the family's scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    return _scaled(frequencies, config.rope_scaling) if config.rope_scaling else frequencies


def _scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    # "llama3": long wavelengths are stretched, short ones kept, those between are blended.
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def rotations(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """cos and sin, f32[..., D/2], of i32[...] positions."""
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates [..., H, D] by f32[..., D/2]; the result has the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
