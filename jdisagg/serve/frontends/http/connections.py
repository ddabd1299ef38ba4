"""HTTP connections that may not keep the server waiting: bytes counted and deadlines set before any request is served.

uvicorn's protocol bounds neither a header nor the time a client takes. Here a header ends at its limit (431), a header
or a body that is late is cut off (408), whoever reads nothing is dropped with its answer, and at the limit of
connections the one that has asked nothing for the longest makes room; where all are busy the newcomer gets a 503.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jdisagg.serve.observability.log_lines import SERVED

MAX_PIPELINED = 16  # requests sent before the answer to an earlier one


class CloseReason(StrEnum):
    """Why the server ended a connection, or refused one."""

    IDLE = "idle"  # nothing asked, or nothing more
    SLOW_HEADER = "slow_header"
    LONG_HEADER = "long_header"
    SLOW_BODY = "slow_body"
    UNREAD = "unread"  # the client does not read its answer
    DISPLACED = "displaced"  # by a newcomer, while it asked for nothing
    FULL = "full"  # refused: every connection there may be is busy
    PIPELINED = "pipelined"  # too many requests at once


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients are allowed. Sizes in bytes, times in seconds."""

    max_connections: int = 1000
    timeout_s: float = 30.0  # for a header; with nothing asked; with an answer unread; for a body with nothing in it
    body_bytes_per_s: int = 16 << 10  # a body has a second more for as many bytes of it as came
    max_header_bytes: int = 64 << 10


class Phase(Enum):
    """What the client owes."""

    NOTHING = auto()  # between requests, or before the first
    HEADER = auto()
    BODY = auto()


class ConnectionLimiter:
    """What all connections of one server share: the limits, and the book of those cut off."""

    def __init__(self, limits: Limits, note: Callable[[CloseReason], None] = lambda reason: None) -> None:
        self.limits, self.note = limits, note
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # those that asked for nothing when last seen, longest first

    def admit(self, newcomer: Connection) -> None:
        """Makes room for the newcomer, or refuses it. However many there are, this looks at few: whoever is passed over
        is looked at again only when it has asked for something since."""
        self._open.add(newcomer)
        if len(self._open) > self.limits.max_connections:
            longest = self._longest_waiting()
            if longest is not None:
                longest.drop(CloseReason.DISPLACED)
            else:
                newcomer.refuse(503, f"all {self.limits.max_connections} connections are busy", CloseReason.FULL)
        if not newcomer.is_cut:
            self.waits(newcomer)

    def _longest_waiting(self) -> Connection | None:
        while self._waiting:
            longest = next(iter(self._waiting))
            if longest.asks_nothing:
                return longest
            del self._waiting[longest]
        return None

    def waits(self, connection: Connection) -> None:
        """From now on nothing is read for it or answered, unless it is: then it says so again when that is over."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def left(self, connection: Connection) -> None:
        """It is gone, or only has to send what was written before."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def sweep(self, present: Collection[Any], now_s: float) -> None:
        """Cuts off whoever is late."""
        for each in list(present):
            each.look(now_s)


class Connection(HttpToolsProtocol):
    """One connection and what its client owes. Times are of the event loop's clock."""

    def __init__(self, limiter: ConnectionLimiter, **rest: Any) -> None:
        super().__init__(**rest)
        self._limiter, self._limits = limiter, limiter.limits
        self._phase = Phase.NOTHING
        self.since_s = self.loop.time()  # that the phase began
        self._body_bytes = 0
        self._bare_bytes = 0  # received since the parser made something of what came
        self.is_cut = False  # it only has to send what was written before, or is gone already
        self._paused_s: float | None = None  # since when the answer has more than the transport keeps
        self._unread_bytes, self._unread_s = 0, self.since_s  # waiting to be sent, and when that last became less

    @property
    def asks_nothing(self) -> bool:
        """No request of it is being read, beyond its header, or answered."""
        return self._phase is not Phase.BODY and not self._answering

    @property
    def _answering(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    # ------------------------------------------------------------ from the transport and the parser

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limiter.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_cut:
            return
        self._bare_bytes += len(data)
        super().data_received(data)
        if self._bare_bytes > self._limits.max_header_bytes:
            self._refuse_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter(Phase.HEADER)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEADER:  # after a body come trailers, which must not pass for what the gate has seen
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_cut:
            return
        self._bare_bytes = 0
        self._enter(Phase.BODY)
        if self._header_bytes() > self._limits.max_header_bytes:
            self._refuse_header()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.drop(CloseReason.PIPELINED)
        else:
            super().on_headers_complete()

    def _header_bytes(self) -> int:
        """With ": " and the end of each line."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        self._body_bytes += len(body)
        if not self.is_cut:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._bare_bytes = 0
        self._enter(Phase.NOTHING)
        if not self.is_cut:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `look` sees to it
        if self._phase is Phase.NOTHING:
            self._enter(Phase.NOTHING)
        else:
            self._limiter.waits(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_s = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_s = None

    def _enter(self, phase: Phase) -> None:
        self._phase, self.since_s, self._body_bytes = phase, self.loop.time(), 0
        if phase is not Phase.BODY:
            self._limiter.waits(self)

    # ------------------------------------------------------------ deadlines

    def look(self, now_s: float) -> None:
        """Cuts the connection off where its client is late."""
        if self._leaves_unread(now_s):
            self.drop(CloseReason.UNREAD)
        elif self.is_cut or self.transport.is_closing():
            return
        elif self._phase is Phase.BODY:
            self._look_at_body(now_s)
        elif now_s - self.since_s > self._limits.timeout_s and not self._answering:
            if self._phase is Phase.HEADER:
                self.refuse(408, f"the header took over {self._limits.timeout_s:g} s", CloseReason.SLOW_HEADER)
            else:
                self._close(CloseReason.IDLE)

    def _look_at_body(self, now_s: float) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self.since_s = now_s
        allowed_s = self._limits.timeout_s + self._body_bytes / self._limits.body_bytes_per_s
        if now_s - self.since_s > allowed_s:
            self.refuse(408, f"{self._body_bytes} bytes of the body came in {allowed_s:.1f} s", CloseReason.SLOW_BODY)

    def _leaves_unread(self, now_s: float) -> bool:
        unread_bytes = self.transport.get_write_buffer_size()
        if not unread_bytes or unread_bytes < self._unread_bytes:
            self._unread_s = now_s
        self._unread_bytes = unread_bytes
        since_s = self._unread_s if self._paused_s is None else min(self._unread_s, self._paused_s)
        return bool(unread_bytes) and now_s - since_s > self._limits.timeout_s

    # ------------------------------------------------------------ ends

    def _refuse_header(self) -> None:
        most = self._limits.max_header_bytes
        self.refuse(431, f"the header has more than {most} bytes, the most that is allowed", CloseReason.LONG_HEADER)

    def refuse(self, status: int, message: str, reason: CloseReason) -> None:
        """Answers with an error, where no other answer has begun, and closes."""
        if self.is_cut:
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": reason.value}
            body = json.dumps({"error": error}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._close(reason)

    def _close(self, reason: CloseReason) -> None:
        """What was written before is still sent, if the client reads it in time."""
        self.is_cut = True
        self._limiter.left(self)
        self._limiter.note(reason)
        self.transport.close()

    def drop(self, reason: CloseReason) -> None:
        """At once, with whatever was not sent: the answer under way is cancelled."""
        if not self.is_cut:
            self._limiter.note(reason)
        self.is_cut = True
        self._limiter.left(self)
        self.transport.abort()


# A line for every HTTP request that was answered: at level info, and at debug for what is asked again and again.

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
            state: Mapping[str, Any] = scope.get("state", {})
            log_request(scope["method"], scope["path"], status, time.monotonic() - began_s, state, _level(scope))


def _level(scope: Scope) -> int:
    return logging.DEBUG if scope["path"] in POLLED else logging.INFO


def log_request(
    method: str, path: str, status: int, seconds: float, state: Mapping[str, Any], level: int = logging.INFO
) -> None:
    """Logs one line for a request; `state` has its id and its client."""
    client = state.get("client") or "nobody"
    fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6), "client": client}
    said = SERVED.set(state if "request_id" in state else None)
    words = method, path, status, seconds, client, state.get("request_id", "-")
    log.log(level, "%s %s %s %.3f s, %s, %s", *words, extra={"fields": fields})
    SERVED.reset(said)
