"""The state that the routes share, and the response that runs a job."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jdisagg.core.errors import JdisaggError
from jdisagg.core.traceparent import parse_traceparent, span_id_of
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import text
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.errors import allowance_headers
from jdisagg.serve.frontends.http.gate import plain_id, read_body
from jdisagg.serve.frontends.http.jobs import Job, traced
from jdisagg.serve.frontends.http.rendering import (
    RendererOf,
    Rendering,
    StreamEvent,
    Streaming,
    batches_of,
    events_of,
    failure_in,
    gather_batch,
    instance_headers,
    raise_if_failed,
)
from jdisagg.serve.frontends.http.schema import LIMITS, Body, parse
from jdisagg.serve.frontends.text import TokenNames, dump_slowly

log = logging.getLogger("jdisagg.http")

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


AnyBody = TypeVar("AnyBody", bound=BaseModel)
Prepare = Callable[["Front", AnyBody, str], Awaitable[tuple[Job, RendererOf]]]  # of a body and the request's name


class Front:
    """The running stack, its settings and its clients, as the routes of HTTP and the methods of gRPC share them."""

    def __init__(self, service: Service, settings: FrontSettings, clients: Clients) -> None:
        self.service, self.settings, self.clients = service, settings, clients
        self.created, self._limits = int(time.time()), LIMITS.with_room_for(service.max_model_len)
        self._names = {as_ids: TokenNames(service.tokenizer, as_ids) for as_ids in (False, True)}

    async def body(self, request: HttpRequest, kind: type[Body]) -> Body:
        return await self.read(await read_body(request, self.settings.max_body_bytes), kind)

    async def read(self, raw: bytes, kind: type[Body]) -> Body:
        """Returns the body as `kind`, read off the event loop if it is large. Raises RequestError."""
        return await text.reading(len(raw), lambda: parse(kind, raw, self._limits))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token's own text, special ones by name."""
        texts = []
        for start in range(0, len(ids), text.SLICE):
            texts += [self.service.tokenizer.token_text(each) for each in ids[start : start + text.SLICE]]
            await asyncio.sleep(0)
        return texts

    async def answer(self, request: HttpRequest, kind: type[Body], prepare: Prepare[Body]) -> Response:
        """Returns the response to a request whose body `prepare` makes a job."""
        body = await self.body(request, kind)
        name = request_name(request, getattr(body, "request_id", None))
        job, renderer_of = await prepare(self, body, name)
        job, response = self.traced(job, request.headers.get("traceparent", ""))
        if response:
            request.state.traceresponse = response
        return JobReply(job, self.renderer(job, renderer_of), self)

    def traced(self, job: Job, traceparent: str) -> tuple[Job, str]:
        """Returns the job in the trace of the client, and the header that tells it so; "" without a trace."""
        context = parse_traceparent(traceparent) if self.settings.tracing else None
        if context is None:
            return job, ""
        job = traced(job, context.header(context.parent_id))
        return job, context.header(span_id_of(job.choices[0].request.request_id))

    def renderer(self, job: Job, renderer_of: RendererOf) -> Rendering:
        return renderer_of(job, self._names[job.tokens_as_ids], self.settings.fingerprint)

    def model(self, name: str) -> dict[str, Any]:
        adapter = self.settings.adapters.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "jdisagg",
            "root": self.service.model_name if adapter is None else adapter.folder,
            "parent": None if adapter is None else self.service.model_name,
            "max_model_len": self.service.max_model_len,
        }


def request_name(request: HttpRequest, asked: str | None) -> str:
    """Returns the client's id for this request (header before body), else the gate's; the answer's header has it."""
    if "x-request-id" not in request.headers and plain_id(asked):
        request.state.request_id = str(asked)
    return request.state.request_id


class JobReply(Response):
    """A response that runs a job, and ends it as soon as the client is gone.

    Errors before the first byte are raised, for the app's error table; later ones are events of the stream.
    """

    def __init__(self, job: Job, renderer: Rendering, front: Front) -> None:
        super().__init__()
        self._job, self._renderer, self._front, self._client = job, renderer, front, ""

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

    async def _start(self, send: Send, headers: dict[str, str]) -> None:
        """Sends status and headers, those of what the client may yet ask for among them."""
        clients = self._front.clients
        headers |= allowance_headers(clients.allowances(self._client))
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def _whole(self, send: Send) -> None:
        renderer, front = self._renderer, self._front
        found = batches_of(self._job, front.service, front.settings, front.clients, self._client)
        async with aclosing(found) as batches:
            async for batch in batches:
                await gather_batch(renderer, batch)
        self.body = (await dump_slowly(renderer.whole())).encode()
        headers = {"content-type": "application/json", "content-length": str(len(self.body))}
        await self._start(send, headers | instance_headers(renderer.finish))
        await send({"type": "http.response.body", "body": self.body})

    async def _streamed(self, send: Send) -> None:
        renderer, front, has_begun, failure = self._renderer, self._front, False, None
        assert isinstance(renderer, Streaming), "a streamed job has a renderer of events"
        try:
            found = batches_of(self._job, front.service, front.settings, front.clients, self._client)
            async with aclosing(found) as batches:
                async for batch in batches:
                    if not has_begun:
                        raise_if_failed(batch)
                        await self._start(send, dict(STREAM_HEADERS))
                        has_begun = True
                    body = framed(await events_of(renderer, batch))
                    failure = failure or failure_in(batch)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, JdisaggError):
                log.exception("an answer broke off after its first byte")
            failure = error
        last = framed(renderer.closing() if failure is None else renderer.broken(failure))
        end = framed([("", renderer.stream_end)]) if renderer.stream_end else b""
        await send({"type": "http.response.body", "body": last + end})


def framed(events: Iterable[StreamEvent]) -> bytes:
    """Returns events as server-sent ones."""
    return b"".join(
        [(b"event: %b\n" % name.encode() if name else b"") + b"data: " + data + b"\n\n" for name, data in events]
    )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
