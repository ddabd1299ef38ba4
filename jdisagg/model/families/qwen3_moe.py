"""Qwen 3 with experts in all layers or in some."""

from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.model.families.family import (
    NUMBER_KEYS,
    ExpertKeys,
    ModelFamily,
    Numbers,
    biases_of_attention,
    experts_json,
    experts_per_token,
    number_of_experts,
)
from jdisagg.model.families.qwen import DEFAULTS, windows
from jdisagg.model.files import Json, JsonFields
from jdisagg.model.rope_config import MOST_CHANNELS, MOST_LAYERS

DEFAULT_EXPERTS = 128


def _numbers(read: JsonFields) -> Numbers:
    return {**windows(read), **biases_of_attention(read), "qk_norm": True, "experts": _experts(read)}


def _experts(read: JsonFields) -> Experts:
    is_given = any(read.raw.get(key) is not None for key in NUMBER_KEYS)
    number = number_of_experts(read) if is_given else DEFAULT_EXPERTS
    return Experts(
        number,
        experts_per_token(read, number),
        read.needed("moe_intermediate_size", MOST_CHANNELS),
        normalised=read.flag("norm_topk_prob"),
        dense_layers=_dense_layers(read),
    )


def _dense_layers(read: JsonFields) -> tuple[int, ...]:
    """Returns the layers of `mlp_only_layers` and those that `decoder_sparse_step` skips."""
    layers, step = read.needed("num_hidden_layers", MOST_LAYERS), read.needed("decoder_sparse_step", MOST_LAYERS)
    named = read.ids("mlp_only_layers", MOST_LAYERS, MOST_LAYERS) or ()
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def _written(config: ModelConfig) -> Json:
    assert config.experts is not None, config
    return {
        **experts_json(config),
        "use_sliding_window": bool(config.layer_windows),
        "moe_intermediate_size": config.experts.width,
        "norm_topk_prob": config.experts.normalised,
        "mlp_only_layers": list(config.experts.dense_layers),
    }


QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
        **DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    _numbers,
    _written,
    experts=ExpertKeys(),
)
