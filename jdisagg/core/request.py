"""What a client asks for, and the phases it goes through."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType

from jdisagg.core.errors import IllegalTransition, RequestError, TooLong

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 16
MAX_LOGIT_BIAS = 300
BROKEN = -2  # in the place of a token: the logits were no numbers, nothing can be drawn (-1 is a masked slot's)
MAX_PRIORITY = 10  # of a client's request, either way


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are drawn. Field names and defaults are those of the OpenAI and vLLM interfaces."""

    max_tokens: int = 16
    min_tokens: int = 0  # stop tokens are masked until this many tokens are out
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the front draws one where the client gave none, so that a journal replays
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens are in here unless the client ignores them
    logprobs: int | None = None  # None: none; n: the chosen token's and the n likeliest
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether drawing needs the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field out of its range, with its value."""
        _check_range("max_tokens", self.max_tokens, 1, math.inf)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, -1, math.inf)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for field, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_range(field, value, 0, MAX_LOGPROBS)
        _check_range("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKENS)
        _check_range("number of logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias:
            _check_range("logit_bias token", token, 0, vocab_size - 1)
            _check_range("logit_bias value", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _check_range("stop_token_ids", token, 0, vocab_size - 1)


def _check_range(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if math.isnan(value) or value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{field} is {value}, must lie in {bracket}{low}, {high}]", param=field)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Times are seconds of the driver's clock."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0  # each step down is a head start of some seconds
    queue_deadline_s: float | None = None  # still queued then: finished as "timeout"

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Raises RequestError or TooLong, naming the field and both values."""
        if not self.prompt:
            raise RequestError("the prompt is empty: it has 0 tokens, at least 1 is needed", param="prompt")
        if min(self.prompt) < 0 or max(self.prompt) >= vocab_size:
            wrong = next(t for t in self.prompt if not 0 <= t < vocab_size)
            raise RequestError(f"prompt token {wrong} is outside the vocabulary of {vocab_size}", param="prompt")
        self.sampling.check(vocab_size)
        if len(self.prompt) + self.sampling.max_tokens > max_model_len:
            raise TooLong(
                f"prompt of {len(self.prompt)} tokens + max_tokens {self.sampling.max_tokens}"
                f" = {len(self.prompt) + self.sampling.max_tokens}, over the limit of {max_model_len}",
                param="max_tokens",
            )


class Phase(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SHIPPING = "shipping"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


TERMINAL = frozenset({Phase.FINISHED, Phase.CANCELLED, Phase.FAILED})

# From each phase, the phases that may follow. Back to QUEUED means: prefill again with the tokens so far.
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.CANCELLED, Phase.FAILED}),
    Phase.PREFILLING: frozenset({Phase.SHIPPING, Phase.QUEUED, Phase.FINISHED, Phase.CANCELLED, Phase.FAILED}),
    Phase.SHIPPING: frozenset({Phase.DECODING, Phase.QUEUED, Phase.FINISHED, Phase.CANCELLED, Phase.FAILED}),
    Phase.DECODING: frozenset({Phase.QUEUED, Phase.FINISHED, Phase.CANCELLED, Phase.FAILED}),
    Phase.FINISHED: frozenset(),
    Phase.CANCELLED: frozenset(),
    Phase.FAILED: frozenset(),
}


def next_phase(now: Phase, then: Phase) -> Phase:
    """`then`, where the table allows it; IllegalTransition otherwise."""
    if then not in PHASE_TRANSITIONS[now]:
        raise IllegalTransition(f"phase {now} cannot become {then}")
    return then


class FinishReason(StrEnum):
    """Why a request ended. A failure is never "length"."""

    STOP = "stop"  # a stop token (stop strings are the front's and end as a cancel there)
    LENGTH = "length"
    ABORT = "abort"  # cancelled by the client or the operator
    TIMEOUT = "timeout"  # a deadline ran out
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token as it was drawn, with what the client asked to know of it (natural logarithms)."""

    token: int  # BROKEN where the logits were no numbers: its request ends by it as an error
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first

    @property
    def broken(self) -> bool:
        """The logits were no numbers: nothing could be drawn, or be said of what was given."""
        return self.token == BROKEN or (self.logprob is not None and math.isnan(self.logprob))


def continued(request: Request, output: tuple[int, ...]) -> Request:
    """The same request with its output so far joined to the prompt, for a prefill that takes up where it stopped."""
    left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(output))
    return replace(request, prompt=request.prompt + output, sampling=left)
