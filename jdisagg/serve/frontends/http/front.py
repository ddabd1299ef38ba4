"""What the routes share: the running stack, its settings, and how a request is read and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from jdisagg.core.traceparent import parse_traceparent, span_id_of
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import text
from jdisagg.serve.frontends.best_of import likeliest, likelihood
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.gate import plain_id, read_body
from jdisagg.serve.frontends.http.jobs import Job, traced
from jdisagg.serve.frontends.http.rendering import Generation, Renderer, Rendering
from jdisagg.serve.frontends.http.schema import LIMITS, Body, parse
from jdisagg.serve.frontends.text import Piece, TokenNames
from jdisagg.serve.observability.metrics import Metrics

Shown = Callable[[Job, TokenNames, str], Rendering]


class Front:
    """The routes' shared state."""

    def __init__(self, service: Service, settings: FrontSettings, metrics: Metrics, clients: Clients) -> None:
        self.service, self.settings, self.metrics, self.clients = service, settings, metrics, clients
        self.created, self._limits = int(time.time()), LIMITS.with_room_for(service.max_model_len)
        self._names = {as_ids: TokenNames(service.tokenizer, as_ids) for as_ids in (False, True)}

    async def body(self, request: HttpRequest, kind: type[Body]) -> Body:
        raw = await read_body(request, self.settings.max_body_bytes)
        return await text.reading(len(raw), lambda: parse(kind, raw, self._limits))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token's own text, special ones by name."""
        texts = []
        for start in range(0, len(ids), text.SLICE):
            texts += [self.service.tokenizer.token_text(each) for each in ids[start : start + text.SLICE]]
            await asyncio.sleep(0)
        return texts

    def respond(self, job: Job, request: HttpRequest, shown: Shown = Renderer) -> Response:
        context = parse_traceparent(request.headers.get("traceparent", "")) if self.settings.tracing else None
        if context is not None:
            job = traced(job, context.header(context.parent_id))
            request.state.traceresponse = context.header(span_id_of(job.choices[0].request.request_id))
        renderer = shown(job, self._names[job.tokens_as_ids], self.settings.fingerprint)
        return Generation(job, renderer, self.service, self.settings, self.clients)

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
    """The client's id for this request (header before body), or the one the gate drew; the answer's header has it."""
    if "x-request-id" not in request.headers and plain_id(asked):
        request.state.request_id = str(asked)
    return request.state.request_id


# Answers of a request with `best_of`, rendered: the likeliest of those that were drawn.


class BestOfRenderer(Renderer):
    """Of whole answers; `job.kept` of every `job.drawn` that follow each other are shown."""

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        super().__init__(job, names, fingerprint)
        self._sums = [0.0] * len(job.choices)

    async def gather(self, index: int, piece: Piece) -> None:
        self._sums[index] += likelihood(piece.delta.sampled)
        await super().gather(index, piece)

    def shown(self) -> Sequence[int]:
        return likeliest(self._sums, self.job.drawn, self.job.kept)
