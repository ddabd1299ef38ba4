"""An hour of everything that clients do wrong, and what is left of the server: `python -m benchmarks.soak --help`.

A server process with a prefill and a decode worker (--apart: a router and two more processes) serves a tiny model of
the tests: fronts, router, handoff and driver are the same for any. A thousand connections stay open and send --requests
in --minutes: answers and streams, and cancels, slow and deaf readers, malformed bodies, all that is over a limit, TLS
where none is spoken, port scans; every minute comes a burst over the queue's limit and a flood of strangers over the
connections'. Exit code 1 where memory rose, a page stayed out, a program was compiled, or the server made a mistake.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report, soak_watch
from benchmarks.peers.processes import Command, Running, free_port, start
from benchmarks.soak_clients import CLIENT_S, HOST, JOBS, Book, Caller, Ports, serve, whole

FLAGS = flags.FlagValues()
MINUTES = flags.DEFINE_float("minutes", 60.0, "in which requests are sent", flag_values=FLAGS)
REQUESTS = flags.DEFINE_integer("requests", 100_000, "in all", flag_values=FLAGS)
CONNECTIONS = flags.DEFINE_integer("connections", 1000, "that stay open", flag_values=FLAGS)
MODEL = flags.DEFINE_string("model", "tests/fixtures/conformance/llama3", "small, of 256 tokens", flag_values=FLAGS)
APART = flags.DEFINE_bool("apart", False, "a process each for the router, prefill and decode", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)

ALONE, ROLES = "server", ("router", "prefill", "decode")
START_S, SETTLE_S = 300.0, 120.0  # longest waits: for the processes, and for pages to come back
SAMPLES = 720
BURST_S, BURST = 60.0, 150  # so many prompts at once, that often
STRANGERS = 300  # over what may be open, as often
SPARE = 100  # connections that may be open beside those that stay
QUEUE = 64
SHOWN_FAULTS = 20
JUDGED_S = 900.0  # shorter runs say nothing of memory
OWN = {"descriptors": 64, "threads": 96}  # that a process may have of its own once it has worked
FLAT_SHARE, FLAT_MIB = 0.02, 8.0  # of its memory, or so much, may a process have risen by an hour
OUR_FAULT = re.compile(r"^Traceback|\b(?:ERROR|CRITICAL)\b", re.MULTILINE)


@dataclass(slots=True)
class Stack:
    ports: Ports
    running: dict[str, Running]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports.http}"

    @property
    def pids(self) -> dict[str, int]:
        return {role: each.process.pid for role, each in self.running.items()}

    def complaints(self) -> dict[str, int]:
        """Tracebacks and errors in each log."""
        logs = {role: each.log.read_text(errors="replace") for role, each in self.running.items()}
        return {role: len(OUR_FAULT.findall(text)) for role, text in logs.items()}


def commands(folder: Path, ports: Ports) -> Iterator[tuple[str, Command]]:
    shared = [f"--model={MODEL.value}", "--mesh=prefill:tp1,decode:tp1", "--page_size=16", "--prefill_buckets=64,128"]
    shared += ["--max_num_batched_tokens=128", "--log_level=warning"]
    front = [f"--http_port={ports.http}", f"--grpc_port={ports.grpc}", f"--client_timeout_s={CLIENT_S}"]
    front += [f"--max_connections={CONNECTIONS.value + SPARE}", f"--queue_limit={QUEUE}"]
    if not APART.value:
        yield ALONE, command(ports, *shared, *front)
        return
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("the secret of a soak on one machine")
    for role in ROLES:
        own = [*front, f"--control_port={ports.control}"] if role == "router" else [f"--router={HOST}:{ports.control}"]
        yield role, command(ports, f"--role={role}", f"--secret_file={secret}", *shared, *own)


def command(ports: Ports, *given: str) -> Command:
    return Command((sys.executable, "-m", "jdisagg.launch", *given), ports.http, "/ready")


async def soak(stack: Stack, book: Book, samples: list[soak_watch.Sample], console: Console) -> float:
    """Seconds that it took; the book and the samples are filled."""
    jobs: asyncio.Queue[Any] = asyncio.Queue()
    callers = [Caller(stack.ports, seed) for seed in range(CONNECTIONS.value)]
    began_s = time.monotonic()
    tasks = [asyncio.create_task(serve(each, jobs, book)) for each in callers]
    looks = [asyncio.create_task(watch(stack, book, samples, began_s, console))]
    looks += [asyncio.create_task(floods(stack.ports))]
    await send(jobs, began_s)
    await jobs.join()
    took_s = time.monotonic() - began_s
    for each in (*tasks, *looks):
        each.cancel()
    await asyncio.gather(*tasks, *looks, return_exceptions=True)
    for each in callers:
        await each.close()
    return took_s


async def send(jobs: asyncio.Queue[Any], began_s: float) -> None:
    """Every job when it is due, so many of each kind as its share says, in an order that is the same every time."""
    draw, every_s = random.Random(0), 60 * MINUTES.value / REQUESTS.value
    kinds, shares = [*JOBS], [*JOBS.values()]
    sent, next_burst_s = 0, min(BURST_S, 30 * MINUTES.value)
    while sent < REQUESTS.value:
        at_s = time.monotonic() - began_s
        if at_s > next_burst_s:
            next_burst_s += BURST_S
            due = [whole] * min(BURST, REQUESTS.value - sent)
        else:
            due = draw.choices(kinds, shares, k=max(0, min(int(at_s / every_s), REQUESTS.value) - sent))
        for job in due:
            jobs.put_nowait(job)
        sent += len(due)
        await asyncio.sleep(min(0.1, every_s))


async def floods(ports: Ports) -> None:
    """Strangers who say nothing, more than there is room for."""
    while True:
        strangers = []
        for _ in range(STRANGERS):
            with suppress(OSError):
                strangers.append((await asyncio.open_connection(HOST, ports.http))[1])
        await asyncio.sleep(BURST_S / 4)
        for each in strangers:
            each.close()
        await asyncio.sleep(3 * BURST_S / 4)


async def watch(stack: Stack, book: Book, samples: list[soak_watch.Sample], began_s: float, console: Console) -> None:
    every_s, tenth, faults = max(1.0, 60 * MINUTES.value / SAMPLES), 0, 0
    while True:
        try:
            sample = await asyncio.to_thread(soak_watch.watched, stack.url, stack.pids, began_s)
        except TimeoutError:  # the machine has more to do than this; who asks for work is told of a server that is slow
            continue
        samples.append(sample | {"jobs": book.jobs})
        if 10 * book.jobs // REQUESTS.value > tenth or (len(book.faults) > faults and faults < SHOWN_FAULTS):
            faults, tenth = len(book.faults), 10 * book.jobs // REQUESTS.value
            last = f", the last: {book.faults[-1]}" if book.faults else ""
            console.print(
                f"{sample['at_s']:.0f} s: {book.jobs} jobs, {faults} faults{last}", highlight=False, markup=False
            )
        await asyncio.sleep(every_s)


async def settled(stack: Stack) -> dict[str, float]:
    """What is still held when everything is back, or the time for it is over: empty where all is well."""
    end_s = time.monotonic() + SETTLE_S
    while (left := await asyncio.to_thread(soak_watch.held, stack.url)) and time.monotonic() < end_s:
        await asyncio.sleep(1.0)
    return left


def kept_too_many(role: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """In words: what a process has more of than when it was ready, and than it may have of its own."""
    found = []
    for name, own in OWN.items():
        most, left = max(before[f"{role} {name}"], own), after[f"{role} {name}"]
        found += [f"{role} has {left:g} {name} and had {most:g}"] if left > most else []
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """All that was seen."""

    before: dict[str, float]
    samples: list[soak_watch.Sample]
    after: dict[str, float]
    held: dict[str, float]
    complaints: dict[str, int]
    book: Book
    took_s: float

    def memory(self) -> dict[str, dict[str, float]]:
        """MiB of each process: ready, in the middle, at the end, and by how much the second half rose in an hour."""
        told = {}
        for role in self.complaints:
            name = f"{role} rss_mib"
            middle = self.samples[len(self.samples) // 2][name]
            rise = soak_watch.rise_per_hour(self.samples, name)
            told[role] = {"ready": self.before[name], "middle": middle, "end": self.samples[-1][name], "rise": rise}
        return {role: {key: round(value, 2) for key, value in each.items()} for role, each in told.items()}

    def wrong(self) -> list[str]:
        """What is the server's fault, in words; empty after a good run."""
        wrong = [f"{len(self.book.faults)} faults, the first: {self.book.faults[0]}"] if self.book.faults else []
        wrong += [f"{name} is still {value:g}" for name, value in self.held.items()]
        wrong += [f"{role} logged {count} errors" for role, count in self.complaints.items() if count]
        if self.after["recompiles"]:
            wrong.append(f"{self.after['recompiles']:g} programs were compiled meanwhile")
        for role in self.complaints:
            wrong += kept_too_many(role, self.before, self.after)
        return wrong + self.risen()

    def risen(self) -> list[str]:
        """An hour tells what a minute cannot: shorter runs are not judged."""
        return [
            f"{role} rises by {each['rise']:.1f} MiB an hour at {each['end']:.0f} MiB"
            for role, each in self.memory().items()
            if self.took_s >= JUDGED_S and each["rise"] > max(FLAT_MIB, FLAT_SHARE * each["end"])
        ]

    def told(self) -> dict[str, Any]:
        """For the file."""
        cuts = {name.split()[1]: value for name, value in self.after.items() if name.startswith("http_connections_cut")}
        return {
            "asked": {"minutes": MINUTES.value, "requests": REQUESTS.value, "connections": CONNECTIONS.value},
            "took_s": round(self.took_s, 1),
            "requests": self.book.jobs,
            "connections_most": max(each["http_connections"] for each in self.samples),
            "ends": self.book.table(),
            "connections_cut": {reason: value for reason, value in cuts.items() if value},
            "faults": self.book.faults[:20],
            "wrong": self.wrong(),
            "recompiles": self.after["recompiles"],
            "held_at_the_end": self.held,
            "memory_mib": self.memory(),
            "descriptors": self._counts("descriptors"),
            "threads": self._counts("threads"),
            "samples": self.samples[:: max(1, len(self.samples) // 60)],
        }

    def _counts(self, name: str) -> dict[str, list[float]]:
        """Of each process: ready, the most, and when all clients had left."""
        return {
            role: [
                self.before[f"{role} {name}"],
                max(each[f"{role} {name}"] for each in self.samples),
                self.after[f"{role} {name}"],
            ]
            for role in self.complaints
        }


async def run(console: Console, folder: Path) -> Found:
    ports = Ports(free_port(), free_port(), free_port() if APART.value else 0)
    stack = Stack(ports, {})
    try:
        for role, one in commands(folder, ports):
            stack.running[role] = start(one, folder / f"{role}.log")
        await next(iter(stack.running.values())).until_ready(START_S)
        console.print("ready; the soak begins", highlight=False)
        book, samples = Book(), list[soak_watch.Sample]()
        before = soak_watch.watched(stack.url, stack.pids, time.monotonic())
        took_s = await soak(stack, book, samples, console)
        left = await settled(stack)
        await gone(stack)
        after = await rested(stack, before)
        return Found(before, samples, after, left, stack.complaints(), book, took_s)
    finally:
        for each in stack.running.values():
            each.stop()


async def gone(stack: Stack) -> None:
    """Until the server has noticed that its clients left, or the time for it is over."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        if (await asyncio.to_thread(soak_watch.metrics, stack.url))["http_connections"] <= 2:
            return
        await asyncio.sleep(1.0)


async def rested(stack: Stack, before: Mapping[str, float]) -> dict[str, float]:
    """What there is of everything when threads that only waited for work have ended, or the time for it is over."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        seen = soak_watch.metrics(stack.url) | soak_watch.watched(stack.url, stack.pids, time.monotonic())
        if time.monotonic() > end_s or not any(kept_too_many(role, before, seen) for role in stack.pids):
            return seen
        await asyncio.sleep(1.0)


def main() -> int:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        described = machine.described()
        found = asyncio.run(run(console, Path(folder)))
    told, wrong = found.told(), found.wrong()
    show(console, told)
    if OUTPUT.value:
        report.write_json(OUTPUT.value, described | told)
    for each in wrong:
        console.print(f"[red]wrong[/]: {each}", highlight=False)
    return int(bool(wrong))


def show(console: Console, told: Mapping[str, Any]) -> None:
    table = Table("process", "MiB when ready", "in the middle", "at the end", "rise, MiB/hour")
    for role, each in told["memory_mib"].items():
        table.add_row(role, *(f"{each[key]:.1f}" for key in ("ready", "middle", "end", "rise")))
    console.print(table)
    console.print(f"{told['requests']} requests in {told['took_s']:.0f} s; {told['connections_most']:.0f} connections")
    for kind, ends in told["ends"].items():
        console.print(f"{kind}: {', '.join(f'{count} {end}' for end, count in ends.items())}", highlight=False)


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
