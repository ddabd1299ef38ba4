"""Mistral: a Llama with an optional sliding window in every layer."""

from jdisagg.model.families.family import ModelFamily, Numbers, layer_windows, window_size
from jdisagg.model.files import JsonFields


def _numbers(read: JsonFields) -> Numbers:
    return {"layer_windows": layer_windows(read, window_size(read), lambda layer: True)}


MISTRAL = ModelFamily(
    "mistral",
    "MistralForCausalLM",
    {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    _numbers,
)
