"""Gemma 2 and the text model of Gemma 3: norms before and after each block, scaled embeddings, windows on most layers.

Gemma 2 soft-caps its logits. Gemma 3 normalises q and k instead, and uses a separate RoPE base for window layers.
"""

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families.family import (
    ModelFamily,
    Numbers,
    biases_of_attention,
    layer_windows,
    window_size,
    windows_json,
)
from jdisagg.model.files import Json, JsonFields, shown
from jdisagg.model.rope_config import MOST_LAYERS, MOST_THETA, first_said, rope_json, rope_of

MOST_CAP = 1e6
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def _both(read: JsonFields, pattern: int) -> Numbers:
    """Returns the fields that Gemma 2 and 3 share; every `pattern`-th layer has full attention."""
    if read.flag("use_bidirectional_attention"):
        raise UnsupportedModel(f"{read.place}: use_bidirectional_attention = true is not supported; supported: false")
    scalar = read.number("query_pre_attn_scalar", 0.0, MOST_THETA, open_low=True)
    assert scalar is not None, DEFAULTS
    caps = (read.number(f"{which}_logit_softcapping", 0.0, MOST_CAP, open_low=True) for which in ("attn", "final"))
    attention_cap, final_cap = caps
    return {
        **biases_of_attention(read),
        "norms": "both",
        "norm_offset": 1.0,
        "embedding_scale": read.needed("hidden_size", 1 << 20) ** 0.5,
        "query_scale": scalar**-0.5,
        "attention_soft_cap": attention_cap,
        "final_soft_cap": final_cap,
        "layer_windows": layer_windows(read, window_size(read), lambda layer: (layer + 1) % pattern != 0),
    }


def _gemma2(read: JsonFields) -> Numbers:
    return _both(read, 2)


def _gemma3(read: JsonFields) -> Numbers:
    pattern = read.whole("sliding_window_pattern", 1, MOST_LAYERS) or 6
    return {**_both(read, pattern), **_ropes(read), "qk_norm": True}


def _ropes(read: JsonFields) -> Numbers:
    """Returns base and scaling of full-attention layers, and the base of window layers. transformers 5 writes
    `rope_parameters` with an entry per layer type; older files have `rope_scaling` and `rope_local_base_freq`."""
    by_type = read.part("rope_parameters") or JsonFields({}, read.place)
    if by_type.raw and not {"full_attention", "sliding_attention"} & by_type.raw.keys():
        raise UnsupportedModel(
            f"{read.place}: rope_parameters of {shown(sorted(by_type.raw))}; needed: one for each kind"
        )
    full = by_type.part("full_attention") or read.part("rope_scaling") or JsonFields({}, read.place)
    sliding = by_type.part("sliding_attention") or JsonFields({}, read.place)
    if sliding.word("rope_type") not in (None, "default"):
        raise UnsupportedModel(
            f"{sliding.place} rope type {shown(sliding.word('rope_type'))} is not supported: default"
        )
    theta, scaling = rope_of(read, full, GLOBAL_THETA)
    local = first_said((sliding, "rope_theta"), (read, "rope_local_base_freq")) or LOCAL_THETA
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _written2(config: ModelConfig) -> Json:
    assert config.query_scale is not None, config
    return {
        **windows_json(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2, 6),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
    }


def _written3(config: ModelConfig) -> Json:
    near = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    far = {**rope_json(config.rope_scaling), "rope_theta": config.rope_theta}
    return {
        **_written2(config),
        "rope_parameters": {"sliding_attention": near, "full_attention": far},
        "rope_local_base_freq": config.local_rope_theta,
    }


GEMMA2 = ModelFamily(
    "gemma2",
    "Gemma2ForCausalLM",
    {**DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    _gemma2,
    _written2,
)
GEMMA3 = ModelFamily(
    "gemma3", "Gemma3ForCausalLM", {**DEFAULTS, "max_position_embeddings": 131_072}, _gemma3, _written3
)
