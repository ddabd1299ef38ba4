"""Phi-3 and Phi-4-mini: a Llama with fused tensors, partial rotation and longrope.

longrope changes its frequencies once a sequence exceeds the original length, which would require recomputing cached
keys. Such a model is therefore served up to its original length, where results are exact.
"""

from jdisagg.core.model_config import ModelConfig, RopeScaling
from jdisagg.model.families.family import ModelFamily, Numbers, layer_windows, window_size, windows_json
from jdisagg.model.files import Json, JsonFields
from jdisagg.model.rope_config import MOST_HEAD_DIM, MOST_HEADS, longrope, rope_json, rope_of, rope_part


def _numbers(read: JsonFields) -> Numbers:
    rope = rope_part(read)
    rotated = _rotated(read, rope)
    theta, scaling = _rope(read, rope)
    if scaling and scaling.factors and len(scaling.factors) != rotated // 2:
        raise rope.wrong("short_factor", f"{rotated // 2} numbers, one for each pair that is rotated")
    limits = {"max_position": scaling.original_max_position} if scaling and scaling.kind == "longrope" else {}
    return {
        "layer_windows": layer_windows(read, window_size(read), lambda layer: True),
        "rotary_dim": rotated,
        "rope_theta": theta,
        "rope_scaling": scaling,
        **limits,
    }


def _rope(read: JsonFields, rope: JsonFields) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling. Early files call longrope "su" or "yarn"."""
    kind = rope.word("rope_type") or rope.word("type")
    if kind in ("su", "yarn", "longrope"):
        return longrope(read, rope)
    return rope_of(read, rope, 10_000.0)


def _rotated(read: JsonFields, rope: JsonFields) -> int:
    """Returns how many elements of a head are rotated."""
    heads = read.needed("num_attention_heads", MOST_HEADS)
    size = read.whole("head_dim", 2, MOST_HEAD_DIM) or read.needed("hidden_size", 1 << 20) // heads
    share = rope.number("partial_rotary_factor", 0, 1, open_low=True)
    share = share or read.number("partial_rotary_factor", 0, 1, open_low=True) or 1.0
    rotated = int(size * share)
    if rotated % 2:
        raise read.wrong("partial_rotary_factor", f"an even number of {size} ({rotated} is none)")
    return rotated


def _written(config: ModelConfig) -> Json:
    share = {"partial_rotary_factor": config.rotary_dim / config.head_dim}
    rope = {**rope_json(config.rope_scaling), "rope_theta": config.rope_theta, **share}
    return {**windows_json(config), **share, "rope_parameters": rope}


PHI3 = ModelFamily(
    "phi3", "Phi3ForCausalLM", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, _numbers, _written, fused=True
)
