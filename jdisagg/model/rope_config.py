"""Reads RoPE base and scaling from a `config.json`, in the old and the new layout."""

from __future__ import annotations

import math
from typing import Any

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import RopeScaling
from jdisagg.model.files import JsonFields, shown

# Upper limits for config values, far above any published model, because they determine loops and allocations.

MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 512, 4096, 4096
MOST_CHANNELS, MOST_VOCAB, MOST_POSITIONS = 1 << 20, 1 << 24, 1 << 27
MOST_EXPERTS = 4096
MOST_FACTOR = 1e6  # largest factor on rotary frequencies
MOST_THETA = 1e15

KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_ORIGINAL = 2048  # original length if the config has no length at all


def rope_part(read: JsonFields) -> JsonFields:
    """Returns `rope_parameters` (transformers 5), else `rope_scaling`, else an empty object. Refuses parameters by
    layer type."""
    old, new = read.part("rope_scaling"), read.part("rope_parameters")
    rope = next((each for each in (new, old) if each is not None and each.raw), JsonFields({}, read.place))
    nested = [key for key, value in rope.raw.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModel(
            f"{read.place}: rope parameters that differ by layer type ({shown(nested)}) are not supported"
        )
    return rope


def whole_rope(read: JsonFields) -> tuple[float, RopeScaling | None]:
    rope = rope_part(read)
    for partial in (rope.number("partial_rotary_factor", 0, 1), read.number("partial_rotary_factor", 0, 1)):
        if partial not in (None, 1.0):
            raise UnsupportedModel(f"{read.place}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    return rope_of(read, rope, 10_000.0)


def rope_of(read: JsonFields, rope: JsonFields, theta: float) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling from `rope`; the base is `theta` if neither `rope` nor the file has one."""
    kind = rope.word("rope_type") or rope.word("type") or "default"
    if kind not in KINDS:
        raise UnsupportedModel(f"{read.place}: rope type {shown(kind)} is not supported; supported: {', '.join(KINDS)}")
    theta = first_said((rope, "rope_theta"), (read, "rope_theta")) or theta
    return theta, None if kind == "default" else _scaling(read, rope, kind)


def first_said(*places: tuple[JsonFields, str]) -> float | None:
    found = (fields.number(key, 0.0, MOST_THETA, open_low=True) for fields, key in places)
    return next((value for value in found if value is not None), None)


def _scaling(read: JsonFields, rope: JsonFields, kind: str) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind, _factors(rope, kind, "factor")["factor"])
    if kind == "yarn":
        return _yarn(read, rope)
    factors = _factors(rope, kind, "factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = factors.values()
    if low >= high:
        raise rope.wrong("low_freq_factor", f"less than high_freq_factor = {high:g}")
    return RopeScaling(kind, factor, low, high, original_length(read, rope))


def _factors(rope: JsonFields, kind: str, *needed: str) -> dict[str, float]:
    found = {key: _factor(rope, key) for key in needed}
    factors = {key: value for key, value in found.items() if value is not None}
    missing = [key for key in needed if key not in factors]
    if missing:
        raise UnsupportedModel(
            f"{rope.place} rope type {kind!r} needs {', '.join(missing)}; found {shown(sorted(rope.raw))}"
        )
    return factors


def _factor(rope: JsonFields, key: str) -> float | None:
    return rope.number(key, 0.0, MOST_FACTOR, open_low=True)


def original_length(read: JsonFields, rope: JsonFields) -> int:
    """Returns the context length in tokens of the original training, before extension."""
    key = "original_max_position_embeddings"
    length = next(filter(None, (each.whole(key, 1, MOST_POSITIONS) for each in (read, rope))), None)
    return length or read.whole("max_position_embeddings", 1, MOST_POSITIONS) or DEFAULT_ORIGINAL


def _stretch(read: JsonFields, rope: JsonFields, original: int) -> float:
    """Returns `factor`, else the ratio of the extended to the original length."""
    whole = read.whole("max_position_embeddings", 1, MOST_POSITIONS) or original
    return _factor(rope, "factor") or whole / original


def _yarn(read: JsonFields, rope: JsonFields) -> RopeScaling:
    original = original_length(read, rope)
    factor = _stretch(read, rope, original)
    said = _factor(rope, "attention_factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=_yarn_attention(rope, factor) if said is None else said,
        beta_fast=_factor(rope, "beta_fast") or 32.0,
        beta_slow=_factor(rope, "beta_slow") or 1.0,
        truncate="truncate" not in rope.raw or rope.flag("truncate"),
    )


def _yarn_attention(rope: JsonFields, factor: float) -> float:
    """Returns the attention factor (YaRN, section 3.4); with both mscales (DeepSeek-V2) it is their quotient."""
    above, below = (rope.number(key, 0.0, MOST_FACTOR) for key in ("mscale", "mscale_all_dim"))
    return mscale(factor, above) / mscale(factor, below) if above and below else mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """Returns the factor on cosines and sines for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope(read: JsonFields, rope: JsonFields) -> tuple[float, RopeScaling]:
    """Returns base and scaling for prompts up to the original length (`short_factor`)."""
    original = original_length(read, rope)
    factor = _stretch(read, rope, original)
    explicit = _factor(rope, "attention_factor")
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scaling = RopeScaling(
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=implied if explicit is None else explicit,
        factors=_short_factors(rope),
    )
    return first_said((rope, "rope_theta"), (read, "rope_theta")) or 10_000.0, scaling


def _short_factors(rope: JsonFields) -> tuple[float, ...]:
    found = rope.raw.get("short_factor")
    if not isinstance(found, list) or not all(type(each) in (int, float) and 0 < each <= MOST_FACTOR for each in found):
        raise rope.wrong("short_factor", f"a list of numbers in (0, {MOST_FACTOR:g}]")
    return tuple(map(float, found))


def rope_json(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return fields
    fields["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        return fields | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    fields["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":  # long factors apply to prompts that are refused here
        return fields | {"short_factor": list(scaling.factors), "long_factor": list(scaling.factors)}
    return fields | {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
