"""Qwen 2, 2.5 and 3: biases on q, k and v, or norms on q and k; windows from a given layer up."""

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families.family import (
    ModelFamily,
    Numbers,
    biases_of_attention,
    layer_windows,
    window_size,
    windows_json,
)
from jdisagg.model.files import Json, JsonFields
from jdisagg.model.rope_config import MOST_POSITIONS

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def windows(read: JsonFields) -> Numbers:
    """Returns the windows of layers from `max_window_layers` up; none unless `use_sliding_window` is true."""
    window = window_size(read) if read.flag("use_sliding_window") else None
    full = read.whole("max_window_layers", 0, MOST_POSITIONS) or 0
    return {"layer_windows": layer_windows(read, window, lambda layer: layer >= full)}


def _qwen2(read: JsonFields) -> Numbers:
    return {**windows(read), "qkv_bias": True}


def _qwen3(read: JsonFields) -> Numbers:
    return {**windows(read), **biases_of_attention(read), "qk_norm": True}


def _written(config: ModelConfig) -> Json:
    return {**windows_json(config), "use_sliding_window": bool(config.layer_windows)}


QWEN2 = ModelFamily("qwen2", "Qwen2ForCausalLM", DEFAULTS, _qwen2, _written)
QWEN3 = ModelFamily("qwen3", "Qwen3ForCausalLM", {**DEFAULTS, "head_dim": 128}, _qwen3, _written)
