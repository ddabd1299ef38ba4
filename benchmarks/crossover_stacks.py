"""The three architectures on two devices: processes of this project, each worker pinned to a core of its own.

Every stack is a router process (not pinned, as the client is not) and its workers. A worker has one core and one
thread of XLA, and as many decode slots as it would hold at the highest level.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.crossover_figures import DISAGGREGATED, REPLICATED, SINGLE
from benchmarks.http_client import Server, first_model
from benchmarks.peers.contestants import MALLOC
from benchmarks.peers.processes import Command, Running, ServerFailed, free_port, start

ONE_THREAD = {"PJRT_NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}
READY = "ready "  # how a line of a worker's log begins once it has joined
PAUSE_S = 0.3  # between two looks at a starting stack
SETTLE_S = 1.0  # a worker says that it is ready a moment before its router knows


@dataclass(frozen=True, slots=True)
class Plan:
    """How an architecture is started. workers: the roles of each, in the order of the cores."""

    name: str
    mesh: str  # as every process is told; each makes its own roles' workers
    workers: tuple[str, ...]
    simulated: str  # the mesh of all workers together
    routing: str = "least_loaded"

    def slots(self, streams: int) -> int:
        """Decode slots of one worker that together hold `streams`."""
        return -(-streams // sum("decode" in roles for roles in self.workers))


PLANS = (
    Plan(SINGLE, "colocated:1xtp1", ("prefill,decode",), "colocated:1xtp1"),
    Plan(REPLICATED, "colocated:1xtp1", ("prefill,decode", "prefill,decode"), "colocated:2xtp1", "round_robin"),
    Plan(DISAGGREGATED, "prefill:tp1,decode:tp1", ("prefill", "decode"), "prefill:tp1,decode:tp1"),
)


@dataclass(frozen=True, slots=True)
class Stack:
    """A started architecture: where it is asked, and the workers by the names of their roles."""

    plan: Plan
    url: str
    router: Running
    workers: Mapping[str, Running]

    def cpu_s(self) -> dict[str, float]:
        return {name: running.cpu_s() for name, running in self.workers.items()}

    def ready(self) -> bool:
        """Whether every worker has been let in: one that has not joined would be measured as one that idles."""
        warm = all(READY in each.log.read_text(errors="replace") for each in (self.router, *self.workers.values()))
        return warm and asyncio.run(Server(self.url.removesuffix("/v1"), "").answers("/ready"))

    def server(self, timeout_s: float) -> Server:
        return Server(self.url, asyncio.run(first_model(self.url)), {"ledger": True}, timeout_s)


def names_of(plan: Plan) -> list[str]:
    """Workers by their roles; colocated ones are counted."""
    both = [f"colocated {number}" for number in range(1, len(plan.workers) + 1)]
    return [both[index] if "," in roles else roles for index, roles in enumerate(plan.workers)]


def commands(plan: Plan, cores: Sequence[int], given: Sequence[str], slots: int, secret: Path) -> list[Command]:
    """The router's, then the workers'."""
    port, control = free_port(), free_port()
    launch = (
        sys.executable,
        "-m",
        "jdisagg.launch",
        f"--mesh={plan.mesh}",
        f"--secret_file={secret}",
        "--platform=cpu",
    )
    launch += (f"--max_num_seqs={slots}", *given)
    front = (f"--http_port={port}", "--grpc_port=-1", f"--control_port={control}", f"--routing={plan.routing}")
    found = [Command((*launch, "--role=router", *front), port, "/ready")]
    for core, roles in zip(cores, plan.workers, strict=False):
        pinned = ("taskset", "-c", str(core), *launch, f"--role={roles}", f"--router=127.0.0.1:{control}")
        found.append(Command(pinned, port, "/ready", MALLOC | ONE_THREAD))
    return found


@contextmanager
def standing(
    plans: Sequence[Plan], cores: Sequence[int], given: Sequence[str], streams: int, folder: Path, timeout_s: float
) -> Iterator[list[Stack]]:
    """All stacks, ready, with slots for `streams`; ended on the way out. Raises ServerFailed, or ValueError."""
    if shutil.which("taskset") is None:
        raise ValueError("workers are pinned to cores by taskset (util-linux), which is not here")
    if len(cores) < 2:
        raise ValueError(f"two devices are two cores, this process may use {len(cores)}")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("the secret of a benchmark on one machine")
    with ExitStack() as ends:
        stacks = []
        for plan in plans:
            running = []
            for number, command in enumerate(commands(plan, cores, given, plan.slots(streams), secret)):
                running.append(start(command, folder / f"{plan.name}-{number}.log"))
                ends.callback(running[-1].stop)
            url = f"http://127.0.0.1:{running[0].command.port}/v1"
            stacks.append(Stack(plan, url, running[0], dict(zip(names_of(plan), running[1:], strict=True))))
        _await(stacks, timeout_s)
        yield stacks


def _await(stacks: Sequence[Stack], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while waiting := [stack for stack in stacks if not stack.ready()]:
        for running in (each for stack in waiting for each in (stack.router, *stack.workers.values())):
            if running.process.poll() is not None:
                raise ServerFailed(f"{running.log.name} ended with {running.process.returncode}:\n{running.tail()}")
        if time.monotonic() > end_s:
            raise ServerFailed(f"{waiting[0].plan.name} was not ready after {timeout_s:g} s")
        time.sleep(PAUSE_S)
    time.sleep(SETTLE_S)
