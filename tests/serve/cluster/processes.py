"""A cluster as a user starts it: processes of their own, small enough to warm up in seconds."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.environment import quick
from tests.ports import free_port

SMALL = (
    "--kv_tokens=2048",
    "--max_model_len=512",
    "--max_num_seqs=4",
    "--max_num_batched_tokens=64",
    "--prefill_buckets=64",
    "--page_size=16",
    "--log_level=info",
    "--drain_s=30",
)
PATIENCE_S = 240.0  # the machine may be busy
STEADY_S = 2.0  # longer than a status report takes


def private(path: Path, text: str) -> Path:
    """A new file that its owner alone may read."""
    path.touch(0o600)
    path.write_text(text)
    return path


def until(true: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """The first truth that `true()` tells."""
    end_s = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


@dataclass
class Process:
    """One process, its output in a file."""

    role: str
    popen: subprocess.Popen[bytes]
    log: Path

    def said(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.log.read_text())

    def await_word(self, pattern: str) -> re.Match[str]:
        return until(lambda: self.said(pattern) or self._dead(), f"{pattern!r} in {self.log}")

    def _dead(self) -> None:
        assert self.popen.poll() is None, f"{self.role} ended: {self.log.read_text()[-3000:]}"

    @property
    def worker(self) -> str:
        """The name of its worker, once it is ready."""
        return self.await_word(r"ready\s+(\S+) for ")[1]

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@dataclass
class Cluster:
    """Ports, files and the processes started so far."""

    folder: Path
    cache: Path
    mesh: str = "prefill:tp2,decode:pp2"
    coordination: str = ""  # the service that every process is told of
    http: int = field(default_factory=free_port)
    control: int = field(default_factory=free_port)
    started: list[Process] = field(default_factory=list)

    def start(self, role: str, *more: str) -> Process:
        secret = self.folder / "secret"
        if not secret.exists():
            private(secret, "thirty two bytes of no real secret")
        flags = [
            f"--role={role}",
            f"--mesh={self.mesh}",
            f"--secret_file={secret}",
            f"--compile_cache_dir={self.cache}",
            *SMALL,
        ]
        if "router" in role or role == "all":
            flags += [f"--http_port={self.http}", "--grpc_port=-1", f"--control_port={self.control}"]
        if self.coordination:
            flags += [f"--coordination={self.coordination}"]
        elif "router" not in role and role != "all":
            flags += [f"--router=127.0.0.1:{self.control}"]
        log = self.folder / f"{len(self.started)}-{role}.log"
        process = Process(role, launch([*flags, *more], log), log)
        self.started.append(process)
        return process

    def start_group(self, role: str, *more: str, size: int = 2) -> list[Process]:
        """The processes of one worker, its leader first."""
        place = [f"--group={role}-{len(self.started)}", f"--coordinator=127.0.0.1:{free_port()}"]
        place += [f"--group_size={size}", "--peer_silence_s=8", *more]
        return [self.start(role, f"--group_rank={rank}", *place) for rank in range(size)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def await_ready(self) -> None:
        until(lambda: self._any_dead() or status(f"{self.url}/ready") == 200, "a cluster that is ready")

    def await_workers(self, *processes: Process) -> None:
        """Until the router knows just these."""
        names = {process.worker for process in processes}
        until(lambda: set(self.pages()) == names, f"just the workers {names}")

    def _any_dead(self) -> None:
        for process in self.started:
            assert process.popen.poll() in (None, -9, 0), process.log.read_text()[-3000:]

    def stop(self) -> None:
        for process in self.started:
            process.kill()

    # ------------------------------------------------------------ what the router says

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        rows = re.findall(rf"^jdisagg_{name}{{(.*?)}} (\S+)$", text, re.MULTILINE)
        return [(dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value)) for labels, value in rows]

    def debug(self, path: str) -> Any:
        """What `/debug/` + path shows."""
        return json.load(urllib.request.urlopen(f"{self.url}/debug/{path}", timeout=30))

    def pages(self) -> dict[str, tuple[int, int]]:
        """(free, used) of each worker."""
        pages: dict[str, dict[str, int]] = {}
        for labels, value in self.samples("kv_pages"):
            pages.setdefault(labels["worker"], {})[labels["state"]] = int(value)
        return {worker: (each["free"], each["used"]) for worker, each in pages.items()}

    def used(self, worker: str) -> int:
        return self.pages().get(worker, (0, 0))[1]

    def held(self) -> dict[str, float]:
        """What is not free, by whose it is."""
        held = {f"pages of {worker}": float(used) for worker, (_, used) in self.pages().items()}
        held |= {f"{labels['side']} by {labels['worker']}": value for labels, value in self.samples("transport_bytes")}
        return {what: value for what, value in held.items() if value}

    def await_all_free(self) -> None:
        """Every page of every worker is free, no transport holds a byte, and it stays so."""
        end_s, since_s = time.monotonic() + PATIENCE_S, time.monotonic()
        while time.monotonic() < since_s + STEADY_S:
            if held := self.held():
                since_s = time.monotonic()
                assert since_s < end_s, f"still held: {held}"
            time.sleep(0.05)

    # ------------------------------------------------------------ requests

    def ask(self, **body: Any) -> Answer:
        return Answer([*self.stream(**body)])

    def ask_all(self, bodies: Iterable[dict[str, Any]]) -> list[Answer]:
        """At once: company changes no answer."""
        with ThreadPoolExecutor(16) as pool:
            return [*pool.map(lambda body: self.ask(**body), bodies)]

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The choices of each piece, as they come; an error is the last of them."""
        data = json.dumps({"model": "embedded", "stream": True, **body}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            for line in unbroken(answer):
                if line.startswith(b"data: {"):
                    piece = json.loads(line.removeprefix(b"data: "))
                    yield piece["choices"][0] if piece.get("choices") else piece

    def begin(self, pool: ThreadPoolExecutor, pieces: int = 1, **body: Any) -> Future[Answer]:
        """A request that is under way: it has said `pieces` pieces, or with 0 has only been sent."""
        stream, heard = self.stream(**body), []
        for _ in range(pieces):
            heard.append(next(stream))
        return pool.submit(lambda: Answer([*heard, *stream]))


@dataclass
class Answer:
    """A stream to its end."""

    pieces: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return "".join(piece.get("text", "") for piece in self.pieces)

    @property
    def finish(self) -> str | None:
        reasons = [piece["finish_reason"] for piece in self.pieces if piece.get("finish_reason")]
        return reasons[-1] if reasons else None

    @property
    def error(self) -> dict[str, Any] | None:
        errors = [piece["error"] for piece in self.pieces if "error" in piece]
        return errors[-1] if errors else None

    @property
    def tokens(self) -> list[str]:
        return [token for each in self._logprobs for token in each["tokens"]]

    @property
    def logprobs(self) -> list[float]:
        return [value for each in self._logprobs for value in each["token_logprobs"]]

    @property
    def _logprobs(self) -> list[dict[str, Any]]:
        return [piece["logprobs"] for piece in self.pieces if piece.get("logprobs")]


def unbroken(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines until the server breaks off, if it does."""
    with contextlib.suppress(OSError, HTTPException):
        yield from lines


def launch(flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = quick()
    environment.pop("PJRT_NPROC", None)
    command = [sys.executable, "-m", "jdisagg.launch", *flags]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def status(url: str) -> int | None:
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
