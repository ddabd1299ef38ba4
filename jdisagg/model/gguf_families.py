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
from jdisagg.model.limits import MOST_LAYERS

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


EXTRA: dict[str, Callable[[GGUFFile, Raw], Raw]] = {"gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3}
KNOWN_KEYS = {  # what other families are refused for, and these are not
    "gemma2": ("attention.scale", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("attention.scale",),
    "phi3": ("rope.scaling.attn_factor",),
}


def factors_of(file: GGUFFile, name: str) -> np.ndarray:
    """f32[...] of a tensor of rotary factors. Raises `CheckpointError` where it is of another kind."""
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or len(tensor.shape) != 1:
        found = f"{tensor.kind.name} of shape {tensor.shape}"
        raise CheckpointError(f"{tensor.path}: {name} is {found}; needed: F32 of one dimension")
    return np.memmap(tensor.path, "<f4", "r", tensor.start, tensor.shape)
