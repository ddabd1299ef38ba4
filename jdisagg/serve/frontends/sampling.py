"""Sampling parameters of a request: the model's defaults, fresh seeds, token texts as keys, and stop strings."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from jdisagg.core.errors import RequestError
from jdisagg.core.request import SEED_BITS, SamplingParams
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.text import TextOptions

MAX_STOPS, MAX_STOP_CHARS = 64, 256


def resolved(
    sampling: SamplingParams, defaults: Mapping[str, float], eos_ids: Iterable[int], grammar: str = ""
) -> SamplingParams:
    """Returns what workers are given for `sampling`; a seed that the caller did not give is drawn."""
    return sampling.resolve({"seed": secrets.randbits(SEED_BITS), **defaults}, eos_ids, grammar)


def text_options(
    sampling: SamplingParams,
    drawn: SamplingParams,
    eos_ids: Iterable[int],
    max_stops: int = MAX_STOPS,
    max_stop_chars: int = MAX_STOP_CHARS,
) -> TextOptions:
    """Returns how tokens that are drawn by `drawn` become the text that `sampling` asks for. Raises RequestError."""
    return TextOptions(
        stop=stop_strings(sampling.stop, max_stops, max_stop_chars),
        stop_token_ids=frozenset(drawn.stop_token_ids),
        eos_ids=frozenset(eos_ids),
        min_tokens=drawn.min_tokens,
        include_stop=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of the n-th choice of one prompt; the first choice keeps the seed."""
    return seed if choice == 0 else _mix(seed, choice)


def _mix(seed: int, choice: int) -> int:
    """Mixes seed and choice by the SplitMix64 finalizer of Steele, Lea and Flood."""
    z = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def token_biases(asked: Mapping[str, float], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Returns {"50256": -100} as ((50256, -100.0),); a key that is no number is the text of one token."""
    return tuple((_token_of(key, tokenizer), float(value)) for key, value in asked.items())


def _token_of(key: str, tokenizer: Tokenizer) -> int:
    if key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    ids = tokenizer.encode(key[:256], add_special_tokens=False)
    if len(ids) != 1 or len(key) > 256:
        said = f"logit_bias has the key {key[:40]!r}, must be a token id or the text of one token (it has {len(ids)})"
        raise RequestError(said, param="logit_bias")
    return ids[0]


def stop_strings(asked: str | Sequence[str], max_stops: int, max_chars: int) -> tuple[str, ...]:
    """Returns `stop` as a tuple, within the limits on its number and length. Raises RequestError."""
    stops = (asked,) if isinstance(asked, str) else tuple(asked)
    if len(stops) > max_stops:
        raise RequestError(f"stop has {len(stops)} strings, at most {max_stops} are allowed", param="stop")
    longest = max((len(stop) for stop in stops), default=0)
    if longest > max_chars:
        raise RequestError(f"stop has a string of {longest} characters, at most {max_chars} are allowed", param="stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))
