"""An answer as blocks: thinking, text, calls; whole in the end, or told by the events of a stream."""

from __future__ import annotations

import uuid
from typing import Any

from jdisagg.core.events import Finish
from jdisagg.serve.http.errors import describe, in_messages
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.http.messages.body import MessagesBody
from jdisagg.serve.logprobs import TokenNames
from jdisagg.serve.offload import dump
from jdisagg.serve.text import Piece
from jdisagg.serve.tools.said import Call, json_value

Event = dict[str, Any]
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
REASONS = {"length": "max_tokens"}  # as "stop" and "tool_calls" end, a block and a stop sequence tell


class Blocks:
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
    """Implements `Rendering`, of one choice."""

    def __init__(self, body: MessagesBody, job: Job, names: TokenNames, fingerprint: str) -> None:
        self.job, self._stops = job, frozenset(job.options.stop)
        self._blocks, self._begun, self._tokens = Blocks(job.shows_reasoning), False, 0
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

    async def opening(self, index: int, piece: Piece) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return _event({"type": "message_start", "message": self._message()})

    def chunk(self, index: int, piece: Piece) -> bytes:
        return b"".join(map(_event, self._take(piece)))

    def closing(self) -> bytes:
        return _event({"type": "message_delta", **self._ending()}) + _event({"type": "message_stop"})

    def broken(self, error: Exception) -> bytes:
        ends = b"".join(map(_event, self._blocks.end()))
        return ends + _event(in_messages(*describe(error)))

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


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {dump(event)}\n\n".encode()
