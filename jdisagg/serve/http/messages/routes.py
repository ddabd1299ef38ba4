"""The routes of the Messages API."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from jdisagg.serve.http.chat import chat_ids
from jdisagg.serve.http.errors import MESSAGES, MessagesError, documented
from jdisagg.serve.http.front import Front, request_name
from jdisagg.serve.http.jobs import chat_job, check_model
from jdisagg.serve.http.messages.body import CountBody, MessagesBody
from jdisagg.serve.http.messages.rendering import MessageRenderer
from jdisagg.serve.http.messages.turns import chat_body_of
from jdisagg.serve.http.schema import takes

COUNTS = documented(400, 401, 404, 408, 413, body=MessagesError)
ANSWERS = documented(400, 401, 404, 408, 413, 429, 503, body=MessagesError)


def add_messages(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post(MESSAGES, openapi_extra=takes(MessagesBody), responses=ANSWERS)
    async def messages(request: Request) -> Response:
        """The answer to messages, as Anthropic's clients ask for it; the key may come as `x-api-key`."""
        body = await front.body(request, MessagesBody)
        job = await chat_job(chat_body_of(body), service, settings, request_name(request, body.request_id), "msg_")
        return front.respond(job, request, partial(MessageRenderer, body))

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=takes(CountBody), responses=COUNTS)
    async def count_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the same messages would be."""
        body = await front.body(request, CountBody)
        check_model(body.model, service, settings)
        ids = await chat_ids(chat_body_of(body), service.tokenizer, service.max_model_len, False)
        return {"input_tokens": len(ids)}
