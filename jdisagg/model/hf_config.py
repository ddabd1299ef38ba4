"""Reads `config.json` and `generation_config.json` of a Hugging Face folder; no tensor is read here.

Both layouts are read: the old one (`rope_theta` and `rope_scaling` at the top level) and that of transformers 5
(`rope_parameters`). Absent fields have transformers' defaults. A feature that this project cannot compute exactly is
refused by name, never approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import MAX_STOP_TOKENS
from jdisagg.model.families import BY_ARCHITECTURE
from jdisagg.model.families.family import ModelFamily, Numbers
from jdisagg.model.files import Json, JsonFields, read_json, shown
from jdisagg.model.quantized.config import quantization_of
from jdisagg.model.rope_config import (
    MOST_CHANNELS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCAB,
    whole_rope,
)

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SAMPLING_RANGES = {  # allowed [low, high] of a generation config; (low, high] for keys in OPEN
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}
OPEN = ("top_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """A checkpoint's end tokens and sampling defaults, used for fields that a request omits."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)  # only the keys of SAMPLING_RANGES the file has


def read_config(folder: str | Path) -> ModelConfig:
    """Reads the configuration of the model in `folder`, which needs only `config.json`. Raises `CheckpointError`."""
    path = Path(folder) / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(raw: Json, place: str = "config.json") -> ModelConfig:
    """Converts the mapping of a `config.json` to `ModelConfig`; `place` names it in errors. Raises
    `UnsupportedModel`."""
    silent = JsonFields(raw, place)
    family = _family(silent)
    read = family.silent(silent)
    quantization_of(read)  # raises if the quantisation is not supported
    plain = _plain(read)
    own = family.numbers(read)
    return ModelConfig(family=family.name, **{**plain, **_rope(read, own), **own})


def _plain(read: JsonFields) -> dict[str, Any]:
    heads, hidden = read.needed("num_attention_heads", MOST_HEADS), read.needed("hidden_size", MOST_CHANNELS)
    kv_heads, head_dim = _attention(read, heads, hidden)
    epsilon = read.number("rms_norm_eps", 0.0, 1.0)
    return {
        "vocab_size": read.needed("vocab_size", MOST_VOCAB),
        "hidden_size": hidden,
        "intermediate_size": read.needed("intermediate_size", MOST_CHANNELS),
        "num_layers": read.needed("num_hidden_layers", MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": read.needed("max_position_embeddings", MOST_POSITIONS),
        "rms_norm_eps": 1e-6 if epsilon is None else epsilon,
        "tie_embeddings": read.flag("tie_word_embeddings"),
        "activation": _activation(read),
    }


def _rope(read: JsonFields, own: Numbers) -> Numbers:
    """Returns base and scaling, unless the family reads its own."""
    if "rope_theta" in own:
        return {}
    theta, scaling = whole_rope(read)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _family(read: JsonFields) -> ModelFamily:
    names = read.words("architectures") or []
    for name in names:
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    found = ", ".join(names)[:200] or f"none named (model_type {shown(read.raw.get('model_type'))})"
    raise UnsupportedModel(
        f"{read.place}: architecture {found} is not supported; supported: {', '.join(BY_ARCHITECTURE)}"
    )


def _activation(read: JsonFields) -> str:
    key = "hidden_activation" if read.raw.get("hidden_activation") else "hidden_act"
    name = read.word(key) or "silu"
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{read.place}: {key} {shown(name)} is not supported; supported: {known}")
    return ACTIVATIONS[name]


def _attention(read: JsonFields, heads: int, hidden: int) -> tuple[int, int]:
    """Returns (KV heads, head size); KV heads must divide heads, and rotation needs an even size."""
    kv_heads = read.whole("num_key_value_heads", 1, MOST_HEADS) or heads
    head_dim = read.whole("head_dim", 2, MOST_HEAD_DIM) or hidden // heads
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads} ({kv_heads} is none)")
    if head_dim % 2 or not head_dim:
        raise read.wrong("head_dim", f"an even number ({head_dim} is none)")
    return kv_heads, head_dim


def read_generation_config(folder: str | Path) -> GenerationSettings:
    """Returns end tokens and sampling defaults from `generation_config.json`; `config.json` supplies absent token
    ids."""
    path, model_path = Path(folder) / "generation_config.json", Path(folder) / "config.json"
    own = JsonFields(read_json(path) if path.exists() else {}, str(path))
    model = JsonFields(read_json(model_path), str(model_path))
    vocab_size = model.whole("vocab_size", 1, MOST_VOCAB) or MOST_VOCAB
    eos, bos = (_ids(own if key in own.raw else model, key, vocab_size) for key in ("eos_token_id", "bos_token_id"))
    sampling = {
        key: value
        for key, (low, high) in SAMPLING_RANGES.items()
        if (value := own.number(key, low, high, open_low=key in OPEN)) is not None
    }
    if own.flag("do_sample") is False and "do_sample" in own.raw:
        sampling = {"temperature": 0.0}
    return GenerationSettings(eos, bos[0] if bos else None, sampling)


def _ids(read: JsonFields, key: str, vocab_size: int) -> tuple[int, ...]:
    return read.ids(key, MAX_STOP_TOKENS, vocab_size) or ()
