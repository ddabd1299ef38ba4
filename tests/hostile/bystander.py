"""A real server process to be attacked, and a bystander whose stream must go on meanwhile.

    FLAGS = ("--queue_limit=20",)  # optional: further flags of the file's server, which is a tiny model's

    def test_an_attack(server: Server) -> None:
        with server.bystander():
            httpx.post(server.url + "/v1/completions", content=b"...")

Leaving the block asserts that no stream broke, that the longest gap between two of its events and the slowest /live
were within the bounds, and that the server runs. What its threads waited for a core of the machine, which others use as
well, is added to the bounds. `-rP` shows what was measured.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.environment import quick
from tests.fixtures import conformance
from tests.hostile import watcher
from tests.hostile.watcher import Felt
from tests.ports import free_port

COMPILED = os.environ["JAX_COMPILATION_CACHE_DIR"]  # that of all tests: the second start is much faster
TINY = (
    f"--model={conformance.ROOT / 'llama3'}",
    "--max_model_len=256",
    "--max_num_batched_tokens=64",
    "--max_num_seqs=8",
    "--mesh=colocated:tp1",
    f"--compile_cache_dir={COMPILED}",
)
START_S = 240.0
LAG = re.compile(r'^jdisagg_event_loop_lag_seconds_bucket\{le="([^"]*)".*\} (\S+)$', re.MULTILINE)
LATE_S = 1.0  # a bound of the metric's buckets
LONGEST_GAP_S = 1.5  # alone it is some hundredths
CROWDED = 2.0  # so many times what the thread waited for a core that waited longest


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

    def queued_s(self) -> dict[str, float]:
        """By thread, for how long it could have run so far and no core of the machine was free."""
        waited = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        return waited

    @contextmanager
    def bystander(
        self, longest_gap_s: float = LONGEST_GAP_S, slowest_live_s: float = LONGEST_GAP_S
    ) -> Iterator[list[Felt]]:
        """Streams during the block and asserts at its end; the list then holds what was felt."""
        found, before, queued_s = list[Felt](), self.lags(), self.queued_s()
        with _watching(self) as process:
            yield found
            felt = _felt(process)
        found.append(felt)
        self.felt.append(felt)
        assert self.alive, f"the server ended with {self.process.returncode}:\n{self.log()[-3000:]}"
        more_s = CROWDED * max(
            (so_far - queued_s.get(task, 0.0) for task, so_far in self.queued_s().items()), default=0
        )
        longest_gap_s, slowest_live_s = longest_gap_s + more_s, slowest_live_s + more_s
        print(f"measured: gap {felt.longest_gap_s:.3f} s, /live {felt.slowest_live_s:.3f} s, {felt.events} events")
        print(f"the machine is crowded: {more_s:.3f} s more are granted")
        assert not felt.failures, f"{len(felt.failures)} failures, the first: {felt.failures[:3]}"
        assert felt.longest_gap_s <= longest_gap_s, f"a stream stood still for {felt.longest_gap_s:.2f} s"
        assert felt.slowest_live_s <= slowest_live_s, f"/live took {felt.slowest_live_s:.2f} s"
        late_s = max((bound for bound, count in self.lags().items() if count > before.get(bound, 0)), default=0.0)
        print(f"measured: event loop late by under {late_s:g} s")
        assert late_s <= max(LATE_S + more_s, longest_gap_s), (
            f"the event loop was late by under {late_s:g} s, over the bound"
        )


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


def until(true: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Waits until `true()`; fails after `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.05)


@contextmanager
def serving(folder: Path, flags: Sequence[str] = (), key: str = "", model: Sequence[str] = TINY) -> Iterator[Server]:
    """A server of its own with these flags, ready; ended with the block."""
    port, grpc_port, log_path = free_port(), free_port(), folder / f"server-{time.monotonic_ns()}.log"
    ports = (f"--http_port={port}", f"--grpc_port={grpc_port}", *((f"--api_key={key}",) if key else ()))
    command = [sys.executable, "-m", "jdisagg.launch", *model, *ports, *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=quick())
    server = Server(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", log_path, key)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        if server.alive:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)


def _wait_until_ready(server: Server) -> None:
    end_s = time.monotonic() + START_S
    while server.alive and not _ready(server):
        assert time.monotonic() < end_s, f"not ready in {START_S:g} s:\n{server.log()[-3000:]}"
        time.sleep(0.1)
    assert server.alive, f"the server ended with {server.process.returncode}:\n{server.log()[-3000:]}"


def _ready(server: Server) -> bool:
    try:
        return bool(server.get("/ready"))
    except OSError:
        return False
