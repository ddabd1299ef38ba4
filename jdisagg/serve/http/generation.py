"""The response that runs a job: all at once or as server-sent events, ended as soon as the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import Finish
from jdisagg.core.request import RequestId
from jdisagg.serve.front_settings import FrontSettings
from jdisagg.serve.generation import failure_of, merged, pieces
from jdisagg.serve.http.errors import describe
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.http.rendering import DONE, Renderer, dump, event
from jdisagg.serve.service import Service
from jdisagg.serve.text import Piece

log = logging.getLogger("jdisagg.http")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation(Response):
    """Errors before the first byte are raised, for the app's error table; later ones are events of the stream."""

    def __init__(
        self,
        job: Job,
        renderer: Renderer,
        service: Service,
        settings: FrontSettings,
        note_stop: Callable[[RequestId], None],
    ) -> None:
        super().__init__()
        self._job, self._renderer, self._service, self._settings = job, renderer, service, settings
        self._note_stop = note_stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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

    def _pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        job = self._job
        answers = [pieces(self._service, each.request, job.options, self._note_stop) for each in job.choices]
        return merged(answers, self._settings.choices_at_once)

    async def _each_piece(self) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces, with the drawn token dropped where only the prompt was asked for; an answer's end is noted."""
        async with aclosing(self._pieces()) as found:
            async for index, piece in found:
                if self._job.prompt_only:
                    reason = piece.finish_reason if piece.finish_reason in (None, "abort") else "length"
                    piece = replace(piece, text="", sampled=(), finish_reason=reason, stop_reason=None)  # noqa: PLW2901
                yield index, piece

    async def _whole(self, send: Send) -> None:
        renderer = self._renderer
        async with aclosing(self._each_piece()) as found:
            async for index, piece in found:
                renderer.gather(index, piece)
                if piece.finish_reason is not None:
                    renderer.answers[index].last = piece
                    _raise_if_failed(piece)
        self.body = dump(renderer.whole()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        headers += _instances(renderer.answers[0].finish)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})

    async def _streamed(self, send: Send) -> None:
        renderer, started, failure = self._renderer, False, None
        try:
            async with aclosing(self._each_piece()) as found:
                async for index, piece in found:
                    if not started:
                        _raise_if_failed(piece)
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        started = True
                    body = renderer.chunk(index, piece)
                    if piece.finish_reason is not None:
                        renderer.answers[index].last = piece
                        failure = failure or failure_of(piece)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, JdisaggError):
                log.exception("an answer broke off after its first byte")
            failure = error
        tail = renderer.closing() if failure is None else renderer.abort_chunks() + event(describe(failure)[1])
        await send({"type": "http.response.body", "body": tail + DONE})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _raise_if_failed(piece: Piece) -> None:
    failure = failure_of(piece)
    if failure is not None:
        raise failure


def _instances(finish: Finish | None) -> list[tuple[bytes, bytes]]:
    """Which workers made the (first) answer."""
    if finish is None:
        return []
    named = (("x-prefill-instance-id", finish.prefill_worker), ("x-decode-instance-id", finish.decode_worker))
    return [(name.encode(), worker.encode()) for name, worker in named if worker is not None]
