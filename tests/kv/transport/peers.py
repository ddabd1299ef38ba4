"""Starts, asks and kills the other process of a conformance test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.environment import QUICK_XLA

ROOT = Path(__file__).parents[3]


class Peer:
    """A process that runs peer.py; `ask` waits for its answer."""

    def __init__(self, names: list[str], inside: Sequence[str] = (), **config: Any) -> None:
        """`inside` comes before its command."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK_XLA}",
        }
        options = json.dumps({"names": names} | config)
        self.process = subprocess.Popen(
            [*inside, sys.executable, str(Path(__file__).parent / "peer.py"), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            cwd=ROOT,
        )
        self.addresses: dict[str, str] = self.hear()["ready"]

    def tell(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        self.tell(do, **command)
        return self.hear()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
