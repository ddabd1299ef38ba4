"""What it costs to serve from several processes: `python -m benchmarks.processes --help`.

The same prompts over HTTP to one process, and to a router, a prefill and a decode process whose KV crosses by shared
memory or by TCP. All stacks stand side by side and are asked in turn, round after round; medians of rounds are told.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from benchmarks.figures import SLO, Figures
from benchmarks.http_client import Server, first_model
from benchmarks.serve import Plan, Target, measure_level
from benchmarks.workload import Lengths, Workload

FLAGS = flags.FlagValues()
MESH = flags.DEFINE_string("mesh", "prefill:tp2,decode:pp2", "of every stack", flag_values=FLAGS)
ROUNDS = flags.DEFINE_integer("rounds", 5, "times that each stack is asked", flag_values=FLAGS)
CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "4"], "streams at once", flag_values=FLAGS)
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 12, "a round", flag_values=FLAGS)
PROMPT_TOKENS = flags.DEFINE_string("prompt_tokens", "64:256", "length, or least:most", flag_values=FLAGS)
OUTPUT_TOKENS = flags.DEFINE_string("output_tokens", "64", "length, or least:most", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)

STACKS = {"one process": "", "three, shared memory": "shm", "three, TCP": "tcp"}
START_S = 600.0  # longest wait for a stack
VOCAB_SIZE = 4096  # token ids are drawn below this


@dataclass(frozen=True)
class Told:
    """Medians of rounds of one stack at one level."""

    stack: str
    streams: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(stack: ExitStack, folder: Path, transport: str, slots: int) -> str:
    """The URL of a stack whose processes end with `stack`."""
    port, control = free_port(), free_port()
    front = [f"--http_port={port}", "--grpc_port=-1"]
    shared = [f"--mesh={MESH.value}", f"--max_num_seqs={slots}", "--max_model_len=1024", "--kv_tokens=8192"]
    shared += [f"--compile_cache_dir={folder / 'compiled'}"]
    if not transport:
        spawn(stack, [*shared, *front])
        return f"http://127.0.0.1:{port}"
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("the secret of a benchmark on one machine")
    shared += [f"--secret_file={secret}", f"--transport={transport}"]
    spawn(stack, [*shared, *front, "--role=router", f"--control_port={control}"])
    for role in ("prefill", "decode"):
        spawn(stack, [*shared, f"--role={role}", f"--router=127.0.0.1:{control}"])
    return f"http://127.0.0.1:{port}"


def spawn(stack: ExitStack, given: Sequence[str]) -> None:
    command = [sys.executable, "-m", "jdisagg.launch", *given]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def await_ready(url: str) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ValueError(f"the stack at {url} was not ready within {START_S:g} s")


def told(stack: str, streams: int, rounds: Sequence[Figures]) -> Told:
    def middle(values: Sequence[Any]) -> float:
        return median(each.p50 for each in values if each is not None)

    speed = median(each.output_tokens_per_s for each in rounds)
    return Told(stack, streams, speed, middle([r.ttft_ms for r in rounds]), middle([r.tpot_ms for r in rounds]))


def run(console: Console) -> list[Told]:
    levels = [int(each) for each in CONCURRENCY.value]
    workload = Workload(Lengths.parse(PROMPT_TOKENS.value), Lengths.parse(OUTPUT_TOKENS.value), VOCAB_SIZE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets: dict[str, Target] = {}
        for name, transport in STACKS.items():
            console.print(f"starting {name}")
            url = start(stack, folder, transport, max(levels))
            await_ready(url)
            server = Server(f"{url}/v1", asyncio.run(first_model(f"{url}/v1")), {}, 300.0)
            targets[name] = Target(name, server.ask, lambda: None)
        found: dict[tuple[str, int], list[Figures]] = {}
        for number in range(ROUNDS.value):
            plan = Plan(tuple(levels), NUM_REQUESTS.value, workload, number, SLO(1e9, 1e9))
            for level in levels:
                for name, target in targets.items():
                    figures = asyncio.run(measure_level(target, plan, level, lambda *_: None))
                    found.setdefault((name, level), []).append(figures)
            console.print(f"round {number + 1} of {ROUNDS.value}")
    return [told(name, level, rounds) for (name, level), rounds in found.items()]


def show(console: Console, rows: Sequence[Told]) -> None:
    table = Table("stack", "streams", "tokens/s", "TTFT ms", "TPOT ms")
    for row in rows:
        table.add_row(row.stack, str(row.streams), *(f"{x:.1f}" for x in (row.tokens_per_s, row.ttft_ms, row.tpot_ms)))
    console.print(table)


def main() -> int:
    console = Console()
    rows = run(console)
    show(console, rows)
    if OUTPUT.value:
        asked = {"mesh": MESH.value, "prompt_tokens": PROMPT_TOKENS.value, "output_tokens": OUTPUT_TOKENS.value}
        asked |= {"rounds": ROUNDS.value, "num_requests": NUM_REQUESTS.value}
        levels = [{name: getattr(row, name) for name in Told.__dataclass_fields__} for row in rows]
        report.write_json(OUTPUT.value, machine.described() | {"workload": asked, "medians": levels})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
