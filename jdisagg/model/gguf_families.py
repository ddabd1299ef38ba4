"""What a GGUF file says of a family beyond a Llama's keys, and what it stores otherwise than the checkpoint it is of.

Each entry spells the file's keys as `config.json` fields; what llama.cpp takes from the model's size is worked out as
it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jdisagg.core.errors import CheckpointError
from jdisagg.model.gguf_file import GGUFFile
from jdisagg.model.limits import MOST_EXPERTS, MOST_LAYERS

Raw = dict[str, Any]  # a `config.json`
NORMS_PLUS_ONE = ("gemma2", "gemma3")  # whose norms' weights have the 1 that the network adds
SHORT_FACTORS = "rope_factors_short.weight"


def _gemma2(file: GGUFFile, raw: Raw) -> Raw:
    caps = {key: file.metadata.get(file.own(key)) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {"query_pre_attn_scalar": _query_scalar(file, raw, 46), **caps}


def _gemma3(file: GGUFFile, raw: Raw) -> Raw:
    return {
        "query_pre_attn_scalar": _query_scalar(file, raw, 62),
        "rope_local_base_freq": file.metadata.get(file.own("rope.freq_base_swa")),
        **_pattern(file, raw),
    }


def _pattern(file: GGUFFile, raw: Raw) -> Raw:
    """Which layers slide, where the file says: all but every n-th, or those of a list; none without a window."""
    if raw["sliding_window"] is None and type(raw["num_hidden_layers"]) is int:
        return {"layer_types": ["full_attention"] * min(raw["num_hidden_layers"], MOST_LAYERS)}
    found = file.metadata.get(file.own("attention.sliding_window_pattern"))
    if isinstance(found, list):
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in found]}
    return {"sliding_window_pattern": found}


def _query_scalar(file: GGUFFile, raw: Raw, layers_of_27b: int) -> float | None:
    """What the file says, else as llama.cpp: a head's size, but for the 27B models, which it knows by their layers."""
    scale = file.fields.number(file.own("attention.scale"), 0.0, 1.0, open_low=True)
    if scale is not None:
        return round(scale**-2, 3)  # the scale is an f32
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw["num_hidden_layers"] != layers_of_27b or type(hidden) is not int or type(heads) is not int or heads < 1:
        return raw["head_dim"]
    return hidden // heads


def _phi3(file: GGUFFile, raw: Raw) -> Raw:
    if SHORT_FACTORS not in file.tensors:
        return {}
    key = "rope.scaling.original_context_length"
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors_of(file, SHORT_FACTORS).tolist(),
        "original_max_position_embeddings": file.metadata.get(file.own(key)),
        "attention_factor": file.metadata.get(file.own("rope.scaling.attn_factor")),
    }
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


# ---------------------------------------------------------------------- experts


def family_of(file: GGUFFile) -> str:
    """Ours, of a file's architecture: llama.cpp calls several by one name."""
    arch, own = file.architecture, lambda key: file.metadata.get(file.own(key))
    if arch == "llama":
        return "mixtral" if own("expert_count") else "mistral" if own("attention.sliding_window") else arch
    if arch == LATENTS:
        return "deepseek_v3" if own("expert_gating_func") == SIGMOID else "deepseek_v2"
    return {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}.get(arch, arch)


def _experts(file: GGUFFile, raw: Raw) -> Raw:
    """Biases of experts and of routers are of their own kind, and no MLP's."""
    counts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return {"mlp_bias": None, **{name: file.metadata.get(file.own(key)) for name, key in counts.items()}}


def _qwen3_moe(file: GGUFFile, raw: Raw) -> Raw:
    width = file.metadata.get(file.own("expert_feed_forward_length"))
    return {**_experts(file, raw), "moe_intermediate_size": width, "norm_topk_prob": True}


def _gpt_oss(file: GGUFFile, raw: Raw) -> Raw:
    width = file.metadata.get(file.own("expert_feed_forward_length"))
    scaling = None if raw["rope_scaling"] is None else {**raw["rope_scaling"], "truncate": False}
    return {
        **_experts(file, raw),
        "intermediate_size": raw["intermediate_size"] if width is None else width,
        "rope_scaling": scaling,
    }


def _deepseek(file: GGUFFile, raw: Raw) -> Raw:
    """Keys of a head are as long as `key_length_mla` says, or in older files, which hold no latents, `key_length`."""
    rotated = file.fields.whole(file.own("rope.dimension_count"), 1, 1 << 16)
    key, value = (
        file.fields.whole(file.own(f"attention.{which}_length_mla"), 1, 1 << 16)
        or file.fields.whole(file.own(f"attention.{which}_length"), 1, 1 << 16)
        for which in ("key", "value")
    )
    if key is None or rotated is None or key <= rotated:
        raise CheckpointError(
            f"{file.path}: keys of {key} numbers a head, of which {rotated} are rotated; needed: more"
        )
    own = {name: file.metadata.get(file.own(name_there)) for name, name_there in DEEPSEEK.items()}
    heads = {"qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value, "head_dim": rotated}
    return {**own, **heads, **_groups(file), "num_key_value_heads": None, "rope_scaling": _stretched(file, raw)}


def _groups(file: GGUFFile) -> Raw:
    """Of experts; files that do not say are of before llama.cpp knew any: the models that have them are known by their
    number of experts."""
    number = file.fields.whole(file.own("expert_count"), 0, MOST_EXPERTS)
    groups, kept = (file.metadata.get(file.own(f"expert_group_{key}")) for key in ("count", "used_count"))
    if groups is None:
        groups, kept = GROUPS.get(number or 0, (1, 1))
    method = {} if family_of(file) == "deepseek_v3" else {"topk_method": METHODS2[groups != 1]}
    return {"n_group": groups, "topk_group": kept, **method}


def _stretched(file: GGUFFile, raw: Raw) -> Raw | None:
    """llama.cpp stores a tenth of `mscale_all_dim`; `mscale` is the same in all models there are."""
    if raw["rope_scaling"] is None:
        return None
    tenth = file.fields.number(file.own("rope.scaling.yarn_log_multiplier"), 0.0, 100.0)
    scale = round(10 * tenth, 6) if tenth else 0.0  # an f32
    return {**raw["rope_scaling"], **({"mscale": scale, "mscale_all_dim": scale} if scale else {})}


LATENTS, SIGMOID = "deepseek2", 2
METHODS2 = ("greedy", "group_limited_greedy")
GROUPS = {160: (8, 3), 256: (8, 4)}  # DeepSeek-V2; V3 and R1
NONE_MEANS_NONE = ("q_lora_rank",)
DEEPSEEK = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
EXTRA: dict[str, Callable[[GGUFFile, Raw], Raw]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "mixtral": _experts,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
KNOWN_KEYS = {  # what other families are refused for, and these are not
    "gemma2": ("attention.scale", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("attention.scale",),
    "phi3": ("rope.scaling.attn_factor",),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), ("expert_count",)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("expert_count", "rope.scaling.yarn_log_multiplier")),
}


def factors_of(file: GGUFFile, name: str) -> np.ndarray:
    """f32[...] of a tensor of rotary factors. Raises `CheckpointError` where it is of another kind."""
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or len(tensor.shape) != 1:
        found = f"{tensor.kind.name} of shape {tensor.shape}"
        raise CheckpointError(f"{tensor.path}: {name} is {found}; needed: F32 of one dimension")
    return np.memmap(tensor.path, "<f4", "r", tensor.start, tensor.shape)
