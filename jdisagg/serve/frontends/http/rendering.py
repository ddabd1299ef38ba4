"""Answers as JSON: whole ones as dictionaries, streamed ones as bytes around a skeleton that is made once a choice."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import Finish
from jdisagg.core.request import Sampled
from jdisagg.serve.driver.local_service import AnswerFailed, Batch, answers, failure_of
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.errors import allowance_headers, describe
from jdisagg.serve.frontends.http.jobs import Job
from jdisagg.serve.frontends.text import (
    SLICE,
    Piece,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    dump,
    dump_slowly,
    event,
    prompt_logprobs,
)
from jdisagg.serve.frontends.tools.parser import Call
from jdisagg.serve.frontends.tools.told import told
from jdisagg.serve.observability.records import ledger_json

HOLE = "\x00hole\x00"  # where a chunk's text goes
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """What is known so far of one choice."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None  # of the output so far
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    echo_logprobs: dict[str, Any] | None = None
    last: Piece | None = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    offset: int = 0  # characters of text that logprobs cover, for text_offset

    @property
    def finish(self) -> Finish | None:
        return self.last.finish if self.last is not None else None


class Renderer:
    """Renders one job. Chunks are made in order: offsets and counts go on from one to the next."""

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        self.job, self.answers = job, [Answer() for _ in job.choices]
        self._names = names
        self._head = {
            "id": job.public_id,
            "object": _object_of(job),
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint,
        }
        self._skeletons: dict[int, tuple[bytes, bytes]] = {}
        self._plain = not (job.logprobs or job.token_ids or job.usage_everywhere)

    # ------------------------------------------------------------ counts

    @property
    def finish(self) -> Finish | None:
        return self.answers[0].finish

    def usage(self) -> dict[str, Any]:
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.job.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def _cached_tokens(self) -> int:
        """Of each prompt as its first choice found it, as far as it has ended."""
        firsts = (answer for answer, each in zip(self.answers, self.job.choices, strict=True) if each.first_of_prompt)
        return sum(answer.finish.ledger.cached_tokens for answer in firsts if answer.finish is not None)

    def _noted(self, index: int, piece: Piece) -> Piece:
        """The piece, its end kept; without the drawn token where only the prompt was asked for."""
        if self.job.prompt_only:
            reason = piece.finish_reason if piece.finish_reason in (None, "abort") else "length"
            piece = replace(
                piece, text="", delta=replace(piece.delta, sampled=()), finish_reason=reason, stop_reason=None
            )
        if piece.finish_reason is not None:
            self.answers[index].last = piece
        return piece

    # ------------------------------------------------------------ streams

    async def opening(self, index: int, piece: Piece) -> bytes:
        """What comes before a choice's first chunk, of which `piece` is made, and nothing later.

        The role in chat, the prompt where it is to be echoed.
        """
        if index in self._skeletons:
            return b""
        self._skeletons[index] = self._skeleton(index)
        if self.job.chat:
            delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            return event(dump(self._chunk_of(index, self._prompt_ids(index) | delta)))
        if not self.job.echo:
            return b""
        await self._read_prompt(index, piece.delta.prompt)
        fields = {"logprobs": self.answers[index].echo_logprobs, "finish_reason": None}
        return event(await dump_slowly(self._chunk_of(index, {"text": self.job.choices[index].prompt.text} | fields)))

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The event of one piece; b"" where it shows nothing (half a character)."""
        piece, answer = self._noted(index, piece), self.answers[index]
        answer.num_tokens += len(piece.delta.sampled)
        if piece.finish_reason is None and self._plain and not (piece.reasoning or piece.calls):
            if not piece.text:
                return b""
            head, tail = self._skeletons[index]
            return head + json.dumps(piece.text).encode() + tail
        return self._full_chunk(index, piece)

    def _skeleton(self, index: int) -> tuple[bytes, bytes]:
        whole = event(dump(self._chunk_of(index, self._delta(index, Piece(HOLE)) | self._ending(None))))
        head, _, tail = whole.rpartition(dump(HOLE).encode())
        return head, tail

    def _full_chunk(self, index: int, piece: Piece) -> bytes:
        shown = piece.text or piece.calls or piece.finish_reason or (piece.reasoning and self.job.shows_reasoning)
        if not (shown or (piece.delta.sampled and not self._plain)):
            return b""
        fields = self._delta(index, piece) | self._ending(piece)
        fields["logprobs"] = self._logprobs(index, piece.delta.sampled)
        if self.job.token_ids:
            fields["token_ids"] = [each.token for each in piece.delta.sampled]
        return event(dump(self._chunk_of(index, fields | self._ledger(piece.finish))))

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if not self.job.chat:
            return {"text": piece.text}
        return {"delta": delta_of(self.answers[index], piece, thoughts=self.job.shows_reasoning)}

    def _chunk_of(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [{"index": index, **fields}]}
        if self.job.include_usage or self.job.usage_everywhere:
            chunk["usage"] = self.usage() if self.job.usage_everywhere else None
        return chunk

    def broken(self, error: Exception) -> bytes:
        """The end of every choice that has begun and not ended, and what broke."""
        aborted = Piece(finish_reason="abort")
        open_ones = [i for i in self._skeletons if self.answers[i].last is None]
        ends = b"".join(self._full_chunk(i, aborted) for i in open_ones)
        return ends + event(dump(describe(error)[1])) + DONE

    def closing(self) -> bytes:
        """The counts, where asked for, in a chunk without choices."""
        if not self.job.include_usage:
            return DONE
        return event(dump({**self._head, "choices": [], "usage": self.usage()})) + DONE

    # ------------------------------------------------------------ whole answers

    async def gather(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        piece, answer = self._noted(index, piece), self.answers[index]
        if not answer.parts:
            await self._read_prompt(index, piece.delta.prompt)
        answer.parts.append(piece.text)
        answer.thoughts.append(piece.reasoning)
        answer.calls += map(call_json, piece.calls)
        answer.num_tokens += len(piece.delta.sampled)
        answer.logprobs = _joined(answer.logprobs, self._logprobs(index, piece.delta.sampled))
        if self.job.token_ids:
            answer.token_ids += [each.token for each in piece.delta.sampled]

    async def _read_prompt(self, index: int, prompt: Sequence[Sampled]) -> None:
        """What is asked for of the prompt, which may be long: a slice at a time."""
        job, answer, names = self.job, self.answers[index], self._names
        if job.prompt_logprobs:
            answer.prompt_logprobs += prompt_logprobs(names, ())
        if job.logprobs and job.echo:
            first = job.choices[index].prompt.ids[:1]
            answer.echo_logprobs, answer.offset = completion_logprobs(names, (), 0, first=first)
        for start in range(0, len(prompt), SLICE):
            part = prompt[start : start + SLICE]
            if job.prompt_logprobs:
                answer.prompt_logprobs += prompt_logprobs(names, part)[1:]
            if job.logprobs and job.echo:
                fields, answer.offset = completion_logprobs(names, part, answer.offset)
                answer.echo_logprobs = _joined(answer.echo_logprobs, fields)
            await asyncio.sleep(0)

    def whole(self) -> dict[str, Any]:
        """The response body, once every choice has ended."""
        choices = [{"index": place, **self._choice(index)} for place, index in enumerate(self.shown())]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def shown(self) -> Sequence[int]:
        """Which answers, in their order."""
        return range(len(self.answers))

    def _choice(self, index: int) -> dict[str, Any]:
        answer, job = self.answers[index], self.job
        text = "".join(answer.parts)
        if job.chat:
            fields: dict[str, Any] = {"message": message_of(answer, text, thoughts=job.shows_reasoning)}
        else:
            fields = {"text": job.choices[index].prompt.text + text if job.echo else text}
        fields |= self._ending(answer.last)
        fields["logprobs"] = _joined(answer.echo_logprobs, answer.logprobs)
        if job.prompt_logprobs:
            fields["prompt_logprobs"] = answer.prompt_logprobs
        if job.token_ids:
            fields |= {"token_ids": answer.token_ids} | self._prompt_ids(index)
        return fields | self._ledger(answer.finish)

    # ------------------------------------------------------------ parts of both

    def _ending(self, piece: Piece | None) -> dict[str, Any]:
        return {
            "logprobs": None,
            "finish_reason": piece.finish_reason if piece else None,
            "stop_reason": piece.stop_reason if piece else None,
        }

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": [*self.job.choices[index].prompt.ids]} if self.job.token_ids else {}

    def _ledger(self, finish: Finish | None) -> dict[str, Any]:
        if finish is None or not self.job.ledger:
            return {}
        return {"ledger": ledger_json(finish.ledger)}

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.job.logprobs:
            return None
        if self.job.chat:
            return chat_logprobs(self._names, sampled)
        answer = self.answers[index]
        fields, answer.offset = completion_logprobs(self._names, sampled, answer.offset)
        return fields


def _object_of(job: Job) -> str:
    if not job.chat:
        return "text_completion"
    return "chat.completion.chunk" if job.stream else "chat.completion"


def delta_of(answer: Answer, piece: Piece, *, thoughts: bool) -> dict[str, Any]:
    """A chat chunk's news; its calls are kept with the answer's, which number them."""
    found: dict[str, Any] = {"reasoning_content": piece.reasoning} if thoughts and piece.reasoning else {}
    if piece.calls:
        first, calls = len(answer.calls), [call_json(each) for each in piece.calls]
        answer.calls += calls
        found["tool_calls"] = [{"index": first + place, **call} for place, call in enumerate(calls)]
    return found if found and not piece.text else {"content": piece.text, **found}


def message_of(answer: Answer, text: str, *, thoughts: bool) -> dict[str, Any]:
    """A chat's whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts and (thought := "".join(answer.thoughts)):
        message["reasoning_content"] = thought
    if answer.calls:
        message |= {"content": text or None, "tool_calls": answer.calls}
    return message


def call_json(call: Call) -> dict[str, Any]:
    """With an id of nine characters, which is what Mistral's templates take."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """`before` with the logprobs of what follows it; it is `before` itself that grows."""
    if before is None or after is None:
        return before or after
    for name, values in after.items():
        if isinstance(values, list):
            before[name] += values
    return before


# The response that runs a job: all at once or as server-sent events, ended as soon as the client is gone.

log = logging.getLogger("jdisagg.http")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Rendering(Protocol):
    """How one interface shows a job's answers once they are whole."""

    @property
    def finish(self) -> Finish | None:
        """Of the first answer, once it has ended."""
        ...

    async def gather(self, index: int, piece: Piece) -> None: ...

    def whole(self) -> dict[str, Any]: ...


@runtime_checkable
class Streaming(Rendering, Protocol):
    """So, and as a stream of events."""

    async def opening(self, index: int, piece: Piece) -> bytes: ...

    def chunk(self, index: int, piece: Piece) -> bytes: ...

    def closing(self) -> bytes: ...

    def broken(self, error: Exception) -> bytes: ...


class Generation(Response):
    """Errors before the first byte are raised, for the app's error table; later ones are events of the stream."""

    def __init__(
        self,
        job: Job,
        renderer: Rendering,
        service: Service,
        settings: FrontSettings,
        clients: Clients,
    ) -> None:
        super().__init__()
        self._job, self._renderer, self._service, self._settings = job, renderer, service, settings
        self._clients, self._client = clients, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._client = scope["state"]["client"]
        work = asyncio.create_task(self._streamed(send) if self._job.stream else self._whole(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _batches(self) -> AsyncGenerator[Batch]:
        job, settings = self._job, self._settings
        requests = [each.request for each in job.choices]
        batches = answers(self._service, requests, job.options, settings.choices_at_once, settings.queue_timeout_s)
        if job.reads is not None:
            batches = told(batches, job.reads)
        return self._clients.metered(self._client, job.prompt_tokens, requests, batches)

    def _left(self) -> list[tuple[bytes, bytes]]:
        """Headers: what the client may yet ask for."""
        left = allowance_headers(self._clients.allowances(self._client))
        return [(name.encode(), value.encode()) for name, value in left.items()]

    async def _whole(self, send: Send) -> None:
        renderer = self._renderer
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                for index, piece in batch:
                    await renderer.gather(index, piece)
                _raise_if_failed(batch)
        self.body = (await dump_slowly(renderer.whole())).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        headers += _instances(renderer.finish) + self._left()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})

    async def _streamed(self, send: Send) -> None:
        renderer, started, failure = self._renderer, False, None
        assert isinstance(renderer, Streaming), "what is streamed has events"
        try:
            async with aclosing(self._batches()) as batches:
                async for batch in batches:
                    if not started:
                        _raise_if_failed(batch)
                        headers = STREAM_HEADERS + self._left()
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        started = True
                    body = b"".join([await renderer.opening(*each) + renderer.chunk(*each) for each in batch])
                    failure = failure or _failure_in(batch)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, JdisaggError):
                log.exception("an answer broke off after its first byte")
            failure = error
        if failure is None:
            await send({"type": "http.response.body", "body": renderer.closing()})
        else:  # what failed is an event alone for clients of HTTP, and a status too for those within (`serve/grpc`)
            await send({"type": "http.response.body", "body": renderer.broken(failure), "failed": describe(failure)})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _failure_in(batch: Batch) -> AnswerFailed | None:
    return next((failure for _, piece in batch if (failure := failure_of(piece)) is not None), None)


def _raise_if_failed(batch: Batch) -> None:
    failure = _failure_in(batch)
    if failure is not None:
        raise failure


def _instances(finish: Finish | None) -> list[tuple[bytes, bytes]]:
    """Which workers made the (first) answer."""
    if finish is None:
        return []
    named = (("x-prefill-instance-id", finish.prefill_worker), ("x-decode-instance-id", finish.decode_worker))
    return [(name.encode(), worker.encode()) for name, worker in named if worker is not None]


# The HTTP app called from within its own process: what asks so has all that HTTP has, without a socket.

AHEAD = 64  # messages that the app may be ahead of who reads them
Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes


async def messages(
    app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = (), client: str = "inside"
) -> AsyncGenerator[Message]:
    """What the app sends for a POST; closing the generator is its client leaving."""
    sent, room, gone = asyncio.Queue[Message | None](), asyncio.Semaphore(AHEAD), asyncio.Event()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await room.acquire()
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(_scope(path, body, headers, client), receive, send)
        except Exception:  # after its 500 was sent, as a server logs it
            log.exception("POST %s", path)
        finally:
            sent.put_nowait(None)

    work = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
            room.release()
    finally:
        gone.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _scope(path: str, body: bytes, headers: Iterable[Header], client: str) -> Message:
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": given,
        "client": (client, 0),
        "server": ("inside", 0),
    }


async def answered(app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = ()) -> HttpResponse:
    """The whole answer to a POST."""
    status, told, parts = 500, dict[str, str](), list[bytes]()
    async with aclosing(messages(app, path, body, headers)) as sent:
        async for message in sent:
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {name.decode(): value.decode() for name, value in message.get("headers", ())}
            else:
                parts.append(message.get("body", b""))
    return HttpResponse(status, told, b"".join(parts))
