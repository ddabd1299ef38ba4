"""Several real processes as one JAX world, each running a scene of `scenes.py`."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 240
TOLD = "told "


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def told_by_world(scene: str, size: int = 2, devices: int = 1) -> list[Any]:
    """What each of `size` processes with so many devices says. Raises AssertionError with all words where one fails."""
    port, environment = free_port(), {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as place, ExitStack() as files:
        words = [Path(place) / str(rank) for rank in range(size)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.engine.spanning", *map(str, (port, size, rank, devices)), scene],
                stdout=files.enter_context(words[rank].open("w")),
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
            )
            for rank in range(size)
        ]
        try:
            ended = _all_ended(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        told = [each.read_text() for each in words]
    assert ended and not any(process.returncode for process in started), "\n".join(each[-3000:] for each in told)
    return [json.loads(next(line for line in each.splitlines() if line.startswith(TOLD))[len(TOLD) :]) for each in told]


def _all_ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Waits until all have, or one has failed."""
    until_s = time.monotonic() + LONGEST_S
    while time.monotonic() < until_s and not any(process.poll() for process in processes):
        if all(process.poll() == 0 for process in processes):
            return True
        time.sleep(0.05)
    return False
