"""Any number of shards computes what one does, whether it divides heads and channels or not."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.model_config import AS_ACTIVATIONS, ModelConfig, WeightFormat
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource
from tests.model.sharded import mesh_of, run_stage, stage_output

NINE = ModelConfig("llama", 50, 48, 50, 2, 9, 3, 8, 64)
CONFIGS = {
    "nine heads of three": NINE,
    "biased": replace(NINE, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True),
    "a norm over all heads": replace(NINE, family="olmo2", norms="after", qk_norm=True, qk_norm_is_wide=True),
    "fused in the file": replace(NINE, family="phi3", rotary_dim=4),
    "sinks": replace(NINE, sinks=True, layer_windows=(4, None)),
    "gemma": replace(
        NINE, family="gemma2", norms="both", norm_offset=1.0, activation="gelu_tanh", attention_soft_cap=3.0
    ),
    "one KV head": replace(NINE, num_heads=5, num_kv_heads=1),
    "every head its own": replace(NINE, num_heads=5, num_kv_heads=5),
}
TOKENS = np.array([3, 41, 7, 0, 19, 22, 49, 8, 11, 30], np.int32)


def logits(config: ModelConfig, tp: int, weights: str = AS_ACTIVATIONS) -> np.ndarray:
    mesh, source, layers = mesh_of(tp), RandomSource(config, seed=3), range(config.num_layers)
    params = load_stage(source, StageSpec(config, layers, mesh, jnp.float32, WeightFormat(weights)))
    return run_stage(params, mesh, stage_output, TOKENS)


@cache
def whole(name: str) -> np.ndarray:
    return logits(CONFIGS[name], 1)


@pytest.mark.parametrize("tp", [2, 4, 5, 7, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_that_do_not_divide_heads_or_channels_compute_the_same_logits(name: str, tp: int):
    assert np.abs(logits(CONFIGS[name], tp) - whole(name)).max() <= 1e-4


@pytest.mark.parametrize("tp", [2, 5])
def test_padding_beside_weights_in_int8_changes_nothing_either(tp: int):
    assert np.abs(logits(NINE, tp, "int8") - logits(NINE, 1, "int8")).max() <= 1e-4
