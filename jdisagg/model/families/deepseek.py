"""DeepSeek V2 and V3: multi-head latent attention, rotation of adjacent pairs, and YaRN that also scales logits."""

from dataclasses import replace

from jdisagg.core.model_config import Experts, Latent, ModelConfig, RopeScaling
from jdisagg.model.families.family import ExpertKeys, ModelFamily, Numbers, biases_of_attention, experts_per_token
from jdisagg.model.files import Json, JsonFields
from jdisagg.model.rope_config import (
    MOST_CHANNELS,
    MOST_EXPERTS,
    MOST_FACTOR,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    mscale,
    rope_json,
    rope_part,
    whole_rope,
)

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _numbers(read: JsonFields) -> Numbers:
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


def _latent(read: JsonFields) -> Latent:
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
    """Returns the factor on attention logits with an extended context: the square of `mscale_all_dim`'s mscale. This
    follows the models' own code; transformers leaves it out for V2."""
    return mscale(scaling.factor, latent.mscale_all_dim) ** 2 if scaling else 1.0


def _written(config: ModelConfig) -> Json:
    latent = config.latent
    assert latent is not None
    rope = {**rope_json(config.rope_scaling), "mscale_all_dim": latent.mscale_all_dim, "rope_theta": config.rope_theta}
    sizes = {name: getattr(latent, name) for name in DEFAULTS}
    more = {**_experts_json(config), "num_key_value_heads": config.num_heads}
    interleaved = {"head_dim": latent.qk_rope_head_dim, "rope_interleave": latent.interleaved}
    return {**sizes, **more, **interleaved, "rope_parameters": rope, "rope_scaling": None}


def _experts(read: JsonFields) -> Experts | None:
    """Returns the expert configuration that V2 and V3 share; None if all layers are dense."""
    layers = read.needed("num_hidden_layers", MOST_LAYERS)
    dense = min(read.whole("first_k_dense_replace", 0, MOST_LAYERS) or 0, layers)
    if dense == layers or read.raw.get("n_routed_experts") is None:
        return None
    if read.raw.get("moe_layer_freq", 1) != 1:
        raise read.wrong("moe_layer_freq", "1")
    number = read.needed("n_routed_experts", MOST_EXPERTS)
    groups = read.whole("n_group", 1, number) or 1
    width = read.needed("moe_intermediate_size", MOST_CHANNELS)
    experts = Experts(
        number,
        experts_per_token(read, number),
        width,
        normalised=read.flag("norm_topk_prob"),
        scale=read.number("routed_scaling_factor", 0.0, MOST_FACTOR, open_low=True) or 1.0,
        groups=groups,
        kept_groups=read.whole("topk_group", 1, groups) or groups,
        shared_width=(read.whole("n_shared_experts", 0, number) or 0)
        * read.needed("moe_intermediate_size", MOST_CHANNELS),
        dense_layers=tuple(range(dense)),
    )
    if number % groups or experts.kept_groups * (number // groups) < experts.per_token:
        raise read.wrong("n_group", f"a divisor of {number} experts whose kept groups hold {experts.per_token} of them")
    return experts


def _routed2(read: JsonFields) -> Numbers:
    """Returns the experts of V2: softmax routing, with a group scored by its best expert."""
    experts = _experts(read)
    if experts is None:
        return {}
    if experts.normalised:  # the model's own code divides by the sum and leaves the scale out, transformers neither
        raise read.wrong("norm_topk_prob", "false")
    method = read.word("topk_method") or "greedy"
    if method not in METHODS2:
        raise read.wrong("topk_method", " or ".join(METHODS2))
    return {"experts": replace(experts, groups=1, kept_groups=1) if method == "greedy" else experts}


def _routed3(read: JsonFields) -> Numbers:
    """Returns the experts of V3: sigmoid routing with a correction, a group scored by its two best (DeepSeek-V3, 2024,
    section 2.1.2)."""
    experts = _experts(read)
    for key, supported in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if read.word(key) not in (None, supported):
            raise read.wrong(key, supported)
    return {} if experts is None else {"experts": replace(experts, router="sigmoid", group_top=2)}


def _experts_json(config: ModelConfig) -> Json:
    experts = config.experts
    if experts is None:
        return {"first_k_dense_replace": config.num_layers}
    return {
        "first_k_dense_replace": len(experts.dense_layers),
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.kept_groups,
        "n_shared_experts": experts.shared_width // experts.width,
        "topk_method": "noaux_tc" if experts.router == "sigmoid" else METHODS2[experts.groups > 1],
    }


METHODS2 = ("greedy", "group_limited_greedy")
V2 = {
    **DEFAULTS,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
V3 = {
    **DEFAULTS,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
DEEPSEEK_V2 = ModelFamily(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    V2,
    lambda read: {**_numbers(read), **_routed2(read)},
    _written,
    experts=ExpertKeys(),
)
DEEPSEEK_V3 = ModelFamily(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    V3,
    lambda read: {**_numbers(read), **_routed3(read)},
    _written,
    experts=ExpertKeys(),
)
