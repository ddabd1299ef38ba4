"""A Hugging Face folder's `config.json` and `generation_config.json` become our numbers; no tensor is touched here.

Both spellings are read: the old one (`rope_theta` and `rope_scaling` at the top) and the one transformers 5 writes
(`rope_parameters`). What a file leaves out has the value transformers gives it. What this project cannot compute
exactly is refused by name, never approximated.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdisagg.core.errors import CheckpointError, UnsupportedModel
from jdisagg.core.model_config import ModelConfig, RopeScaling

Json = Mapping[str, Any]
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "llama3")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# What transformers assumes where a family's file is silent (the rest is the same in all four).
DEFAULT_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}
DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about ending and sampling when a request is silent."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)  # only the keys of SAMPLING_KEYS the file has


def read_config(folder: str | Path) -> ModelConfig:
    """Numbers of the model in `folder`, which needs nothing but its `config.json`. Raises `UnsupportedModel`."""
    return parse_config(read_json(Path(folder) / "config.json"))


def read_json(path: Path) -> Json:
    """A JSON object from a file of a checkpoint; `CheckpointError` if it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def parse_config(raw: Json) -> ModelConfig:
    """`config.json` as a mapping -> `ModelConfig`."""
    family = _family(raw)
    _refuse_options(raw)
    heads, hidden, layers = _number(raw, "num_attention_heads"), _number(raw, "hidden_size"), _layers(raw)
    theta, scaling = _rope(raw)
    attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=_number(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", DEFAULT_KV_HEADS[family]) or heads,
        head_dim=raw.get("head_dim", DEFAULT_HEAD_DIM[family]) or hidden // heads,
        max_position=raw.get("max_position_embeddings", DEFAULT_POSITIONS[family]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        layer_windows=_windows(raw, family, layers),
    )


def _family(raw: Json) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(map(str, names)) or f"none named (model_type {raw.get('model_type')!r})"
    raise UnsupportedModel(f"architecture {found} is not supported; supported: {', '.join(FAMILIES)}")


def _refuse_options(raw: Json) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"quantization {method!r} is not supported; supported: bfloat16, float16, float32 weights"
        )


def _number(raw: Json, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {key} = {value!r}; a positive integer is needed")
    return value


def _layers(raw: Json) -> int:
    return _number(raw, "num_hidden_layers")


def _rope(raw: Json) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModel(f"rope parameters that differ by layer type ({', '.join(nested)}) are not supported")
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    return theta, None if kind == "default" else _scaling(raw, rope, kind)


def _scaling(raw: Json, rope: Json, kind: str) -> RopeScaling:
    needed = ["factor"] if kind == "linear" else ["factor", "low_freq_factor", "high_freq_factor"]
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise UnsupportedModel(f"rope type {kind!r} needs {', '.join(missing)} in config.json; found {sorted(rope)}")
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(original or raw.get("max_position_embeddings", 2048)),
    )


def _windows(raw: Json, family: str, layers: int) -> tuple[int | None, ...]:
    """Window of each layer, or () where all are full: by `layer_types`, else by the family's own rule."""
    window = _window_size(raw, family)
    if window is None:
        return ()
    kinds = raw.get("layer_types") or _implied_kinds(raw, family, layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(
            f"layer_types names {len(kinds)} layers of kinds {sorted(set(kinds))} for {layers} layers; "
            "supported: full_attention, sliding_attention"
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _window_size(raw: Json, family: str) -> int | None:
    if family == "mistral":
        return raw.get("sliding_window", 4096)
    if family in ("qwen2", "qwen3") and raw.get("use_sliding_window", False):
        return raw.get("sliding_window", 4096)
    return None


def _implied_kinds(raw: Json, family: str, layers: int) -> list[str]:
    """Mistral slides in every layer; Qwen from `max_window_layers` up."""
    full = 0 if family == "mistral" else raw.get("max_window_layers", 28)
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """End tokens and sampling defaults: `generation_config.json`, then `config.json` for what it leaves out."""
    path = Path(folder) / "generation_config.json"
    own = read_json(path) if path.exists() else {}
    model = read_json(Path(folder) / "config.json")
    eos, bos = (own.get(key, model.get(key)) for key in ("eos_token_id", "bos_token_id"))
    sampling = {key: own[key] for key in SAMPLING_KEYS if own.get(key) is not None}
    if own.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    return GenerationDefaults(_ids(eos), bos, sampling)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
