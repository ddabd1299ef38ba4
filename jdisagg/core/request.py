"""What a client asks for, and the phases it goes through."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, NewType, cast

from msgspec import Meta

from jdisagg.core.codec import Number, TaggedStruct, Whole
from jdisagg.core.errors import ConfigError, IllegalTransition, RequestError, TooLong
from jdisagg.core.settings import Settings

# Adapters: what a few numbers a matrix add to a model's weights (LoRA, Hu et al. 2021), and what names one.
#
# A request says which one it asks for, so that whoever computes it, be it after a restart or instead of another,
# knows what to read. An adapter is its files: the digest of their bytes tells two of one name apart, and is in
# the names of KV pages.

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
USUAL_SLOTS = 4
DIGEST = re.compile(r"[0-9a-f]{32}")
SALT = "\0"  # no client's cache_salt begins so


class Adapter(TaggedStruct, frozen=True):
    """One adapter, as a request names it."""

    name: str
    digest: str  # of its files
    folder: str

    @property
    def salt(self) -> str:
        """What its KV is named by."""
        return f"{SALT}{self.digest}"


def salted(cache_salt: str, adapter: Adapter | None) -> str:
    """What the KV of a tenant's requests to an adapter is named by: it is shared with no other's."""
    return cache_salt if adapter is None else adapter.salt + cache_salt


def adapter_sizes(settings: Settings) -> dict[str, Any]:
    """How many adapters one step may hold, and of what rank; nothing where none are asked for. Raises ConfigError."""
    named = len(named_folders(settings.lora))
    if not (named or settings.enable_lora or settings.max_loras):
        return {}
    return {"max_loras": settings.max_loras or named or USUAL_SLOTS, "max_lora_rank": settings.max_lora_rank}


def named_folders(text: str) -> dict[str, str]:
    """--lora: folders by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        name, equals, folder = entry.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--lora has {entry!r}, must be NAME=FOLDER, several with commas")
        if NAME.fullmatch(name) is None:
            raise ConfigError(f"--lora names {name!r}, must be up to 128 letters, digits and any of . _ / : -")
        if name in found:
            raise ConfigError(f"--lora names {name!r} twice, for {found[name]} and {folder}")
        found[name] = folder
    return found


RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

LARGEST = (1 << 31) - 1  # of whole numbers that a device is given
LONGEST_ID = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128  # n and best_of
SEED_BITS = 64  # device programs keep seeds as two int32
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]  # what crosses processes is held to the bounds too
NO_DEFAULTS: Mapping[str, float] = {}
MAX_STOP_TOKENS = 16
MAX_LOGIT_BIAS = 300
MAX_GRAMMAR = 1 << 18  # characters
POOLINGS = ("last", "mean")
POOLED_ONE = 1 << 32  # of pooled states, which are told as whole numbers: their sums are the same in whatever chunks
BROKEN = -2  # in the place of a token: the logits were no numbers, nothing can be drawn (-1 is a masked slot's)
LONGEST_OBJECTIVE_S = 1e6  # of ttft_s and tpot_s
MAX_PRIORITY = 10  # of a client's request, either way


class ParameterRoute(StrEnum):
    """The interfaces that take a sampling parameter."""

    EVERY_BODY = "every body"  # every HTTP body that asks for an answer, batch files and Python
    GENERATION = "generation"  # the bodies of completions and chat, batch files and Python; others spell it otherwise
    COMPLETIONS = "completions"  # the body of completions, and Python
    PYTHON = "python"  # Python alone
    FRONT = "front"  # set by the front for the workers


class DefaultIntValue(int):
    """A whole number that is a parameter's default, because the caller gave none."""

    __slots__ = ()


class DefaultFloatValue(float):
    """A number that is a parameter's default, because the caller gave none."""

    __slots__ = ()


DEFAULT_VALUES = frozenset({DefaultIntValue, DefaultFloatValue})
ACCEPTED: Mapping[type, frozenset[type]] = {
    int: frozenset({int, DefaultIntValue}),
    float: frozenset({int, float, DefaultFloatValue}),
    bool: frozenset({bool}),
}
TYPE_NAMES: Mapping[type, str] = {int: "int", float: "int or float", bool: "bool"}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One row of the table of sampling parameters: its type, its limits and the interfaces that take it."""

    default: Any
    kind: type | None = None  # int, float or bool; None: a value with a check of its own
    low: float = 0
    high: float = 0
    is_open: bool = False  # `low` itself is refused
    body_low: int = -1  # limits where an HTTP body is read; the checks of the request are narrower
    body_high: int = LARGEST
    is_default_marked: bool = False  # the default is known from the same number given by the caller
    is_optional: bool = False  # None is accepted and means: not given
    is_local: bool = False  # read by the front alone, never sent to a worker
    route: ParameterRoute = ParameterRoute.EVERY_BODY


ROWS: list[ParameterSpec] = []  # the table, in the order of the fields of SamplingParams


def _row(spec: ParameterSpec) -> Any:
    """Adds a row to the table and returns the default of its field."""
    ROWS.append(spec)
    if not spec.is_default_marked:
        return spec.default
    return DefaultIntValue(spec.default) if spec.kind is int else DefaultFloatValue(spec.default)


def _int(default: int, low: int, high: int = LARGEST, **more: Any) -> Any:
    return _row(ParameterSpec(default, int, low, high, is_default_marked=True, is_optional=True, **more))


def _float(default: float, low: float, high: float, **more: Any) -> Any:
    return _row(ParameterSpec(default, float, low, high, is_default_marked=True, is_optional=True, **more))


def _count(default: int | None, low: int, high: int, **more: Any) -> Any:
    return _row(ParameterSpec(default, int, low, high, is_optional=default is None, **more))


def _bool(default: bool, **more: Any) -> Any:
    return _row(ParameterSpec(default, bool, **more))


def _value(default: Any, **more: Any) -> Any:
    return _row(ParameterSpec(default, **more))


class SamplingParams(TaggedStruct, frozen=True):
    """How answers are drawn and where they stop. Names and defaults are those of the OpenAI and vLLM interfaces.

    The fields are the one table of sampling parameters: HTTP bodies, gRPC, batch files and Python are built from it.
    A number that is not given, or is None, is what the model's generation_config.json says, else the default;
    a seed that is not given is drawn anew for each request. `resolve` fills these in. Raises RequestError for a value
    that is not of its field's type.
    """

    max_tokens: Whole = _int(16, 1, body_low=0, route=ParameterRoute.GENERATION)  # in chat: what the model has room for
    n: Choices = _count(1, 1, MAX_CHOICES, is_local=True, body_low=1, body_high=MAX_CHOICES)  # answers to each prompt
    min_tokens: Whole = _int(0, 0)  # stop tokens are masked until this many tokens are out
    temperature: Number = _float(1.0, 0.0, 100.0)  # 0 is greedy
    top_k: Whole = _int(0, -1)  # 0 or -1: off
    top_p: Number = _float(1.0, 0.0, 1.0, is_open=True)
    min_p: Number = _float(0.0, 0.0, 1.0)
    repetition_penalty: Number = _float(1.0, 0.0, 100.0, is_open=True)  # over prompt and output
    presence_penalty: Number = _float(0.0, -2.0, 2.0)  # over output
    frequency_penalty: Number = _float(0.0, -2.0, 2.0)  # over output
    logit_bias: tuple[tuple[Whole, Number], ...] = _value(())  # or a mapping of tokens to biases
    seed: int = _int(0, -(1 << 63), (1 << 64) - 1, body_low=-(1 << 63), body_high=(1 << 63) - 1)
    stop: str | Sequence[str] = _value((), is_local=True)  # texts that end an answer and are not part of it
    stop_token_ids: tuple[Whole, ...] = _value(())  # `resolve` adds the model's end tokens
    ignore_eos: bool = _bool(False, is_local=True)  # the model's end tokens end nothing
    best_of: Choices | None = _count(  # as many are drawn and the n likeliest returned; not in a chat or a stream
        None, 1, MAX_CHOICES, is_local=True, body_low=1, body_high=MAX_CHOICES, route=ParameterRoute.COMPLETIONS
    )
    # None: none; k: the chosen token's and the k likeliest
    logprobs: Whole | None = _count(None, 0, MAX_LOGPROBS, route=ParameterRoute.COMPLETIONS)
    prompt_logprobs: Whole | None = _count(None, 0, MAX_LOGPROBS, route=ParameterRoute.GENERATION)
    include_stop_str_in_output: bool = _bool(False, is_local=True)
    skip_special_tokens: bool = _bool(True, is_local=True)
    adapter: Adapter | None = _value(None, route=ParameterRoute.PYTHON)  # from `LLM.adapter`
    speculative: bool = _bool(True, is_optional=True)  # False: one token a step, where the stack drafts several
    # {"json": SCHEMA}, or regex, choice, grammar, as in vLLM; HTTP bodies have further spellings of it
    structured_outputs: Mapping[str, Any] | None = _value(None, is_local=True, route=ParameterRoute.PYTHON)
    # every token is read by the host before the next is drawn (as a grammar's mask needs)
    synchronous: bool = _bool(False, route=ParameterRoute.FRONT)
    grammar: str = _value("", route=ParameterRoute.FRONT)  # in llguidance's syntax; needs `synchronous`
    # the states of the prompt that the client wants: the last token's, or the sum of all; "": none
    pooling: str = _value("", route=ParameterRoute.FRONT)

    def __post_init__(self) -> None:
        for name, accepted, kind, is_optional in TYPES:
            value = getattr(self, name)
            if type(value) not in accepted and not (value is None and is_optional):
                raise RequestError(f"{name} is {_shown(value)}, must be of type {TYPE_NAMES[kind]}", param=name)
        for name, count in (("n", self.n), ("best_of", self.best_of)):
            if count is not None and not 1 <= count <= MAX_CHOICES:
                raise RequestError(f"{name} is {_shown(count)}, must lie in [1, {MAX_CHOICES}]", param=name)
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            listed: Any = getattr(self, name)
            if listed == ():
                continue
            if not isinstance(listed, Iterable) or not {kind}.issuperset(map(type, cast(Iterable[Any], listed))):
                raise RequestError(f"{name} is {_shown(listed)}, must hold {kind.__name__} only", param=name)

    def given(self) -> dict[str, Any]:
        """Returns the parameters that the caller gave."""
        found: dict[str, Any] = {}
        for name, spec in PARAMETERS.items():
            value = getattr(self, name)
            is_default = type(value) in DEFAULT_VALUES or value is None
            if not is_default and (spec.is_default_marked or value != spec.default):
                found[name] = value
        return found

    def resolve(
        self, defaults: Mapping[str, float] = NO_DEFAULTS, eos_ids: Iterable[int] = (), grammar: str = ""
    ) -> SamplingParams:
        """Returns what workers are given: each parameter that is not given filled in, those of the front left out.

        `defaults` are the model's, `eos_ids` its end tokens, `grammar` what the answer follows.
        """
        given, found = self.given(), dict[str, Any]()
        for name, spec in PARAMETERS.items():
            if spec.is_local:
                continue
            found[name] = given.get(name, defaults.get(name, spec.default))
            if spec.kind is int and found[name] is not None:
                found[name] = int(found[name])  # checkpoints write a top_k of 50.0 too
        grammar = grammar or self.grammar
        ends = () if self.ignore_eos and not grammar else eos_ids  # a grammar needs them to end
        found |= {
            "grammar": grammar,
            "synchronous": self.synchronous or bool(grammar),
            "seed": found["seed"] % (1 << SEED_BITS),
            "logit_bias": _pairs(found["logit_bias"]),
            "stop_token_ids": tuple(dict.fromkeys([*ends, *self.stop_token_ids])),
        }
        return SamplingParams(**found)

    @property
    def reads_prompt(self) -> bool:
        """True if more than the first token is returned for the prompt, so that a prefill worker computes its end."""
        return self.prompt_logprobs is not None or bool(self.pooling)

    @property
    def whole_prompt(self) -> bool:
        """True if something is returned for every token of the prompt, so that all are computed."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True if drawing needs the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def recalls(self) -> bool:
        """True if drawing needs what was drawn before."""
        return self.penalised or bool(self.grammar)

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field of the wrong type, or out of its range, with its value."""
        for name, spec in NUMBERS.items():
            value = getattr(self, name)
            if value is None and spec.default is None:
                continue
            if spec.kind is int:
                _check_whole(name, value, int(spec.low), int(spec.high))
            else:
                _check_range(name, value, spec.low, spec.high, open_low=spec.is_open)
        _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_grammar(self)
        _check_adapter(self.adapter)
        _check_pooling(self)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, 0, vocab_size - 1)
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"logit_bias has {_shown(entry)}, must be pairs of token and bias", "logit_bias")
            _check_whole("logit_bias token", entry[0], 0, vocab_size - 1)
            _check_range("logit_bias value", entry[1], -100.0, 100.0)


PARAMETERS: Mapping[str, ParameterSpec] = dict(zip(SamplingParams.__struct_fields__, ROWS, strict=True))
NUMBERS = {name: spec for name, spec in PARAMETERS.items() if spec.kind in (int, float)}
TYPES = tuple(
    (name, ACCEPTED[spec.kind], spec.kind, spec.is_optional) for name, spec in PARAMETERS.items() if spec.kind
)


def _pairs(bias: Any) -> tuple[Any, ...]:
    entries = cast(Mapping[Any, Any], bias).items() if isinstance(bias, Mapping) else bias
    return tuple(entries)


def _check_pooling(sampling: SamplingParams) -> None:
    if sampling.pooling and sampling.pooling not in POOLINGS:
        raise RequestError(f"pooling is {_shown(sampling.pooling)}, must be {' or '.join(POOLINGS)}", param="pooling")
    if sampling.pooling and sampling.max_tokens != 1:
        raise RequestError(f"pooling is {sampling.pooling}, max_tokens {sampling.max_tokens}: must be 1", "pooling")


def _check_grammar(sampling: SamplingParams) -> None:
    grammar: Any = sampling.grammar
    if not isinstance(grammar, str):
        raise RequestError(f"grammar is {_shown(grammar)}, must be a text", param="grammar")
    if len(grammar) > MAX_GRAMMAR:
        raise RequestError(f"grammar has {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed", "grammar")
    if not grammar:
        return
    if not sampling.synchronous:
        raise RequestError("a grammar is given while synchronous is False", param="synchronous")
    if sampling.min_tokens > 0:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens} beside a grammar, which says itself where an answer ends",
            param="min_tokens",
        )


def _check_forced(forced: Any, sampling: SamplingParams, vocab_size: int) -> None:
    if not isinstance(forced, tuple):
        raise RequestError(f"forced is {_shown(forced)}, must be a tuple of token ids", param="forced")
    for token in cast(tuple[Any, ...], forced):
        _check_whole("forced token", token, 0, vocab_size - 1)
    if forced and (not sampling.grammar or sampling.logprobs is not None or sampling.whole_prompt):
        said = "forced tokens are given without a grammar, or where log-probabilities of them are asked for"
        raise RequestError(said, param="forced")


def _check_adapter(adapter: Any) -> None:
    if adapter is None:
        return
    named = isinstance(adapter, Adapter) and NAME.fullmatch(adapter.name) and DIGEST.fullmatch(adapter.digest)
    if not named:
        raise RequestError(f"adapter is {_shown(adapter)}, must be one that was loaded", param="model")


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if type(value) not in ACCEPTED[int]:
        raise RequestError(f"{name} is {_shown(value)}, must be a whole number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, must lie in [{low}, {high}]", param=name)


def _check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) not in ACCEPTED[float] | ACCEPTED[int]:
        raise RequestError(f"{name} is {_shown(value)}, must be a number", param=name)
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {_shown(value)}, must lie in {bracket}{low}, {high}]", param=name)


def _check_count(name: str, values: Any, most: int) -> None:
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {_shown(values)}, must be a tuple", param=name)
    if (count := len(cast(tuple[Any, ...], values))) > most:
        raise RequestError(f"number of {name} is {count}, at most {most} are allowed", param=name)


def _shown(value: Any) -> str:
    """In one short line, whatever it is: a number of 5,000 digits has no text."""
    try:
        return "a huge number" if type(value) is int and abs(value) >> 64 else reprlib.repr(value)
    except ValueError:  # a number of over 4,300 digits somewhere inside
        return f"a {type(value).__name__} of huge numbers"


class Request(TaggedStruct, frozen=True):
    """One prompt and how to continue it. Times are seconds of the driver's clock."""

    request_id: RequestId
    prompt: tuple[Whole, ...]
    sampling: SamplingParams
    arrival_s: Number = 0.0
    priority: Whole = 0  # each step down is a head start of some seconds
    queue_deadline_s: Number | None = None  # still queued then: finished as "timeout"
    cache_salt: str = ""  # KV is shared between requests of one salt only: a tenant's, say
    traceparent: str = ""  # the W3C trace context of who asked; nothing is decided by it
    ttft_s: Number | None = None  # asked for: from its arrival to its first token
    tpot_s: Number | None = None  # asked for: the mean gap between its tokens
    forced: tuple[Whole, ...] = ()  # tokens of its answer that its grammar leaves no choice about, before any is drawn

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens of its answer that are computed with its prompt: those in front of any that ends it, and one at
        least is drawn."""
        ends = [place for place, token in enumerate(self.forced) if token in self.sampling.stop_token_ids]
        return self.forced[: min([self.sampling.max_tokens - 1, *ends[:1]])]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def salt(self) -> str:
        """What its KV is named by, beside its tokens."""
        return salted(self.cache_salt, self.sampling.adapter)

    @property
    def has_objectives(self) -> bool:
        """Whether it says how soon its tokens are to come."""
        return self.ttft_s is not None or self.tpot_s is not None

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Raises RequestError or TooLong, naming the field and both values.

        The one check for requests from everywhere, before anything is done with them: what passes, an actor, a message,
        a journal and a device can take.
        """
        whole = isinstance(self.prompt, tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not whole or not {int}.issuperset(map(type, self.prompt)):
            raise RequestError(f"the prompt is {_shown(self.prompt)}, must be a tuple of token ids", param="prompt")
        if not self.prompt:
            raise RequestError("the prompt is empty: it has 0 tokens, at least 1 is needed", param="prompt")
        if min(self.prompt) < 0 or max(self.prompt) >= vocab_size:
            wrong = next(t for t in self.prompt if not 0 <= t < vocab_size)
            raise RequestError(
                f"prompt token {_shown(wrong)} is outside the vocabulary of {vocab_size}", param="prompt"
            )
        _check_forced(self.forced, self.sampling, vocab_size)
        self._check_rest()
        self.sampling.check(vocab_size)
        if len(self.prompt) + self.sampling.max_tokens > max_model_len:
            raise TooLong(
                f"prompt of {len(self.prompt)} tokens + max_tokens {self.sampling.max_tokens}"
                f" = {len(self.prompt) + self.sampling.max_tokens}, over the limit of {max_model_len}",
                param="max_tokens",
            )

    def _check_rest(self) -> None:
        name: Any = self.request_id
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_ID or not name.isprintable():
            raise RequestError(f"request_id is {_shown(name)}, must be a printable text", param="request_id")
        if self.cache_salt.startswith(SALT):
            raise RequestError("cache_salt begins with a NUL, which names of adapters do", param="cache_salt")
        _check_whole("priority", self.priority, -LARGEST, LARGEST)
        _check_range("arrival_s", self.arrival_s, -math.inf, math.inf)
        if self.queue_deadline_s is not None:
            _check_range("queue_deadline_s", self.queue_deadline_s, -math.inf, math.inf)
        for objective, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None:
                _check_range(objective, value, 0.0, LONGEST_OBJECTIVE_S, open_low=True)


class Attempt(TaggedStruct, frozen=True, order=True):
    """One try at one request: what every message of it carries.

    Epochs are the router's and never come again, so that a late word of an earlier try is known by its epoch and owns
    nothing.
    """

    request_id: RequestId
    epoch: Whole


class Phase(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SHIPPING = "shipping"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


# From each phase, the phases that may follow. Back to QUEUED means: prefill again with the tokens so far, among which
# a text that ends the answer may be found meanwhile.
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.FINISHED, Phase.CANCELLED, Phase.FAILED}),
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


class Sampled(TaggedStruct, frozen=True):
    """One token as it was drawn, with what the client asked to know of it (natural logarithms)."""

    token: Whole  # BROKEN where nothing could be drawn: its request ends by it as an error
    logprob: Number | None = None
    top: tuple[tuple[Whole, Number], ...] = ()  # the likeliest tokens, best first

    @property
    def broken(self) -> bool:
        """The logits were no numbers: nothing could be drawn, or be said of what was given."""
        return self.token == BROKEN or (self.logprob is not None and math.isnan(self.logprob))


def continued(request: Request, output: tuple[int, ...]) -> Request:
    """The same request with its output so far joined to the prompt, for a prefill that takes up where it stopped."""
    left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(output))
    return replace(request, prompt=request.prompt + output, sampling=left, forced=())
