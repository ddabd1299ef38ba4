"""DeepSeek V2 and V3: multi-head latent attention, rotated in neighbouring pairs, yarn that scales logits as well."""

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import Latent, ModelConfig, RopeScaling
from jdisagg.model.families.family import Family, Numbers, biases_of_attention
from jdisagg.model.files import Fields, Json
from jdisagg.model.limits import MOST_CHANNELS, MOST_FACTOR, MOST_HEAD_DIM, MOST_LAYERS
from jdisagg.model.rope_config import mscale, rope_json, rope_part, whole_rope

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _numbers(read: Fields) -> Numbers:
    _refuse_experts(read)
    latent = _latent(read)
    theta, scaling = whole_rope(read)
    return {
        **biases_of_attention(read),
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_size,
        "rotary_dim": latent.qk_rope_head_dim,
        "query_scale": latent.q_head_dim**-0.5 * _stretch(latent, scaling),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _latent(read: Fields) -> Latent:
    rotated = read.needed("qk_rope_head_dim", MOST_HEAD_DIM)
    if rotated % 2:
        raise read.wrong("qk_rope_head_dim", f"an even number ({rotated} is none)")
    return Latent(
        read.needed("kv_lora_rank", MOST_CHANNELS),
        read.whole("q_lora_rank", 1, MOST_CHANNELS),
        read.needed("qk_nope_head_dim", MOST_HEAD_DIM),
        rotated,
        read.needed("v_head_dim", MOST_HEAD_DIM),
        rope_part(read).number("mscale_all_dim", 0.0, MOST_FACTOR) or 0.0,
        read.raw.get("rope_interleave") is not False,
    )


def _stretch(latent: Latent, scaling: RopeScaling | None) -> float:
    """What logits are multiplied by where the context is stretched: the square of `mscale_all_dim`'s, as the models'
    own code has it. (transformers leaves it out for V2.)"""
    return mscale(scaling.factor, latent.mscale_all_dim) ** 2 if scaling else 1.0


def _written(config: ModelConfig) -> Json:
    latent = config.latent
    assert latent is not None
    rope = {**rope_json(config.rope_scaling), "mscale_all_dim": latent.mscale_all_dim, "rope_theta": config.rope_theta}
    sizes = {name: getattr(latent, name) for name in DEFAULTS}
    dense = {"first_k_dense_replace": config.num_layers, "num_key_value_heads": config.num_heads}
    interleaved = {"head_dim": latent.qk_rope_head_dim, "rope_interleave": latent.interleaved}
    return {**sizes, **dense, **interleaved, "rope_parameters": rope, "rope_scaling": None}


def _refuse_experts(read: Fields) -> None:
    layers = read.needed("num_hidden_layers", MOST_LAYERS)
    dense = read.whole("first_k_dense_replace", 0, MOST_LAYERS) or 0
    if dense < layers and read.raw.get("n_routed_experts"):
        raise UnsupportedModel(
            f"{read.place}: first_k_dense_replace = {dense} of {layers} layers: experts are not supported;"
            " supported: dense layers alone"
        )


V2 = {**DEFAULTS, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_routed_experts": 64}
V3 = {**DEFAULTS, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256}
DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", V2, _numbers, _written)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", V3, _numbers, _written)
