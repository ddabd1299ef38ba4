"""What `POST /v1/responses` takes, and what of it is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from jdisagg.serve.http.schema import INT32, MAX_MESSAGES, REFUSED, DrawingFields, Refusals

Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TextFields(BaseModel):
    """`format` is as chat's `response_format`, in one level; `verbosity` changes nothing."""

    format: dict[str, Any] | None = None


class ReasoningFields(BaseModel):
    """`effort` is a variable of the model's template; summaries are not made."""

    effort: str | None = None


class ResponsesBody(DrawingFields, BaseModel):
    """`POST /v1/responses`; nothing of it is kept, whatever `store` says."""

    refused: ClassVar[Refusals] = {
        **{name: values for name, values in REFUSED.items() if name not in ("tools", "tool_choice", "functions")},
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
        "prompt": (),
    }

    n: Annotated[int, Field(ge=1, le=1)] | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=INT32)] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
