"""The JSON bodies clients send: field names, types and bounds, and the fields that are known but refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from jdisagg.core.errors import RequestError
from jdisagg.core.request import (
    LONGEST_OBJECTIVE_S,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    PARAMETERS,
    ParameterRoute,
    ParameterSpec,
)

# How large a JSON body may be in the number of its values, found by counting bytes before any value is made.
#
# A body of four megabytes may hold 1.4 million empty objects. To make them, and to find each of them wrong, holds
# the interpreter for seconds, and every other client waits; to count their commas takes milliseconds.

COMMA, QUOTE = ord(","), ord('"')
NESTING = b"[{:"  # what makes a list, an object, or a field of one
SHOWN = 100  # characters of a value that an error repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one body: values in all (about ten million a second), and lists, objects and fields (a million a second)."""

    values: int = 131_072
    nested: int = 16_384

    def with_room_for(self, tokens: int) -> Limits:
        """So many values more, for a model whose longest prompt has more token ids."""
        return replace(self, values=self.values + tokens)


LIMITS = Limits()


def read_object(raw: bytes, limits: Limits = LIMITS) -> dict[str, Any]:
    """The fields of a JSON object within `limits`. Raises RequestError."""
    check_counts(raw, limits)
    try:
        fields = pydantic_core.from_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the body is a JSON {type(fields).__name__}, not an object")
    return fields


def check_counts(raw: bytes, limits: Limits) -> None:
    """Raises RequestError with both numbers where `raw` has more values than `limits` let by."""
    values, nested = raw.count(b","), _count(raw, NESTING)
    if values <= limits.values and nested <= limits.nested:
        return
    outside = _outside_strings(raw)
    values = int(np.count_nonzero(outside == COMMA)) + 1
    nested = sum(int(np.count_nonzero(outside == each)) for each in NESTING)
    if values > limits.values:
        raise RequestError(f"the body has {values} values, at most {limits.values} are allowed")
    if nested > limits.nested:
        raise RequestError(f"the body has {nested} lists, objects and fields, at most {limits.nested} are allowed")


def _count(raw: bytes, which: bytes) -> int:
    return sum(raw.count(bytes([each])) for each in which)


def _outside_strings(raw: bytes) -> np.ndarray:
    """uint8 of the bytes that are in no JSON string; the quotes that open them are among them."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left escaped ends no string
    text = np.frombuffer(raw, np.uint8)
    return text[np.cumsum(text == QUOTE, dtype=np.uint8) % 2 == 0]  # wraps at 256, which is even


def brief(value: Any) -> str:
    """What a client sent, as an error may repeat it: never longer than a line, never slow to write."""
    if isinstance(value, str):
        return repr(value[:SHOWN])
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python writes no number of more than 4,300 digits
    return repr(value)[:SHOWN]


INT32 = 2**31 - 1
MAX_MESSAGES = 4096
SHOWN_PROBLEMS = 3  # of all that a body has


def _few(value: Any) -> Any:
    """A large object is refused before its entries are looked at: each wrong one would be an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"it has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    return value


# Every list stops at its first wrong item: a million errors cost seconds.
Count = Annotated[int, Field(ge=-1, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objective = Annotated[float, Field(gt=0, le=LONGEST_OBJECTIVE_S)]
Biases = Annotated[dict[str, float], BeforeValidator(_few)]

# Known fields that this server cannot honour, with the values that ask for nothing (null and empty always do).
Refusals = Mapping[str, tuple[Any, ...]]
REFUSED: Refusals = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),  # but in completions
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "documents": (),
    "extra_key": (),
    "function_call": ("none",),
    "functions": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "lora_path": (),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "session_params": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),  # but in chat
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "web_search_options": (),
}


# Known fields that change nothing here, and why they may be let by. What neither list has is let by as well.
IGNORED: Mapping[str, str] = {
    "access_programs": "OpenAI's own accounts",
    "background_options": "nothing runs in the background",
    "cache_control": "prompts are cached without being asked",
    "diagnostics": "Anthropic's own",
    "image": "there are no images",
    "inference_geo": "there is one place",
    "media_io_kwargs": "there is text alone",
    "metadata": "for the client's own books; responses repeat it",
    "mm_processor_kwargs": "there is text alone",
    "prompt_cache_key": "prompts are cached by content; `cache_salt` keeps tenants apart",
    "prompt_cache_options": "so",
    "prompt_cache_retention": "so",
    "rid": "`request_id`, or the header x-request-id, names a request",
    "safety_identifier": "as `user`",
    "service_tier": "there is one; `priority` goes before others",
    "session_id": "a conversation goes where its KV lies",
    "speed": "there is one",
    "store": "nothing is kept",
    "user": "for the client's own books",
    "user_profile_id": "as `user`",
    "verbosity": "the model has no such switch",
    "workspace_id": "Anthropic's own",
}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the counts. `continuous_usage_stats`: the counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class FormFields(BaseModel):
    """What form an answer is to have, as OpenAI, vLLM and SGLang spell it; see `structured/forms.py`."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


# The sampling parameters of HTTP bodies, made from the table in `core/request.py`. Ranges of numbers are checked with
# the request, so that every interface refuses them in the same words.

SPELLINGS: Mapping[str, Any] = {  # types that JSON has and the table does not
    "logit_bias": Biases,
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "stop": str | Texts,
    "stop_token_ids": Annotated[list[TokenId], Field(fail_fast=True)],
}


def _field_of(name: str, spec: ParameterSpec) -> tuple[Any, Any]:
    """Returns the type and the default of a body's field; None is the default of each that may be left out."""
    if spec.kind is bool and not spec.is_optional:
        return bool, spec.default
    count: Any = Annotated[int, Field(ge=spec.body_low, le=spec.body_high)]
    kind: Any = SPELLINGS.get(name, count if spec.kind is int else spec.kind)
    return kind | None, None


def _fields_of(route: ParameterRoute) -> dict[str, Any]:
    return {name: _field_of(name, spec) for name, spec in PARAMETERS.items() if spec.route is route}


class ModelFields(BaseModel):
    """The model that a body asks for."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None


SamplingFields = create_model("SamplingFields", __base__=ModelFields, **_fields_of(ParameterRoute.EVERY_BODY))


class DrawingFields(SamplingFields):
    """The sampling parameters and the scheduling of a request: fields of every body that asks for an answer."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    ttft_s: Objective | None = None  # the objective: seconds to the first token
    tpot_s: Objective | None = None  # the objective: mean seconds between tokens
    request_id: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    user: str | None = None


LengthFields = create_model("LengthFields", __base__=DrawingFields, **_fields_of(ParameterRoute.GENERATION))


class GenerationFields(FormFields, LengthFields):
    """The fields that completions and chat share."""

    truncate_prompt_tokens: Count | None = None  # its last tokens that are kept; -1: as many as the model takes
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ledger: bool = False


ScoredFields = create_model("ScoredFields", __base__=GenerationFields, **_fields_of(ParameterRoute.COMPLETIONS))


class CompletionBody(ScoredFields):
    """`POST /v1/completions`: the body of the request."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class PoolingFields(BaseModel):
    """The fields of every body that asks for pooled states of texts."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    pooling: Literal["last", "mean"] | None = None  # null: as --embeddings says
    truncate_prompt_tokens: Count | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    request_id: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    user: str | None = None


class ChatMessage(BaseModel):
    """One message; what else it holds goes to the model's template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: Messages
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # a variable of the template


class ChatBody(GenerationFields, ChatFields):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a `prompt`, or `messages` as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class CacheBody(BaseModel):
    """`POST /debug/cache`."""

    prompt: str | TokenIds
    cache_salt: Annotated[str, Field(max_length=256)] = ""


class DrainBody(BaseModel):
    """POST /admin/workers/ID/drain."""

    model_config = ConfigDict(extra="forbid")
    drain_s: float = Field(30.0, ge=0, le=3600, description="what runs there may take so long to end")


class RoleBody(DrainBody):
    """POST /admin/workers/ID/role."""

    role: str = Field(description="prefill, decode or colocated")
    mesh: str = Field("", description="how its devices are cut, as tp2, pp2 or pp2tp2; empty: as at the start")


class LoadAdapterBody(BaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=128, description="what clients ask for as `model`")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, as every process finds it")
    load_inplace: bool = Field(False, description="another adapter of this name gives way to it")


class UnloadAdapterBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_int_id: int | None = Field(None, description="not read")


BODIES: tuple[type[BaseModel], ...] = (
    *(CompletionBody, ChatBody, TokenizeBody, DetokenizeBody),
    *(CacheBody, DrainBody, RoleBody, LoadAdapterBody, UnloadAdapterBody),
)


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI: the body is read by hand (size, key, our own errors), so its schema is named by hand."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], raw: bytes, limits: Limits = LIMITS) -> Body:
    """The body as `kind`; unknown fields are ignored.

    Raises RequestError: over the limits before anything is read, else naming the first few fields at fault.
    """
    fields = read_object(raw, limits)
    asked = {name: value for name, value in fields.items() if name not in kind.model_fields}
    refuse(asked, getattr(kind, "refused", REFUSED))
    return valid(kind, fields)


def valid(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """`fields` as `kind`. Raises RequestError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _mistakes(error) from error


def refuse(fields: Mapping[str, Any], refused: Refusals = REFUSED) -> None:
    """Raises RequestError for a field that asks for what this server does not do yet."""
    for name in fields.keys() & refused.keys():
        value = fields[name]
        if value is None or value in ("", [], {}) or value in refused[name]:
            continue
        raise RequestError(f"{name} is not supported yet; it was {brief(value)}", param=name)


def _mistakes(error: ValidationError) -> RequestError:
    """The first few problems, and how many there are; `param` is the first one's field."""
    problems = error.errors(include_url=False)
    told = [_told(each) for each in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        told.append(f"these are {SHOWN_PROBLEMS} of {len(problems)} problems")
    place = problems[0]["loc"]
    return RequestError("; ".join(told), param=str(place[0]) if place else None)


def _told(problem: Any) -> str:
    place = ".".join(str(part)[:40] for part in problem["loc"])
    given = "" if problem["type"] == "missing" else f" (it was {brief(problem['input'])})"
    return f"{place or 'body'}: {problem['msg'][:200]}{given}"
