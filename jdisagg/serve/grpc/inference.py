"""jdisagg.v1.Inference: the routes of HTTP as methods, by the app itself, so that both have the same of everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, NoReturn

from starlette.types import ASGIApp

from jdisagg.serve.grpc.calls import Call, metadata, write
from jdisagg.serve.grpc.codes import code_of
from jdisagg.serve.grpc.inference_pb2 import DESCRIPTOR, Body
from jdisagg.serve.grpc.inference_pb2_grpc import InferenceServicer
from jdisagg.serve.http.inside import messages

NAME = DESCRIPTOR.services_by_name["Inference"].full_name
PASSED = ("authorization", "x-request-id", "traceparent")  # metadata that are headers there
TOLD = ("x-request-id", "traceresponse", "x-prefill-instance-id", "x-decode-instance-id")  # so, of the answer
DATA, DONE, EVENT_END = b"data: ", b"[DONE]", b"\n\n"


class Inference(InferenceServicer):
    """Each method posts its body to its route of `app`."""

    def __init__(self, app: ASGIApp, client_timeout_s: float) -> None:
        self._app, self._timeout_s = app, client_timeout_s

    async def Complete(self, request: Body, context: Call) -> None:
        await self._post("/v1/completions", request, context)

    async def Chat(self, request: Body, context: Call) -> None:
        await self._post("/v1/chat/completions", request, context)

    async def Respond(self, request: Body, context: Call) -> None:
        await self._post("/v1/responses", request, context)

    async def Embed(self, request: Body, context: Call) -> None:
        await self._post("/v1/embeddings", request, context)

    async def Score(self, request: Body, context: Call) -> None:
        await self._post("/v1/score", request, context)

    async def Tokenize(self, request: Body, context: Call) -> None:
        await self._post("/tokenize", request, context)

    async def Detokenize(self, request: Body, context: Call) -> None:
        await self._post("/detokenize", request, context)

    async def _post(self, path: str, request: Body, context: Call) -> None:
        given = [(name, metadata(context, name)) for name in PASSED]
        headers = [(name.encode(), value.encode()) for name, value in given if value]
        client = context.peer().rpartition(":")[0]
        status, told, rest = 500, dict[str, str](), b""
        failed: tuple[int, dict[str, Any]] | None = None
        async with aclosing(messages(self._app, path, request.json.encode(), headers, client)) as sent:
            async for message in sent:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    told = {name.decode(): value.decode() for name, value in message.get("headers", ())}
                    if status == 200:
                        await context.send_initial_metadata(tuple((n, told[n]) for n in TOLD if n in told))
                    continue
                rest, failed = rest + message.get("body", b""), message.get("failed", failed)
                if told.get("content-type", "").startswith("text/event-stream"):
                    *whole, rest = rest.split(EVENT_END)
                    for each in _data(whole):
                        await write(context, Body(json=each), self._timeout_s)
        if status != 200:
            await _abort(context, status, told, json.loads(rest))
        if failed is not None:
            await _abort(context, failed[0], told, failed[1])
        if rest:
            await write(context, Body(json=rest.decode()), self._timeout_s)


def _data(events: list[bytes]) -> Iterator[str]:
    """The JSON of each server-sent event."""
    for event in events:
        data = event[event.index(DATA) + len(DATA) :]
        if data != DONE:
            yield data.decode()


async def _abort(context: Call, status: int, told: dict[str, str], body: dict[str, Any]) -> NoReturn:
    after = tuple((name, told[name]) for name in ("retry-after", "x-request-id") if name in told)
    await context.abort(code_of(status), body["error"]["message"], after)
