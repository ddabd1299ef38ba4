"""The JSON bodies clients send: field names, types and bounds, and the fields that are known but refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jdisagg.core.errors import RequestError

INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=-1, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]

# Known fields that this server cannot honour, with the values that ask for nothing (null and empty always do).
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": (),
    "ebnf": (),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "lora_path": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "session_params": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "web_search_options": (),
}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the counts. `continuous_usage_stats`: the counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(BaseModel):
    """What completions and chat share. Ranges of sampling numbers are those of `SamplingParams.check`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] = 0
    request_id: str | None = None
    ledger: bool = False
    user: str | None = None


class CompletionBody(GenerationFields):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Count | None = None


class ChatMessage(BaseModel):
    """One message; what else it holds goes to the model's template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # a variable of the template


class ChatBody(GenerationFields, ChatFields):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a `prompt`, or `messages` as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], raw: bytes) -> Body:
    """The body as `kind`. Raises RequestError naming the first field at fault; unknown fields are ignored."""
    try:
        fields = pydantic_core.from_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the body is a JSON {type(fields).__name__}, not an object")
    refuse(fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_mistake(error) from error


def refuse(fields: Mapping[str, Any]) -> None:
    """Raises RequestError for a field that asks for what this server does not do yet."""
    for name in fields.keys() & REFUSED.keys():
        value = fields[name]
        if value is None or value in ("", [], {}) or value in REFUSED[name]:
            continue
        raise RequestError(f"{name} is not supported yet; it was {str(value)[:100]!r}", param=name)


def _first_mistake(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    given = "" if first["type"] == "missing" else f" (it was {str(first['input'])[:100]!r})"
    return RequestError(f"{place or 'body'}: {first['msg']}{given}", param=param)
