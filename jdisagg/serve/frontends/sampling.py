"""What a client's silence means: defaults filled in, seeds drawn, and one request's choices made to differ."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.core.request import SamplingParams
from jdisagg.model.tokenizer import Tokenizer

SEED_BITS = 64  # device programs keep seeds as two int32


def fold_seed(seed: int | None) -> int:
    """Anybody's seed, by HTTP or in Python, or a fresh one, as a number of SEED_BITS; most stay as they are."""
    return secrets.randbits(SEED_BITS) if seed is None else seed % (1 << SEED_BITS)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the n-th choice of one prompt; the first choice keeps the seed."""
    return seed if choice == 0 else _mix(seed, choice)


def _mix(seed: int, choice: int) -> int:
    """Steele, Lea and Flood's SplitMix64 finalizer over seed and choice."""
    z = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def sampling_params(asked: Mapping[str, Any], defaults: Mapping[str, float]) -> SamplingParams:
    """`asked` (None means not said) over the model's defaults over those of SamplingParams."""
    said = {name: value for name, value in asked.items() if value is not None}
    fields = {**defaults, **said}
    if "top_k" in fields:
        fields["top_k"] = int(fields["top_k"])  # checkpoints write 50.0 too
    return SamplingParams(**fields)


def logit_bias_of(asked: Mapping[str, float] | None, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...] | None:
    """{"50256": -100} as ((50256, -100.0),); a key that is no number is the text of one token."""
    if asked is None:
        return None
    return tuple((_token_of(key, tokenizer), float(value)) for key, value in asked.items())


def _token_of(key: str, tokenizer: Tokenizer) -> int:
    if key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    ids = tokenizer.encode(key[:256], add_special_tokens=False)
    if len(ids) != 1 or len(key) > 256:
        said = f"logit_bias has the key {key[:40]!r}, must be a token id or the text of one token (it has {len(ids)})"
        raise RequestError(said, param="logit_bias")
    return ids[0]


def stop_strings(asked: str | list[str] | None, max_stops: int, max_chars: int) -> tuple[str, ...]:
    """`stop` as a tuple, within the limits on its number and length."""
    stops = (asked,) if isinstance(asked, str) else tuple(asked or ())
    if len(stops) > max_stops:
        raise RequestError(f"stop has {len(stops)} strings, at most {max_stops} are allowed", param="stop")
    longest = max((len(stop) for stop in stops), default=0)
    if longest > max_chars:
        raise RequestError(f"stop has a string of {longest} characters, at most {max_chars} are allowed", param="stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))
