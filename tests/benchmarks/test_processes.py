"""Servers are waited for and always ended, with their children."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.processes import Command, ServerFailed, free_port, running

SERVE = """
import http.server, subprocess, sys
subprocess.Popen(["sleep", "100"])
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def server(port: int) -> Command:
    return Command((sys.executable, "-c", SERVE, str(port)), port, "/")


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_ready_inside_and_gone_with_its_children_outside(tmp_path: Path) -> None:
    async def use() -> int:
        async with running([server(free_port())], tmp_path, timeout_s=60) as (one,):
            assert alive(one.process.pid)
            assert one.cpu_s() > 0
            return one.process.pid

    group = asyncio.run(use())
    end_s = time.monotonic() + 60  # an orphan is reaped by whoever adopts it
    while alive(group) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not alive(group)


def test_an_interruption_ends_the_server_too(tmp_path: Path) -> None:
    found = []

    async def use() -> None:
        async with running([server(free_port())], tmp_path, timeout_s=60) as (one,):
            found.append(one.process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(use())
    assert found[0].returncode is not None


def test_a_server_that_ends_is_told_of_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = Command((sys.executable, "-c", "print('no such model'); raise SystemExit(3)"), free_port(), "/")

    async def use() -> None:
        async with running([broken], tmp_path, timeout_s=60):
            raise AssertionError("it cannot be ready")

    with pytest.raises(ServerFailed, match="ended with 3:\nno such model"):
        asyncio.run(use())
