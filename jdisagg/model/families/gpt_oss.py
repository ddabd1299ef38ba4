"""gpt-oss (OpenAI 2025): attention sinks, a window on every other layer, biases, and experts with a clamped gate."""

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import Experts
from jdisagg.model.families.family import (
    ExpertKeys,
    ModelFamily,
    Numbers,
    biases_of_attention,
    experts_json,
    experts_per_token,
    layer_windows,
    number_of_experts,
    window_size,
)
from jdisagg.model.files import JsonFields
from jdisagg.model.rope_config import MOST_CHANNELS

LIMIT = 7.0  # clamping bound of the experts' gate
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _numbers(read: JsonFields) -> Numbers:
    if read.raw.get("swiglu_limit") not in (None, LIMIT):
        raise UnsupportedModel(
            f"{read.place}: swiglu_limit {read.raw['swiglu_limit']} is not supported; supported: {LIMIT}"
        )
    number = number_of_experts(read)
    return {
        **biases_of_attention(read),
        "sinks": True,
        "layer_windows": layer_windows(read, window_size(read), lambda layer: layer % 2 == 0),
        "experts": Experts(
            number,
            experts_per_token(read, number),
            read.needed("intermediate_size", MOST_CHANNELS),
            "chosen",
            router_bias=True,
            bias=True,
            clamped=True,
        ),
    }


GPT_OSS = ModelFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": YARN,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    _numbers,
    experts_json,
    experts=ExpertKeys(router="router", fused=True),
)
