"""Mixtral: a Mistral with experts in every layer (Jiang et al. 2024)."""

from jdisagg.core.model_config import Experts
from jdisagg.model.families.family import (
    ExpertKeys,
    ModelFamily,
    Numbers,
    experts_json,
    experts_per_token,
    layer_windows,
    number_of_experts,
    window_size,
)
from jdisagg.model.files import JsonFields
from jdisagg.model.rope_config import MOST_CHANNELS


def _numbers(read: JsonFields) -> Numbers:
    number = number_of_experts(read)
    width = read.needed("intermediate_size", MOST_CHANNELS)
    return {
        "layer_windows": layer_windows(read, window_size(read), lambda layer: True),
        "experts": Experts(number, experts_per_token(read, number), width, normalised=True),
    }


MIXTRAL = ModelFamily(
    "mixtral",
    "MixtralForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    _numbers,
    experts_json,
    experts=ExpertKeys("block_sparse_moe", matrices=("w1", "w3", "w2")),
)
