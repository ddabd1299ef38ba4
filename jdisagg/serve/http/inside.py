"""The HTTP app called from within its own process: what asks so has all that HTTP has, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

log = logging.getLogger("jdisagg.http")
AHEAD = 64  # messages that the app may be ahead of who reads them
Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def messages(
    app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = (), client: str = "inside"
) -> AsyncGenerator[Message]:
    """What the app sends for a POST; closing the generator is its client leaving."""
    sent, room, gone = asyncio.Queue[Message | None](), asyncio.Semaphore(AHEAD), asyncio.Event()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await room.acquire()
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(_scope(path, body, headers, client), receive, send)
        except Exception:  # after its 500 was sent, as a server logs it
            log.exception("POST %s", path)
        finally:
            sent.put_nowait(None)

    work = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
            room.release()
    finally:
        gone.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _scope(path: str, body: bytes, headers: Iterable[Header], client: str) -> Message:
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": given,
        "client": (client, 0),
        "server": ("inside", 0),
    }


async def answered(app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = ()) -> Answer:
    """The whole answer to a POST."""
    status, told, parts = 500, dict[str, str](), list[bytes]()
    async with aclosing(messages(app, path, body, headers)) as sent:
        async for message in sent:
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {name.decode(): value.decode() for name, value in message.get("headers", ())}
            else:
                parts.append(message.get("body", b""))
    return Answer(status, told, b"".join(parts))
