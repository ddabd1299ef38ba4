"""What every HTTP request passes first: its id, its key, and a body that may not grow past the limit."""

from __future__ import annotations

import re
import uuid

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.http import admin
from jdisagg.serve.frontends.http.errors import BodyTooLarge, Unauthorized, error_response
from jdisagg.serve.observability.log_lines import SERVED

# What needs no key of a client; the page asks for one, and /admin for its own.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/version"}) | admin.PAGE_PATHS
PLAIN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Gate:
    """ASGI middleware: `request_id` and `client` of `scope["state"]` in, `x-request-id` out, 401 without a key."""

    def __init__(self, app: ASGIApp, clients: Clients) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = plain_id(headers.get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        state = scope["state"]  # a body may name another
        SERVED.set(state)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(b"x-request-id", state["request_id"].encode())]
                if "traceresponse" in state:
                    more.append((b"traceresponse", state["traceresponse"].encode()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        address = (scope.get("client") or ("unknown",))[0]
        state["client"] = self._clients.recognised(_key_of(headers), address)
        path = scope["path"]
        if state["client"] is not None or path in OPEN_PATHS | admin.PATHS or path.startswith(admin.PREFIX):
            await self._app(scope, receive, marked)
        else:
            refused = Unauthorized("the API key is missing or wrong")
            await error_response(refused, scope["path"])(scope, receive, marked)


def _key_of(headers: Headers) -> str:
    """As OpenAI's clients send it, or Anthropic's."""
    given = headers.get("authorization")
    return given or (f"Bearer {headers['x-api-key']}" if "x-api-key" in headers else "")


def plain_id(text: str | None) -> str | None:
    """A client's id where it is safe to repeat in headers, bodies and logs; else None."""
    return text if text is not None and PLAIN_ID.fullmatch(text) else None


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known, also for a body sent in chunks."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes, at most {limit_bytes} are allowed")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes, the most that is allowed")
        parts.append(part)
    return b"".join(parts)
