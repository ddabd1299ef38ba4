"""What `POST /v1/messages` takes, and what of it is refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from jdisagg.core.errors import RequestError
from jdisagg.core.events import Finish
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.errors import MESSAGES, MessagesError, describe, documented, in_messages
from jdisagg.serve.frontends.http.front import Front
from jdisagg.serve.frontends.http.jobs import Job, chat_job, check_model
from jdisagg.serve.frontends.http.rendering import RendererOf, StreamEvent
from jdisagg.serve.frontends.http.schema import (
    INT32,
    MAX_MESSAGES,
    REFUSED,
    ChatBody,
    DrawingFields,
    Refusals,
    brief,
    takes,
    valid,
)
from jdisagg.serve.frontends.text import Piece, TokenNames, dump
from jdisagg.serve.frontends.tools.asked import CHOICE_AUTO, NONE, REQUIRED
from jdisagg.serve.frontends.tools.parser import Call, json_value

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


# A body of `/v1/messages` as one of chat: blocks are texts, calls and what came of calls.

ROLES = ("user", "assistant", "system")
CHOICES = {"auto": CHOICE_AUTO, "any": REQUIRED, "none": NONE}


def chat_body_of(body: CountBody) -> ChatBody:
    """Raises RequestError naming the block, tool or field at fault."""
    drawn = {name: getattr(body, name) for name in body.model_fields_set & DrawingFields.model_fields.keys()}
    fields = drawn | {"messages": [*_system(body.system), *_messages(body)]}
    if body.tools:
        fields["tools"] = [_tool(each, index) for index, each in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    fields |= _thinking(body)
    if body.output_config is not None:
        fields |= _output(body.output_config.format, body.output_config.effort)
    if isinstance(body, MessagesBody):
        fields |= {"max_completion_tokens": body.max_tokens, "stream": body.stream}
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    return valid(ChatBody, fields)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _messages(body: CountBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, turn in enumerate(body.messages):
        place = f"messages.{index}"
        if turn.role not in ROLES:
            said = f"{place}.role is {brief(turn.role)}, must be one of {', '.join(ROLES)}"
            raise RequestError(said, param=f"{place}.role")
        if isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            found.append(_said(turn.content, f"{place}.content"))
        else:
            found += _asked(turn.role, turn.content, f"{place}.content")
    return found


def _said(blocks: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """An earlier answer: what it thought, said and called."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(_field(block, "thinking", f"{place}.{number}"))
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_block_text(block, f"{place}.{number}"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def _asked(role: str, blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """What came of calls first, each a message of its own, then what the user says to it."""
    found, texts = list[dict[str, Any]](), list[str]()
    for number, block in enumerate(blocks):
        at = f"{place}.{number}"
        if block.get("type") == "tool_result":
            content = _text(block.get("content") or "", f"{at}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(_block_text(block, at))
    return [*found, {"role": role, "content": "".join(texts)}] if texts or not found else found


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} is {brief(content)}, must be a text or blocks of text", param=place)
    return "".join(_block_text(block, f"{place}.{number}") for number, block in enumerate(content))


def _block_text(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else block
    if kind != "text":
        raise RequestError(f"{place} is a block of type {brief(kind)}, only text is supported", param=place)
    return _field(block, "text", place)


def _field(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    raise RequestError(f"{place}.{name} is {brief(value)}, must be a text", param=f"{place}.{name}")


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        said = f"tools.{index}.type is {brief(tool['type'])}, only tools of your own are supported"
        raise RequestError(said, param=f"tools.{index}.type")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": function | described}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    if kind not in CHOICES:
        raise RequestError(f"tool_choice.type is {brief(kind)}, must be auto, any, tool or none", "tool_choice.type")
    return {"tool_choice": CHOICES[kind], **parallel}


def _thinking(body: CountBody) -> dict[str, Any]:
    """Whether templates that can do both ask for thoughts; how many is the model's own affair."""
    if body.thinking is None:
        return {"chat_template_kwargs": body.chat_template_kwargs}
    thinks = body.thinking.get("type") != "disabled"
    variables = {"enable_thinking": thinks, **(body.chat_template_kwargs or {})}
    return {"chat_template_kwargs": variables, "include_reasoning": thinks}


def _output(form: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if not form:
        return found
    if form.get("type") != "json_schema":
        said = f"output_config.format.type is {brief(form.get('type'))}, must be json_schema"
        raise RequestError(said, param="output_config.format.type")
    return {**found, "response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}


# An answer as blocks: thinking, text, calls; whole in the end, or told by the events of a stream.

Event = dict[str, Any]
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
REASONS = {"length": "max_tokens"}  # as "stop" and "tool_calls" end, a block and a stop sequence tell


class BlockRenderer:
    """The blocks so far; every change is told as the events that tell it."""

    def __init__(self, shows_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking, self._open = shows_thinking, False

    @property
    def called(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def take(self, piece: Piece) -> list[Event]:
        found: list[Event] = []
        if piece.reasoning and self._shows_thinking:
            found += self._add("thinking", piece.reasoning)
        if piece.text:
            found += self._add("text", piece.text)
        for call in piece.calls:
            found += [*self.end(), *self._call(call)]
        return found

    def _add(self, kind: str, text: str) -> list[Event]:
        found: list[Event] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            found += self.end()
            self.blocks.append(dict(EMPTY[kind]))
            found.append(self._told("start", content_block=EMPTY[kind]))
            self._open = True
        self.blocks[-1][kind] += text
        return [*found, self._told("delta", delta={"type": f"{kind}_delta", kind: text})]

    def end(self) -> list[Event]:
        """The open block is whole."""
        was, self._open = self._open, False
        return [self._told("stop")] if was else []

    def _call(self, call: Call) -> list[Event]:
        begun = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": {}}
        self.blocks.append({**begun, "input": json_value(call.arguments)})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [self._told("start", content_block=begun), self._told("delta", delta=delta), self._told("stop")]

    def _told(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self.blocks) - 1, **fields}


class MessageRenderer:
    """A renderer of one choice as a message."""

    stream_end = b""

    def __init__(self, body: MessagesBody, job: Job, names: TokenNames, fingerprint: str) -> None:
        self.job, self._stops = job, frozenset(job.options.stop)
        self._blocks, self._begun, self._tokens = BlockRenderer(job.shows_reasoning), False, 0
        self._last: Piece | None = None

    @property
    def finish(self) -> Finish | None:
        return None if self._last is None else self._last.finish

    def _take(self, piece: Piece) -> list[Event]:
        self._tokens += len(piece.delta.sampled)
        found = self._blocks.take(piece)
        if piece.finish_reason is not None:
            self._last = piece
            found += self._blocks.end()
        return found

    async def gather(self, index: int, piece: Piece) -> None:
        self._take(piece)

    async def opening(self, index: int, piece: Piece) -> list[StreamEvent]:
        if self._begun:
            return []
        self._begun = True
        return [_event({"type": "message_start", "message": self._message()})]

    def chunk(self, index: int, piece: Piece) -> list[StreamEvent]:
        return [*map(_event, self._take(piece))]

    def closing(self) -> list[StreamEvent]:
        return [_event({"type": "message_delta", **self._ending()}), _event({"type": "message_stop"})]

    def broken(self, error: Exception) -> list[StreamEvent]:
        return [*map(_event, self._blocks.end()), _event(in_messages(*describe(error)))]

    def whole(self) -> dict[str, Any]:
        ending = self._ending()
        return {**self._message(), "content": self._blocks.blocks, **ending["delta"], "usage": ending["usage"]}

    def _message(self) -> dict[str, Any]:
        """As it begins."""
        named = {"id": self.job.public_id, "type": "message", "role": "assistant", "model": self.job.model}
        ends = {"stop_reason": None, "stop_sequence": None}
        return {**named, "content": [], **ends, "usage": {"input_tokens": self.job.prompt_tokens, "output_tokens": 0}}

    def _ending(self) -> dict[str, Any]:
        finish, last = self.finish, self._last
        cached = finish.ledger.cached_tokens if finish is not None else 0
        stop = last.stop_reason if last is not None and last.stop_reason in self._stops else None
        reason = REASONS.get(last.finish_reason or "", "end_turn") if last is not None else None
        if reason == "end_turn":
            reason = "tool_use" if self._blocks.called else "stop_sequence" if stop is not None else reason
        usage = {
            "input_tokens": self.job.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._tokens,
        }
        return {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": usage}


def _event(event: Event) -> StreamEvent:
    return event["type"], dump(event).encode()


# The routes of the Messages API.

COUNTS = documented(400, 401, 404, 408, 413, body=MessagesError)
ANSWERS = documented(400, 401, 404, 408, 413, 429, 503, body=MessagesError)


async def _prepare(front: Front, body: MessagesBody, name: str) -> tuple[Job, RendererOf]:
    job = await chat_job(chat_body_of(body), front.service, front.settings, name, "msg_")
    return job, partial(MessageRenderer, body)


def add_messages(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post(MESSAGES, openapi_extra=takes(MessagesBody), responses=ANSWERS)
    async def messages(request: Request) -> Response:
        """The answer to messages, as Anthropic's clients ask for it; the key may come as `x-api-key`."""
        return await front.answer(request, MessagesBody, _prepare)

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=takes(CountBody), responses=COUNTS)
    async def count_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the same messages would be."""
        body = await front.body(request, CountBody)
        check_model(body.model, service, settings)
        ids = await chat_ids(chat_body_of(body), service.tokenizer, service.max_model_len, False)
        return {"input_tokens": len(ids)}
