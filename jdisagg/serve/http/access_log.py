"""A line for every HTTP request that was answered: at level info, and at debug for what is asked again and again."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.serve.log_lines import SERVED

POLLED = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/debug/cluster"})
LEFT = 499  # the client was gone before the answer began
log = logging.getLogger("jdisagg.access")


class AccessLog:
    """ASGI middleware around the gate, whose `scope["state"]` names the request and its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(_level(scope)):
            await self._app(scope, receive, send)
            return
        status, began_s = LEFT, time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            _tell(scope, status, time.monotonic() - began_s)


def _level(scope: Scope) -> int:
    return logging.DEBUG if scope["path"] in POLLED else logging.INFO


def _tell(scope: Scope, status: int, seconds: float) -> None:
    state: dict[str, Any] = scope.get("state", {})
    method, path, client = scope["method"], scope["path"], state.get("client") or "nobody"
    fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6), "client": client}
    said = SERVED.set(state if "request_id" in state else None)
    name = state.get("request_id", "-")
    words = method, path, status, seconds, client, name
    log.log(_level(scope), "%s %s %s %.3f s, %s, %s", *words, extra={"fields": fields})
    SERVED.reset(said)
