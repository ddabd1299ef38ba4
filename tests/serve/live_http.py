"""A real uvicorn server on a free loopback port, on its own thread, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from tests.serve.scripted import ScriptedService

NOBODY_READS = 499  # the client has left


class Front:
    """A served `ScriptedService` and a client for it."""

    def __init__(self, service: ScriptedService, url: str) -> None:
        self.service, self.url = service, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class ThreadServer(uvicorn.Server):
    """Runs apart from the main thread, where uvicorn cannot take signals."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


class Documented:
    """ASGI middleware: keeps in `wrong` what the app answered and its OpenAPI document does not say it may."""

    def __init__(self, app: FastAPI) -> None:
        self._app, self.wrong = app, set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != NOBODY_READS:
                self._note(scope["path"], scope["method"].lower(), message["status"])
            await send(message)

        await self._app(scope, receive, noted)

    def _note(self, path: str, method: str, status: int) -> None:
        for template, operations in self._app.openapi()["paths"].items():
            fixed, variable, _ = template.partition("{")
            fits = path.startswith(fixed) and path != fixed if variable else path == template
            if fits and method in operations and str(status) not in operations[method]["responses"]:
                self.wrong.add(f"{method} {template} answered {status}")


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The base URL of `app` while it is served. At the end every status it answered with must be documented."""
    documented = Documented(app)
    config = uvicorn.Config(documented, port=0, log_level="warning", access_log=False, lifespan="off")
    server = ThreadServer(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield server.url
    finally:
        server.should_exit = True
        thread.join(timeout=60)
    assert not documented.wrong


def eventually(true: Callable[[], bool], within_s: float = 60.0) -> None:
    """Waits until `true()`; fails after `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.005)
