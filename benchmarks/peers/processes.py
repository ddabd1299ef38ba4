"""Servers as groups of processes: started apart, waited for until they answer, and always ended, children included."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.http_client import Server

GRACE_S = 15.0  # from SIGTERM to SIGKILL


class ServerFailed(Exception):
    """A server ended, or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """How one server is started; `health` is the path that answers 200 once it is ready."""

    argv: tuple[str, ...]
    port: int
    health: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    command: Command
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        return machine.cpu_seconds(self.process.pid) or 0.0

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    async def until_ready(self, timeout_s: float) -> None:
        """Raises ServerFailed where it ends or `timeout_s` seconds run out."""
        server = Server(f"http://127.0.0.1:{self.command.port}", "", timeout_s=5.0)
        end_s = time.monotonic() + timeout_s
        while not await server.answers(self.command.health):
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.command.argv[0]} ended with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > end_s:
                raise ServerFailed(f"{self.command.argv[0]} was not ready after {timeout_s:g} s:\n{self.tail()}")
            await asyncio.sleep(0.3)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, to the whole group; returns when the server is gone."""
        signal_group(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            signal_group(self.process.pid, signal.SIGKILL)
        signal_group(self.process.pid, signal.SIGKILL)  # children that outlived their parent
        self.process.wait()


def signal_group(pid: int, number: signal.Signals) -> None:
    """To every process of the group that `pid` leads, if any is left."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def start(command: Command, log: Path) -> Running:
    """In a session of its own, so that a Ctrl-C for us is not one for it, and its group can be ended as one."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
    return Running(command, process, log)


@asynccontextmanager
async def running(commands: Sequence[Command], logs: Path, timeout_s: float) -> AsyncIterator[list[Running]]:
    """All servers, ready. They are ended on the way out, whatever the way. Raises ServerFailed."""
    started: list[Running] = []
    try:
        for number, command in enumerate(commands):
            started.append(start(command, logs / f"server-{command.port}-{number}.log"))
        for each in started:
            await each.until_ready(timeout_s)
        yield started
    finally:
        for each in started:
            each.stop()


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
