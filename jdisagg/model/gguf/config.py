"""Converts a GGUF file's metadata to `ModelConfig` by way of the fields of a `config.json`.

A feature that llama.cpp computes and this project does not is refused by name, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES

from jdisagg.core.errors import CheckpointError, UnsupportedModel
from jdisagg.core.model_config import ModelConfig, RopeScaling
from jdisagg.core.request import MAX_STOP_TOKENS
from jdisagg.model.families import FAMILIES
from jdisagg.model.files import shown
from jdisagg.model.gguf.file import GGUFFile
from jdisagg.model.hf_config import OPEN, SAMPLING_RANGES, GenerationSettings, parse_config
from jdisagg.model.rope import inverse_frequencies
from jdisagg.model.rope_config import MOST_EXPERTS, MOST_LAYERS

# Metadata of single families beyond the keys of a Llama.
#
# Each function converts the file's keys to `config.json` fields. Values that llama.cpp derives from the model's size
# are derived in the same way.

Raw = dict[str, Any]  # a `config.json`
NORMS_PLUS_ONE = ("gemma2", "gemma3")  # architectures whose stored norm weights include the 1 that the network adds
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
    """Returns which layers have a window: from a period or a list in the file; none without a window."""
    if raw["sliding_window"] is None and type(raw["num_hidden_layers"]) is int:
        return {"layer_types": ["full_attention"] * min(raw["num_hidden_layers"], MOST_LAYERS)}
    found = file.metadata.get(file.own("attention.sliding_window_pattern"))
    if isinstance(found, list):
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in found]}
    return {"sliding_window_pattern": found}


def _query_scalar(file: GGUFFile, raw: Raw, layers_of_27b: int) -> float | None:
    """Returns the query scalar of the file, else llama.cpp's default. The default is the head size, except for the 27B
    models, which llama.cpp recognises by their number of layers."""
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


# Families with experts.


def family_of(file: GGUFFile) -> str:
    """Returns the family of a file. llama.cpp uses one architecture name for several families."""
    arch, own = file.architecture, lambda key: file.metadata.get(file.own(key))
    if arch == "llama":
        return "mixtral" if own("expert_count") else "mistral" if own("attention.sliding_window") else arch
    if arch == LATENTS:
        return "deepseek_v3" if own("expert_gating_func") == SIGMOID else "deepseek_v2"
    return {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}.get(arch, arch)


def _experts(file: GGUFFile, raw: Raw) -> Raw:
    """Returns the expert counts. Biases of experts and routers have their own fields, so `mlp_bias` is not set."""
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
    """Returns the DeepSeek fields. The key size is `key_length_mla`; older files, without latents, have
    `key_length`."""
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
    return {**own, **heads, **_groups(file), "num_key_value_heads": None, "rope_scaling": _yarn_scaling(file, raw)}


def _groups(file: GGUFFile) -> Raw:
    """Returns the expert groups. Files without them predate llama.cpp's support; their models are recognised by the
    number of experts."""
    number = file.fields.whole(file.own("expert_count"), 0, MOST_EXPERTS)
    groups, kept = (file.metadata.get(file.own(f"expert_group_{key}")) for key in ("count", "used_count"))
    if groups is None:
        groups, kept = GROUPS.get(number or 0, (1, 1))
    method = {} if family_of(file) == "deepseek_v3" else {"topk_method": METHODS2[groups != 1]}
    return {"n_group": groups, "topk_group": kept, **method}


def _yarn_scaling(file: GGUFFile, raw: Raw) -> Raw | None:
    """Returns YaRN scaling. llama.cpp stores a tenth of `mscale_all_dim`; `mscale` equals it in all released models."""
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
KNOWN_KEYS = {  # keys of `REFUSED` that these families support
    "gemma2": ("attention.scale", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("attention.scale",),
    "phi3": ("rope.scaling.attn_factor",),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), ("expert_count",)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("expert_count", "rope.scaling.yarn_log_multiplier")),
}


def factors_of(file: GGUFFile, name: str) -> np.ndarray:
    """Returns a tensor of rotary factors, f32[...]. Raises `CheckpointError` if it has another type or rank."""
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or len(tensor.shape) != 1:
        found = f"{tensor.kind.name} of shape {tensor.shape}"
        raise CheckpointError(f"{tensor.path}: {name} is {found}; needed: F32 of one dimension")
    return np.memmap(tensor.path, "<f4", "r", tensor.start, tensor.shape)


EMBEDDING, ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
NO_WEIGHTS = {ROPE_FACTORS, SHORT_FACTORS, "rope_factors_long.weight"}  # tensors that are not weights
SAME = {  # config.json field -> key of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
READ = {  # supported family -> llama.cpp's architecture name
    **{each: each for each in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2")},
    **dict.fromkeys(("mistral", "mixtral"), "llama"),
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2"),
}
REFUSED = (  # keys that change the computation in ways not supported here
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)
SAMPLING_KEYS = {"temp": "temperature", "penalty_repeat": "repetition_penalty", **{k: k for k in SAMPLING_RANGES}}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
CONTROL = 3  # token type
SPEEDS = ("fast", "slow")  # yarn's bounds
ORIGINAL_POSITIONS = [1 << power for power in range(5, 20)]  # candidates for llama3's original length


def model_config(file: GGUFFile) -> ModelConfig:
    """Returns the model's configuration. Raises `UnsupportedModel` or its subclasses, naming the file."""
    arch = file.architecture
    supported = sorted(set(READ.values()) & set(MODEL_ARCH_NAMES.values()))
    if arch not in supported:
        raise UnsupportedModel(
            f"{file.path}: architecture {shown(arch)} is not supported; supported: {', '.join(supported)}"
        )
    for key in (file.own(key) for key in REFUSED if key not in KNOWN_KEYS.get(family_of(file), ())):
        if file.metadata.get(key):
            raise UnsupportedModel(
                f"{file.path}: {key} = {shown(file.metadata[key])} is not supported; supported: none"
            )
    raw = {name: file.metadata.get(file.own(key)) for name, key in SAME.items()}
    head_dim = _head_dim(file, raw)
    family = family_of(file)
    raw |= {
        "architectures": [next(name for name, each in FAMILIES.items() if each == family)],
        "head_dim": head_dim,
        "partial_rotary_factor": _rotated(file, head_dim),
        "sliding_window": file.metadata.get(file.own("attention.sliding_window")),
        "vocab_size": _rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _rope_scaling(file),
        "attention_bias": _has_bias(file, "attn_"),
        "mlp_bias": _has_bias(file, "ffn_"),
        "use_sliding_window": bool(file.metadata.get(file.own("attention.sliding_window"))),
    }
    if raw["num_key_value_heads"] is None:
        raw["num_key_value_heads"] = raw["num_attention_heads"]
    if family in EXTRA:
        raw |= EXTRA[family](file, raw)
    given = {key: value for key, value in raw.items() if value is not None or key in NONE_MEANS_NONE}
    config = parse_config(given, f"{file.path}, as config.json,")
    return _with_rope_factors(file, config)


def _rows(file: GGUFFile) -> int:
    """Returns the rows of the embedding, which must equal the tokenizer's number of tokens."""
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {EMBEDDING}; found {len(file.tensors)} others")
    rows = file.tensors[EMBEDDING].shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise CheckpointError(f"{file.path}: the tokenizer has {len(tokens)} tokens, {EMBEDDING} has {rows} rows")
    return rows


def _head_dim(file: GGUFFile, raw: dict[str, Any]) -> int | None:
    """Returns `key_length` or llama.cpp's default; values must have the same length as keys."""
    key, value = (file.fields.whole(file.own(f"attention.{which}_length"), 1, 1 << 16) for which in ("key", "value"))
    if file.architecture == LATENTS:  # the page's row size, not a head's
        return None
    if key is not None and value not in (None, key):
        raise UnsupportedModel(f"{file.path}: keys of {key} numbers a head and values of {value} are not supported")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    whole = type(hidden) is int and type(heads) is int and heads > 0
    return key if key is not None else hidden // heads if whole else None


def _rotated(file: GGUFFile, head_dim: int | None) -> float | None:
    """Returns the share of a head that is rotated, if the file has it."""
    rotated = file.fields.whole(file.own("rope.dimension_count"), 1, 1 << 16)
    if not rotated or not head_dim:
        return None
    share = min(1.0, rotated / head_dim)
    return share if int(head_dim * share) == min(rotated, head_dim) else math.nextafter(share, 1.0)


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """Returns the scaling as in `config.json`; unknown types keep llama.cpp's names."""
    kind = file.fields.word(file.own("rope.scaling.type"))
    factor = file.metadata.get(file.own("rope.scaling.factor"), file.metadata.get(file.own("rope.scale_linear")))
    if kind is None and factor not in (None, 1.0):
        kind = "linear"
    if kind in (None, "none"):
        return None
    original = file.metadata.get(file.own("rope.scaling.original_context_length"))
    betas = {f"beta_{speed}": file.metadata.get(file.own(f"rope.scaling.yarn_beta_{speed}")) for speed in SPEEDS}
    given = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **betas}
    return {key: value for key, value in given.items() if value is not None}


def _has_bias(file: GGUFFile, kind: str) -> bool:
    return any(name.endswith(".bias") and f".{kind}" in name for name in file.tensors)


def _with_rope_factors(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Returns the config with Llama 3.1's scaling, which files store as a divisor per frequency. Other factors are
    refused."""
    if ROPE_FACTORS not in file.tensors:
        return config
    tensor, factors = file.tensors[ROPE_FACTORS], factors_of(file, ROPE_FACTORS)
    if factors.shape != (config.head_dim // 2,):
        found = f"{tensor.kind.name} of shape {tensor.shape}"
        raise CheckpointError(
            f"{tensor.path}: {ROPE_FACTORS} is {found}; needed: F32 of shape ({config.head_dim // 2},)"
        )
    largest = float(factors.max())
    if np.all(factors == 1.0):
        return config
    plain = inverse_frequencies(replace(config, rope_scaling=None))
    for original in ORIGINAL_POSITIONS if np.isfinite(largest) and largest > 0 else ():
        guess = replace(config, rope_scaling=RopeScaling("llama3", largest, 1.0, 4.0, original))
        if config.rope_scaling is None and np.allclose(plain / inverse_frequencies(guess), factors, rtol=1e-4):
            return guess
    raise UnsupportedModel(f"{tensor.path}: {ROPE_FACTORS} (1 to {largest:g}) are not those of Llama 3.1's scaling")


def generation_defaults(file: GGUFFile) -> GenerationSettings:
    """Returns the end tokens, and the sampling defaults if the file has any."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    end_ids = [file.fields.ids(f"tokenizer.ggml.{key}", 1, count) for key in ENDS]
    bos = file.fields.ids("tokenizer.ggml.bos_token_id", 1, count)
    listed = [i for ids in end_ids if ids for i in ids] + _ends_by_name(file)
    ends = tuple(dict.fromkeys(listed))[:MAX_STOP_TOKENS]
    sampling = {
        ours: value for theirs, ours in SAMPLING_KEYS.items() if (value := _sampling(file, theirs, ours)) is not None
    }
    return GenerationSettings(ends, bos[0] if bos else None, sampling)


def _sampling(file: GGUFFile, theirs: str, ours: str) -> float | None:
    low, high = SAMPLING_RANGES[ours]
    return file.fields.number(f"general.sampling.{theirs}", low, high, open_low=ours in OPEN)


def _ends_by_name(file: GGUFFile) -> list[int]:
    """Returns control tokens known by name to end a turn, as llama.cpp does, because files often list only one of
    several."""
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return []
    pairs = zip(tokens, kinds, strict=False)
    return [i for i, (token, kind) in enumerate(pairs) if kind == CONTROL and token in END_TEXTS]
