"""What `POST /v1/messages` takes, and what of it is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from jdisagg.serve.http.schema import INT32, MAX_MESSAGES, REFUSED, DrawingFields, Refusals

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Turn(BaseModel):
    """One message: a text, or blocks."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | Blocks


class OutputFields(BaseModel):
    """`format` is a JSON schema the answer is held to; `effort` a variable of the model's template."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountBody(DrawingFields, BaseModel):
    """`POST /v1/messages/count_tokens`."""

    refused: ClassVar[Refusals] = {
        **{name: values for name, values in REFUSED.items() if name not in ("tools", "tool_choice", "functions")},
        "container": (),
        "context_management": (),
        "mcp_servers": (),
    }

    n: Annotated[int, Field(ge=1, le=1)] | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, BaseModel):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
