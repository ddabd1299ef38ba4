"""A real server process to be attacked, and a bystander whose stream must go on meanwhile.

    FLAGS = ("--queue_limit=20",)  # optional: further flags of the file's server, which is a tiny model's

    def test_an_attack(server: Server) -> None:
        with server.bystander():
            httpx.post(server.url + "/v1/completions", content=b"...")

Leaving the block asserts that no stream broke, that the longest gap between two of its events and the slowest /live
were within the bounds, and that the server runs. `-rP` shows what was measured.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fixtures import conformance
from tests.hostile import watcher
from tests.hostile.watcher import Felt

COMPILED = Path(tempfile.gettempdir()) / "jdisagg-hostile-programs"  # kept: the second start is much faster
TINY = (
    f"--model={conformance.ROOT / 'llama3'}",
    "--max_model_len=256",
    "--max_num_batched_tokens=64",
    "--max_num_seqs=8",
    "--mesh=colocated:tp1",
    f"--compile_cache_dir={COMPILED}",
)
START_S = 120.0
LAG = re.compile(r'^jdisagg_event_loop_lag_seconds_bucket\{le="([^"]*)".*\} (\S+)$', re.MULTILINE)
LATE_S = 1.0  # a bound of the metric's buckets
LONGEST_GAP_S = 1.5  # on a machine that is shared: alone it is some hundredths


@dataclass
class Server:
    """A running server process. `log()` is all it wrote."""

    process: subprocess.Popen[bytes]
    url: str
    grpc: str  # HOST:PORT
    log_path: Path
    key: str = ""
    felt: list[Felt] = field(default_factory=list)  # of every bystander so far

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def lags(self) -> dict[float, float]:
        """How often the event loop was late so far, by the upper bounds (seconds) of the metric's buckets."""
        counts = [(float(bound), float(count)) for bound, count in LAG.findall(self.get("/metrics"))]
        before = [0.0, *(count for _, count in counts)]
        return {bound: count - less for (bound, count), less in zip(counts, before, strict=False)}

    def rss_mib(self) -> float:
        """Memory the process has resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    @contextmanager
    def bystander(
        self, longest_gap_s: float = LONGEST_GAP_S, slowest_live_s: float = LONGEST_GAP_S
    ) -> Iterator[list[Felt]]:
        """Streams during the block and asserts at its end; the list then holds what was felt."""
        found, before = list[Felt](), self.lags()
        with _watching(self) as process:
            yield found
            felt = _felt(process)
        found.append(felt)
        self.felt.append(felt)
        print(f"measured: gap {felt.longest_gap_s:.3f} s, /live {felt.slowest_live_s:.3f} s, {felt.events} events")
        assert self.alive, f"the server ended with {self.process.returncode}:\n{self.log()[-3000:]}"
        assert not felt.failures, f"{len(felt.failures)} failures, the first: {felt.failures[:3]}"
        assert felt.longest_gap_s <= longest_gap_s, f"a stream stood still for {felt.longest_gap_s:.2f} s"
        assert felt.slowest_live_s <= slowest_live_s, f"/live took {felt.slowest_live_s:.2f} s"
        late_s = max((bound for bound, count in self.lags().items() if count > before.get(bound, 0)), default=0.0)
        print(f"measured: event loop late by under {late_s:g} s")
        assert late_s <= max(LATE_S, longest_gap_s), f"the event loop was late by under {late_s:g} s, over the bound"


@contextmanager
def _watching(server: Server) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, watcher.__file__, server.url, server.key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        assert first == "watching", f"the bystander got no stream before the attack: {first}\n{server.log()[-3000:]}"
        yield process
    finally:
        process.kill()
        process.communicate()


def _felt(process: subprocess.Popen[str]) -> Felt:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    felt = Felt(**json.loads(process.stdout.readline()))
    process.stdin = None  # communicate() would flush what is closed
    return felt


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(folder: Path, flags: Sequence[str] = (), key: str = "", model: Sequence[str] = TINY) -> Iterator[Server]:
    """A server of its own with these flags, ready; ended with the block."""
    port, grpc_port, log_path = free_port(), free_port(), folder / f"server-{time.monotonic_ns()}.log"
    ports = (f"--http_port={port}", f"--grpc_port={grpc_port}", *((f"--api_key={key}",) if key else ()))
    command = [sys.executable, "-m", "jdisagg.launch", *model, *ports, *flags]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    server = Server(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", log_path, key)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        if server.alive:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def _wait_until_ready(server: Server) -> None:
    end_s = time.monotonic() + START_S
    while not _ready(server):
        assert server.alive, f"the server ended with {server.process.returncode}:\n{server.log()[-3000:]}"
        assert time.monotonic() < end_s, f"not ready in {START_S:g} s:\n{server.log()[-3000:]}"
        time.sleep(0.1)


def _ready(server: Server) -> bool:
    try:
        return bool(server.get("/ready"))
    except OSError:
        return False
