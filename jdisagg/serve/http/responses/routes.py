"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from jdisagg.serve.http.chat import chat_ids
from jdisagg.serve.http.errors import documented
from jdisagg.serve.http.front import Front, request_name
from jdisagg.serve.http.jobs import chat_job, check_model
from jdisagg.serve.http.responses.body import ResponsesBody
from jdisagg.serve.http.responses.items import chat_body_of
from jdisagg.serve.http.responses.rendering import ResponseRenderer
from jdisagg.serve.http.schema import takes

COUNTS = documented(400, 401, 404, 408, 413)
ANSWERS = documented(400, 401, 404, 408, 413, 429, 503)


def add_responses(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post("/v1/responses", openapi_extra=takes(ResponsesBody), responses=ANSWERS)
    async def responses(request: Request) -> Response:
        """Items in, items out, as OpenAI has them. Nothing is kept: a conversation goes on by its items in `input`."""
        body = await front.body(request, ResponsesBody)
        job = await chat_job(chat_body_of(body), service, settings, request_name(request, body.request_id), "resp_")
        return front.respond(job, request, partial(ResponseRenderer, body))

    @app.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesBody), responses=COUNTS)
    async def input_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the same body would be."""
        body = await front.body(request, ResponsesBody)
        check_model(body.model, service, settings)
        ids = await chat_ids(chat_body_of(body), service.tokenizer, service.max_model_len, False)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}
