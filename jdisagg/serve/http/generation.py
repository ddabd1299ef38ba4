"""The response that runs a job: all at once or as server-sent events, ended as soon as the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import Finish
from jdisagg.serve.clients import Clients
from jdisagg.serve.front_settings import FrontSettings
from jdisagg.serve.generation import AnswerFailed, Batch, answers, failure_of
from jdisagg.serve.http.errors import allowance_headers, describe
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.offload import dump_slowly
from jdisagg.serve.service import Service
from jdisagg.serve.text import Piece
from jdisagg.serve.tools.told import told

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
