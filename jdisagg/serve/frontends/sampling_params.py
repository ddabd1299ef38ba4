"""What a caller of the library asks for: None where it says nothing, and silence means what it means over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jdisagg.core import request as core
from jdisagg.core.errors import RequestError
from jdisagg.core.request import Adapter
from jdisagg.serve.frontends.sampling import fold_seed, sampling_params, stop_strings
from jdisagg.serve.frontends.text import TextOptions

MAX_CHOICES = 128  # n, as over HTTP
MAX_STOPS, MAX_STOP_CHARS = 64, 256
INT32 = 2**31
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "logprobs", "prompt_logprobs"), (int,)
    ),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative"), (bool,)),
}
OWN = (
    "structured_outputs",
    "n",
    "best_of",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "stop_token_ids",
    "seed",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answers are drawn and where they stop. Names are those of the OpenAI and vLLM interfaces.

    What is None is what the model's generation_config.json says, else the interfaces' default; a seed of None is
    drawn anew each time. Raises RequestError for a value that is not of its field's kind.
    """

    max_tokens: int | None = None  # 16, but in chat what the model has room for
    min_tokens: int | None = None
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()  # texts that end an answer, and are not part of it
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end tokens
    ignore_eos: bool = False  # the model's end tokens end nothing
    n: int = 1  # answers to each prompt
    best_of: int | None = None  # as many are drawn, and the n likeliest told; not in a chat or a stream
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    adapter: Adapter | None = None  # as `LLM.adapter` finds it
    speculative: bool | None = None  # False: one token a step, where the stack guesses several
    structured_outputs: Mapping[str, Any] | None = None  # {"json": SCHEMA}, or regex, choice, grammar, as in vLLM

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kinds = getattr(self, each.name), KINDS.get(each.name)
            if kinds and type(value) not in kinds and not (value is None and each.default is None):
                named = " or ".join(kind.__name__ for kind in kinds)
                raise RequestError(f"{each.name} is {value!r}, must be of type {named}", param=each.name)
            if kinds == (int,) and each.name != "seed" and value is not None and not -INT32 <= value < INT32:
                raise RequestError(f"{each.name} is {value}, must lie in [{-INT32}, {INT32 - 1}]", param=each.name)
        for name, kind, listed in (("stop", str, self.stop), ("stop_token_ids", int, self.stop_token_ids)):
            if not all(type(each) is kind for each in listed):
                raise RequestError(f"{name} is {listed!r}, must hold {kind.__name__} only", param=name)
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n is {self.n}, must lie in [1, {MAX_CHOICES}]", param="n")
        if self.best_of is not None and not 1 <= self.best_of <= MAX_CHOICES:
            raise RequestError(f"best_of is {self.best_of}, must lie in [1, {MAX_CHOICES}]", param="best_of")

    def resolved(self, defaults: Mapping[str, float], eos_ids: Iterable[int], grammar: str = "") -> core.SamplingParams:
        """Silence filled in: `defaults` are the model's, `eos_ids` its end tokens, `grammar` what answers follow."""
        ends = () if self.ignore_eos and not grammar else tuple(eos_ids)
        asked = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OWN}
        bias = None if self.logit_bias is None else tuple(self.logit_bias.items())
        said = asked | {
            "logit_bias": bias,
            "grammar": grammar or None,
            "synchronous": True if grammar else None,
            "seed": fold_seed(self.seed),
            "stop_token_ids": tuple(dict.fromkeys([*ends, *self.stop_token_ids])),
        }
        return sampling_params(said, defaults)

    def body(self) -> dict[str, Any]:
        """What was said, as the fields of a chat over HTTP."""
        said = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        if self.logit_bias is not None:
            said["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.logprobs is not None:
            said |= {"logprobs": True, "top_logprobs": self.logprobs}
        return said | {
            name: list(said[name]) for name in ("stop", "stop_token_ids") if isinstance(said.get(name), tuple)
        }

    def options(self, drawn: core.SamplingParams, eos_ids: Iterable[int]) -> TextOptions:
        """How the tokens that `drawn` brings are read as text."""
        stop = self.stop if isinstance(self.stop, str) else list(self.stop)
        return TextOptions(
            stop=stop_strings(stop, MAX_STOPS, MAX_STOP_CHARS),
            stop_token_ids=frozenset(drawn.stop_token_ids),
            eos_ids=frozenset(eos_ids),
            min_tokens=drawn.min_tokens,
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )
