"""What `POST /v1/responses` takes, and what of it is refused."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from jdisagg.core.errors import RequestError
from jdisagg.core.events import Finish
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.errors import describe, documented
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
from jdisagg.serve.frontends.text import Piece, TokenNames, chat_logprobs, dump
from jdisagg.serve.frontends.tools.parser import Call

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


# An answer as items: reasoning, a message, calls; whole in the end, or told by the events of a stream.

Event = dict[str, Any]
MESSAGE, REASONING = "message", "reasoning"
PARTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
PREFIXES = {MESSAGE: "msg_", REASONING: "rs_"}
NO_LIMIT = {"format": {"type": "text"}}


@dataclass(slots=True)
class Output:
    """The items so far; every change is told as the events that tell it."""

    shows_reasoning: bool
    logprobs: bool
    items: list[dict[str, Any]] = field(default_factory=list)
    _part: dict[str, Any] | None = None  # of the last item, while more of it may come
    _scores: list[dict[str, Any]] = field(default_factory=list)  # of tokens whose text is still to come

    def take(self, piece: Piece, scores: Sequence[dict[str, Any]]) -> list[Event]:
        self._scores += scores
        found: list[Event] = []
        if piece.reasoning:
            self._scores.clear()
            if self.shows_reasoning:
                found += self._add(REASONING, piece.reasoning)
        if piece.text:
            found += self._add(MESSAGE, piece.text)
        for call in piece.calls:
            found += [*self.end("completed"), *self._call(call)]
        return found

    def _add(self, kind: str, text: str) -> list[Event]:
        found: list[Event] = []
        if self._part is None or self.items[-1]["type"] != kind:
            found += [*self.end("completed"), *self._begin(kind)]
        assert self._part is not None
        self._part["text"] += text
        more: dict[str, Any] = {}
        if kind == MESSAGE:
            more["logprobs"], self._scores = self._scores, []
            self._part["logprobs"] += more["logprobs"]
        return [*found, self._told(f"response.{PARTS[kind]}.delta", content_index=0, delta=text, **more)]

    def _begin(self, kind: str) -> list[Event]:
        item: dict[str, Any] = {"id": PREFIXES[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": PARTS[kind], "text": ""}
        if kind == MESSAGE:
            item["role"], part = "assistant", part | {"annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": self._last, "item": {**item, "content": []}}
        self._part, item["content"] = part, [part]
        return [added, self._told("response.content_part.added", content_index=0, part=_copy(part))]

    def end(self, status: str) -> list[Event]:
        """The open item is whole, or cut short."""
        part, self._part = self._part, None
        if part is None:
            return []
        item = self.items[-1]
        item["status"] = status
        more: dict[str, Any] = {}
        if item["type"] == MESSAGE:
            part["logprobs"] += self._scores
            self._scores = []
            more["logprobs"] = part["logprobs"]
        return [
            self._told(f"response.{part['type']}.done", content_index=0, text=part["text"], **more),
            self._told("response.content_part.done", content_index=0, part=_copy(part)),
            {"type": "response.output_item.done", "output_index": self._last, "item": item},
        ]

    def _call(self, call: Call) -> list[Event]:
        names = {"id": "fc_" + uuid.uuid4().hex, "type": "function_call", "call_id": "call_" + uuid.uuid4().hex[:24]}
        item = {**names, "name": call.name, "arguments": call.arguments, "status": "completed"}
        self.items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "output_index": self._last, "item": begun},
            self._told("response.function_call_arguments.delta", delta=call.arguments),
            self._told("response.function_call_arguments.done", name=call.name, arguments=call.arguments),
            {"type": "response.output_item.done", "output_index": self._last, "item": item},
        ]

    @property
    def _last(self) -> int:
        return len(self.items) - 1

    def _told(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": self._last, **fields}


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}


class ResponseRenderer:
    """A renderer of one choice as a response."""

    stream_end = b""

    def __init__(self, body: ResponsesBody, job: Job, names: TokenNames, fingerprint: str) -> None:
        self.job, self.finish = job, None
        self._body, self._names, self._number = body, names, 0
        self._output = Output(job.shows_reasoning, job.logprobs)
        self._tokens = self._thought_tokens = 0
        self._piece: Piece | None = None  # the last one
        self.finish: Finish | None

    # ------------------------------------------------------------ from pieces

    def _take(self, piece: Piece) -> list[Event]:
        drawn = piece.delta.sampled
        self._tokens += len(drawn)
        scores = chat_logprobs(self._names, drawn)["content"] if self.job.logprobs and drawn else []
        if piece.reasoning and not piece.text and not piece.calls:
            self._thought_tokens = self._tokens
        found = self._output.take(piece, scores)
        if piece.finish_reason is not None:
            self._piece, self.finish = piece, piece.finish
            found += self._output.end("completed" if self._status() == "completed" else "incomplete")
        return found

    async def gather(self, index: int, piece: Piece) -> None:
        self._take(piece)

    async def opening(self, index: int, piece: Piece) -> list[StreamEvent]:
        if self._number:
            return []
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event({"type": kind, "response": begun}) for kind in kinds]

    def chunk(self, index: int, piece: Piece) -> list[StreamEvent]:
        return [*map(self._event, self._take(piece))]

    def closing(self) -> list[StreamEvent]:
        status = self._status()
        return [self._event({"type": f"response.{status}", "response": self._response(status)})]

    def broken(self, error: Exception) -> list[StreamEvent]:
        """A `response.failed`, of what had come."""
        ends = self._output.end("incomplete")
        told = describe(error)[1]["error"]
        code = told["code"] if told["type"] == "invalid_request_error" else "server_error"
        failed = {**self._response("failed"), "error": {"code": code, "message": told["message"]}}
        return [*map(self._event, [*ends, {"type": "response.failed", "response": failed}])]

    def _event(self, event: Event) -> StreamEvent:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return event["type"], dump(numbered).encode()

    # ------------------------------------------------------------ the whole

    def whole(self) -> dict[str, Any]:
        return self._response(self._status())

    def _status(self) -> str:
        cut = self._piece is not None and self._piece.finish_reason == "length"
        return "incomplete" if cut else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body, begun = self._body, status == "in_progress"
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        drawn = self.job.choices[0].request.sampling
        return {
            "id": self.job.public_id,
            "object": "response",
            "created_at": self.job.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": short,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.job.model,
            "output": [] if begun else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": drawn.temperature,
            "text": NO_LIMIT if body.text is None or body.text.format is None else {"format": body.text.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": drawn.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if begun else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        given, drawn = self.job.prompt_tokens, self._tokens
        cached = self.finish.ledger.cached_tokens if self.finish is not None else 0
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": given + drawn,
        }


# A body of `/v1/responses` as one of chat: its items are messages, its tools and its format are spelt otherwise.

ROLES = ("system", "developer", "user", "assistant")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "refusal": "refusal"}
LOGPROBS = "message.output_text.logprobs"  # of `include`
SAME = ("parallel_tool_calls", "chat_template_kwargs")  # in both bodies


def chat_body_of(body: ResponsesBody) -> ChatBody:
    """Raises RequestError naming the item, tool or field at fault."""
    drawn = {name: getattr(body, name) for name in body.model_fields_set & DrawingFields.model_fields.keys()}
    fields = drawn | {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields |= {"messages": _messages(body), "stream": body.stream, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [_tool(each, index) for index, each in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return valid(ChatBody, fields | _truncation(body.truncation))


def _truncation(asked: str | None) -> dict[str, Any]:
    if asked in (None, "disabled"):
        return {}
    if asked == "auto":
        return {"truncate_prompt_tokens": -1}
    raise RequestError(f"truncation is {brief(asked)}, must be auto or disabled", param="truncation")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    thought = ""
    for index, item in enumerate(body.input):
        place, kind = f"input.{index}", item.get("type", "message")
        if kind == "reasoning":
            thought += _text(item.get("content") or [], f"{place}.content")
            continue
        message = _message(item, kind, place)
        if kind == "function_call" and found and found[-1]["role"] == "assistant" and not thought:
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        found.append(message)
    if not found:
        raise RequestError(f"input has {len(body.input)} items, none of which says anything", param="input")
    return found


def _message(item: Mapping[str, Any], kind: Any, place: str) -> dict[str, Any]:
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{place}.role is {brief(role)}, must be one of {', '.join(ROLES)}", f"{place}.role")
        return {"role": role, "content": _text(item.get("content"), f"{place}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    known = "message, function_call, function_call_output or reasoning"
    raise RequestError(f"{place}.type is {brief(kind)}, must be {known}", param=f"{place}.type")


def _text(content: Any, place: str) -> str:
    """All parts joined. Raises RequestError for one that is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{place} is {brief(content)}, must be a text or parts of text", param=place)
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            said = f"{place}.{number} is {brief(part if kind is None else kind)}, only text is supported"
            raise RequestError(said, param=f"{place}.{number}")
        texts.append(text)
    return "".join(texts)


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        said = f"tools.{index}.type is {brief(tool.get('type'))}, only functions are supported"
        raise RequestError(said, param=f"tools.{index}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RequestError(
            f"tool_choice is {brief(choice.get('type'))}, must be none, auto, required or a function", "tool_choice"
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(asked: Mapping[str, Any]) -> dict[str, Any]:
    kind = asked.get("type")
    if kind != "json_schema":
        return dict(asked)
    return {"type": kind, "json_schema": {name: value for name, value in asked.items() if name != "type"}}


# The routes of the Responses API.

COUNTS = documented(400, 401, 404, 408, 413)
ANSWERS = documented(400, 401, 404, 408, 413, 429, 503)


async def prepare_response(front: Front, body: ResponsesBody, name: str) -> tuple[Job, RendererOf]:
    job = await chat_job(chat_body_of(body), front.service, front.settings, name, "resp_")
    return job, partial(ResponseRenderer, body)


def add_responses(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post("/v1/responses", openapi_extra=takes(ResponsesBody), responses=ANSWERS)
    async def responses(request: Request) -> Response:
        """Items in, items out, as OpenAI has them. Nothing is kept: a conversation goes on by its items in `input`."""
        return await front.answer(request, ResponsesBody, prepare_response)

    @app.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesBody), responses=COUNTS)
    async def input_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the same body would be."""
        body = await front.body(request, ResponsesBody)
        check_model(body.model, service, settings)
        ids = await chat_ids(chat_body_of(body), service.tokenizer, service.max_model_len, False)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}
