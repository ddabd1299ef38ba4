"""From our errors to the JSON and status that OpenAI clients know; foreign exceptions are mapped here only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from jdisagg.core.errors import JdisaggError, RequestError
from jdisagg.core.request import FinishReason
from jdisagg.policy.client_limits import RateStatus
from jdisagg.serve.deploy.pools import NoSuchWorker, RoleConflict
from jdisagg.serve.driver.local_service import AnswerFailed, GrammarEnded
from jdisagg.serve.driver.service import Draining, NotLeader, ObjectiveUnmet, Rejected
from jdisagg.serve.frontends.adapters import ModelNotFound, NoSuchAdapter
from jdisagg.serve.frontends.clients import RateLimited
from jdisagg.serve.observability.tracing import Busy


class BodyTooLarge(RequestError):
    """The body is over the size limit (HTTP 413)."""


class Unauthorized(JdisaggError):
    """The key is missing or wrong (HTTP 401)."""


# Most special first: the first row that fits counts. (status, type, code)
RESPONSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ModelNotFound, 404, "not_found_error", "model_not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (NoSuchAdapter, 404, "not_found_error", "adapter_not_found"),
    (NoSuchWorker, 404, "not_found_error", "worker_not_found"),
    (RequestError, 400, "invalid_request_error", None),
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (ObjectiveUnmet, 429, "rate_limit_error", "objective_unmet"),
    (Rejected, 429, "rate_limit_error", "queue_full"),
    (RoleConflict, 409, "invalid_request_error", "role_conflict"),
    (Busy, 409, "invalid_request_error", "busy"),
    (Draining, 503, "service_unavailable_error", "not_ready"),
    (NotLeader, 503, "service_unavailable_error", "not_leader"),
)
# What each status of an error means, for the OpenAPI document.
MEANINGS: dict[int, str] = {
    400: "The request cannot be served as written; the message names the field and the numbers",
    401: "The API key is missing or wrong",
    404: "There is no such model or thing here",
    408: "The request waited, or stood still, for longer than is allowed, or its body was too slow",
    409: "What was asked for is being done already, or cannot be now",
    413: "The body is over --max_body_bytes",
    429: "The queue is full, the client over its limits, or an objective of its not to be met; Retry-After says when to"
    " come again",
    431: "The headers are too large",
    500: "A mistake of ours; the server's log has the details",
    503: "The server is not ready, is going down, has too many connections, or is a standby router: x-jdisagg-leader"
    " has the leader's address",
}
MESSAGES = "/v1/messages"
WORDS = {  # what Anthropic's clients call each status
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
FAILED_STATUS = {FinishReason.TIMEOUT: 408, FinishReason.ABORT: 503}  # all else is 500


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and `{"error": {...}}` of an error."""
    if isinstance(error, GrammarEnded):
        return 400, _body(str(error), "invalid_request_error", None, "grammar_limit")
    if isinstance(error, AnswerFailed):
        reason = error.finish.reason
        return FAILED_STATUS.get(reason, 500), _body(str(error), "server_error", None, f"request_{reason.value}")
    if isinstance(error, HTTPException):
        return error.status_code, _body(str(error.detail), "invalid_request_error", None, _word(error.status_code))
    for kind, status, word, code in RESPONSES:
        if isinstance(error, kind):
            return status, _body(str(error), word, getattr(error, "param", None), code)
    return 500, _body("an internal error; the server's log has the details", "server_error", None, "internal_error")


def _word(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "_")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def in_messages(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error's body as Anthropic's clients read it."""
    told = {"type": WORDS.get(status, "api_error"), "message": body["error"]["message"]}
    return {"type": "error", "error": told}


def error_response(error: Exception, path: str = "") -> Response:
    """`describe`, as a response with the headers that belong to it, in the words of the interface at `path`."""
    status, body = describe(error)
    if path.startswith(MESSAGES):
        body = in_messages(status, body)
    return Response(json.dumps(body), status, error_headers(error), media_type="application/json")


def error_headers(error: Exception) -> dict[str, str]:
    """Returns the headers that belong to an error, as the time to come again."""
    headers: dict[str, str] = {}
    if isinstance(error, Rejected):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, NotLeader):
        headers |= {"retry-after": "1"} | ({"x-jdisagg-leader": error.http} if error.http else {})
    if isinstance(error, RateLimited):
        headers |= allowance_headers(error.allowances)
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def allowance_headers(allowances: Iterable[RateStatus]) -> dict[str, str]:
    """What is left to a client, in the headers that clients of OpenAI read."""
    found: dict[str, str] = {}
    for each in allowances:
        values = {"limit": str(each.limit), "remaining": str(each.remaining), "reset": f"{each.reset_s:.3f}s"}
        found |= {f"x-ratelimit-{word}-{each.name}": value for word, value in values.items()}
    return found


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class MessagesError(BaseModel):
    """So, under /v1/messages."""

    type: str
    error: dict[str, str]


def documented(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may end with these statuses; 431 and 500 may come of any."""
    sent = sorted({*statuses, 431, 500})
    return {status: {"model": body, "description": MEANINGS[status]} for status in sent}


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


def install(app: FastAPI) -> None:
    """Every error of this app leaves as OpenAI's JSON."""
    for kind in (JdisaggError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
