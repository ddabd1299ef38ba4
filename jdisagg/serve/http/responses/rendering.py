"""An answer as items: reasoning, a message, calls; whole in the end, or told by the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.events import Finish
from jdisagg.serve.http.errors import describe
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.http.responses.body import ResponsesBody
from jdisagg.serve.logprobs import TokenNames, chat_logprobs
from jdisagg.serve.offload import dump
from jdisagg.serve.text import Piece
from jdisagg.serve.tools.said import Call

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
    """Implements `Rendering`, of one choice."""

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

    async def opening(self, index: int, piece: Piece) -> bytes:
        if self._number:
            return b""
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": begun}) for kind in kinds)

    def chunk(self, index: int, piece: Piece) -> bytes:
        return b"".join(map(self._event, self._take(piece)))

    def closing(self) -> bytes:
        status = self._status()
        return self._event({"type": f"response.{status}", "response": self._response(status)})

    def broken(self, error: Exception) -> bytes:
        """A `response.failed`, of what had come."""
        ends = self._output.end("incomplete")
        told = describe(error)[1]["error"]
        code = told["code"] if told["type"] == "invalid_request_error" else "server_error"
        failed = {**self._response("failed"), "error": {"code": code, "message": told["message"]}}
        return b"".join(map(self._event, [*ends, {"type": "response.failed", "response": failed}]))

    def _event(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: {dump(numbered)}\n\n".encode()

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
