"""Rotary positions (RoFormer, section 3.2), in the half-split order of Hugging Face checkpoints."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.model_config import ModelConfig, RopeScaling


class RotaryTable(NamedTuple):
    """Cosines and sines f32[..., R/2] for the first R elements of every head."""

    cos: Array
    sin: Array


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Returns f32[R/2]: radians per token for each pair of channels, with the family's scaling. `local`: the
    frequencies of window layers, if the model has separate ones."""
    size = config.rotary_dim or config.head_dim
    local = local and config.local_rope_theta is not None
    theta = config.local_rope_theta if local else config.rope_theta
    return frequencies_of(size, theta or config.rope_theta, None if local else config.rope_scaling)


def frequencies_of(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Returns f32[size/2] for `size` rotated elements."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / size
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    return frequencies if scaling is None else SCALED[scaling.kind](frequencies, theta, scaling).astype(np.float32)


def _linear(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Scales long wavelengths, keeps short ones and blends those in between."""
    wavelengths = 2 * math.pi / frequencies
    rotations_in_context = scaling.original_max_position / wavelengths
    blend = (rotations_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Blends by pair index between the pairs that rotate `beta_fast` and `beta_slow` times (YaRN, equation 22)."""
    size = 2 * len(frequencies)

    def pair_of(num_rotations: float) -> float:
        return size * math.log(scaling.original_max_position / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001
    stretched = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / span, 0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)


def _longrope(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / np.array(scaling.factors, np.float32)


SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def rotations(positions: Array, frequencies: np.ndarray, factor: float = 1.0) -> RotaryTable:
    """Returns cosines and sines f32[..., R/2] for positions i32[...], times `factor`."""
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    if factor == 1.0:
        return RotaryTable(jnp.cos(angles), jnp.sin(angles))
    return RotaryTable(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Array, rotation: RotaryTable) -> Array:
    """Rotates the first R elements of the heads of x [..., H, D]; the result has the dtype of x."""
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, wide[..., 2 * half :]], axis=-1).astype(x.dtype)
