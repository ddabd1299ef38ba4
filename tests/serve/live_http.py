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

from tests.serve.scripted import ScriptedService


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


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The base URL of `app` while it is served."""
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off")
    server = ThreadServer(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield server.url
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def eventually(true: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits until `true()`; fails after `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.005)
