"""Every transport between two processes of this machine: `python -m benchmarks.transport --output=FILE.json`.

The source is a second process with its own jax; its arrays are computed and offered before the clock starts, which
then runs until the pulled arrays are ready here. The transports take turns in every round, so that a noisy minute hits
all of them; `best` is what a quiet machine gives, and CPU seconds of both processes are what noise disturbs least.
`copy` is one memory copy of the same bytes in this process.

Slow links come twice: emulated by the transports' token bucket, and, where this system permits it, by the kernel: the
source then sits in a network namespace behind a shaped interface. No link makes a transport faster than it is without
one, so a row is held against the larger of the link's arithmetic and the transport's own time in this run, and says
which of the two bounds it: on one machine the fastest links are bound by memory, and the row shows no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import machine
from benchmarks.shaped import Unshapable, shaped_link
from jdisagg.kv.transport.choose import available, open_transport
from jdisagg.kv.transport.config import EmulatedLink, Identity, TransportConfig
from jdisagg.kv.transport.ticket import Ticket, TransferId, Transport, read_ticket

SECRET, IDENTITY = b"a secret of this benchmark alone", Identity("benchmark", "benchmark", "float32")
LOAD = {"8 KB": (1, 8 << 10), "1 MB": (1, 1 << 20), "64 MB x 8": (8, 8 << 20), "256 MB x 32": (32, 8 << 20)}
LINKS_GBIT_PER_S = (1, 10, 25, 100, 200)
SHAPED_GBIT_PER_S = (1, 10)  # faster ones are not shaped well by the kernel, and TCP does not reach them here
BUCKET, NAMESPACE = "token bucket", "namespace"
TARGET_GB_PER_S = {"shm": 8.0, "tcp": 2.5}
TIMEOUT_S = 60.0
OwnMs = dict[tuple[str, str], float]  # by transport and size: how long it takes without a link


@dataclass
class Row:
    """One transport and size. Times are of a pull, GB/s of 1e9 bytes."""

    transport: str
    size: str
    nbytes: int
    median_ms: float
    best_ms: float
    median_gb_per_s: float
    best_gb_per_s: float
    cpu_s_per_gb: float  # both processes; 0 where there is too little to count
    target_gb_per_s: float | None = None


@dataclass
class LinkRow:
    transport: str
    made_by: str  # BUCKET or NAMESPACE
    gbit_per_s: float
    nbytes: int
    link_ms: float  # by the link's speed alone
    own_ms: float  # the transport's own median, without a link
    floor_ms: float  # the larger of both
    bound_by: str  # which of the two that is: "link" or "this machine"
    median_ms: float


class Source:
    """Offers the same arrays again and again, in this process or behind `Remote`."""

    def __init__(self, names: Sequence[str], host: str = "127.0.0.1") -> None:
        config = TransportConfig(SECRET, IDENTITY, listen=f"{host}:0")
        self.transports = {name: open_transport(name, config) for name in names}
        rng, device = np.random.default_rng(0), jax.devices()[-1]
        block = rng.integers(0, 255, max(nbytes for _, nbytes in LOAD.values()), np.uint8)
        self.arrays = {
            size: [jax.device_put(np.array(block[:nbytes]), device) for _ in range(count)]
            for size, (count, nbytes) in LOAD.items()
        }

    def offer(self, name: str, size: str) -> Ticket:
        fresh = [each + np.uint8(0) for each in self.arrays[size]]
        jax.block_until_ready(fresh)
        return self.transports[name].offer(TransferId(size, 0), fresh, time.monotonic() + TIMEOUT_S)

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


class Remote:
    """A `Source` in a process of its own; `inside` comes before its command."""

    def __init__(self, names: Sequence[str], inside: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        module = [sys.executable, "-m", "benchmarks.transport"]
        command = [*inside, *module, "--source", ",".join(names), "--host", host]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask({"do": "cpu"})

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def offer(self, name: str, size: str) -> Ticket:
        return read_ticket(self._ask({"do": "offer", "name": name, "size": size}))

    def cpu_s(self) -> float:
        return self._ask({"do": "cpu"})

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_S)


def be_source(names: Sequence[str], host: str) -> None:
    source = Source(names, host)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "offer":
            answer: Any = source.offer(command["name"], command["size"]).to_json()
        else:
            answer = source.cpu_s()
        print(json.dumps(answer), flush=True)
    source.close()


def pull(transport: Transport, ticket: Ticket) -> float:
    """Seconds until the arrays are ready."""
    devices = jax.devices()[:1] * len(ticket.arrays)
    started_s = time.perf_counter()
    arrays = transport.pull(ticket, devices, time.monotonic() + TIMEOUT_S)
    jax.block_until_ready(arrays)
    took_s = time.perf_counter() - started_s
    del arrays
    jax.device_put(np.zeros(1)).block_until_ready()  # jax lets go of what it adopted at its next call
    transport.ack(ticket)
    return took_s


def measure_size(size: str, contestants: dict[str, tuple[Transport, Any]], rounds: int) -> list[Row]:
    """All transports in turn, `rounds` times after one that warms them up."""
    count, nbytes = LOAD[size][0], LOAD[size][0] * LOAD[size][1]
    took: dict[str, list[float]] = {name: [] for name in (*contestants, "copy")}
    cpu_s = dict.fromkeys(took, 0.0)
    # written first: memory that never was is one page of zeros, which costs nothing to read
    copied = [np.full(LOAD[size][1], 7, np.uint8) for _ in range(2 * count)]
    for turn in range(rounds + 1):
        for name, (transport, source) in contestants.items():
            ticket, here_s, there_s = source.offer(name, size), time.process_time(), source.cpu_s()
            seconds = pull(transport, ticket)
            spent_s = time.process_time() - here_s + (source.cpu_s() - there_s) * isinstance(source, Remote)
            if turn:
                took[name].append(seconds)
                cpu_s[name] += spent_s
        started_s, here_s = time.perf_counter(), time.process_time()
        for index in range(count):
            np.copyto(copied[index], copied[count + index])
        if turn:
            took["copy"].append(time.perf_counter() - started_s)
            cpu_s["copy"] += time.process_time() - here_s
    return [row_of(name, size, nbytes, took[name], cpu_s[name] / rounds) for name in took]


def row_of(name: str, size: str, nbytes: int, took: list[float], cpu_s: float) -> Row:
    median_s, best_s = statistics.median(took), min(took)
    cpu_s_per_gb = cpu_s / (nbytes / 1e9) if nbytes >= 1 << 24 else 0.0
    rates = nbytes / 1e9 / median_s, nbytes / 1e9 / best_s
    target = TARGET_GB_PER_S.get(name) if nbytes >= 1 << 24 else None
    return Row(name, size, nbytes, median_s * 1e3, best_s * 1e3, *rates, cpu_s_per_gb, target)


def load_of(gbit_per_s: float) -> str:
    return "64 MB x 8" if gbit_per_s > 1 else "1 MB"


def link_row(transport: Transport, source: Any, made_by: str, gbit_per_s: float, own_ms: float, rounds: int) -> LinkRow:
    name, size = transport.name, load_of(gbit_per_s)
    nbytes = LOAD[size][0] * LOAD[size][1]
    took = [pull(transport, source.offer(name, size)) for _ in range(rounds + 1)][1:]
    link_ms = nbytes * 8 / gbit_per_s / 1e6
    bound_by = "link" if link_ms > own_ms else "this machine"
    median_ms = statistics.median(took) * 1e3
    return LinkRow(name, made_by, gbit_per_s, nbytes, link_ms, own_ms, max(link_ms, own_ms), bound_by, median_ms)


def measure_links(
    names: Sequence[str], source: Any, own_ms: dict[tuple[str, str], float], rounds: int
) -> list[LinkRow]:
    """`own_ms` by transport and size."""
    rows = []
    for name in names:
        for speed in LINKS_GBIT_PER_S:
            transport = open_transport(name, TransportConfig(SECRET, IDENTITY, link=EmulatedLink(speed)))
            rows.append(link_row(transport, source, BUCKET, speed, own_ms[name, load_of(speed)], rounds))
            transport.close()
    return rows


def measure_shaped(own_ms: OwnMs, rounds: int) -> tuple[list[LinkRow], str]:
    """Rows of tcp through the kernel's own shaping, and why there are none where there are none."""
    rows = []
    for speed in SHAPED_GBIT_PER_S:
        try:
            with shaped_link(speed) as link:
                source = Remote(["tcp"], link.inside, link.there)
                transport = open_transport("tcp", TransportConfig(SECRET, IDENTITY))
                rows.append(link_row(transport, source, NAMESPACE, speed, own_ms["tcp", load_of(speed)], rounds))
                transport.close()
                source.close()
        except Unshapable as error:
            return rows, str(error)
    return rows, ""


def measure(rounds: int, tell: Callable[[str], None]) -> tuple[list[Row], list[LinkRow], str]:
    """Rows of transports and of links, and why the kernel shapes no links here, where it does not."""
    between = [name for name in available() if name != "inproc"]
    remote, local = Remote(between), Source(["inproc"])
    contestants: dict[str, tuple[Transport, Any]] = {"inproc": (local.transports["inproc"], local)}
    contestants |= {name: (open_transport(name, TransportConfig(SECRET, IDENTITY)), remote) for name in between}
    rows = []
    for size in LOAD:
        tell(size)
        rows += measure_size(size, contestants, rounds)
    tell("links")
    own_ms = {(row.transport, row.size): row.median_ms for row in rows}
    few = max(2, rounds // 4)
    links = measure_links(("shm", "tcp"), remote, own_ms, few)
    for transport, _ in contestants.values():
        transport.close()
    remote.close()
    shaped, refused = measure_shaped(own_ms, few)
    return rows, links + shaped, refused


def print_tables(rows: list[Row], links: list[LinkRow], refused: str) -> None:
    print(
        f"{'transport':13} {'size':12} {'median ms':>10} {'best ms':>9} {'GB/s':>6} {'best':>6} {'CPU-s/GB':>9}  target"
    )
    for row in rows:
        rates = f"{row.median_gb_per_s:6.2f} {row.best_gb_per_s:6.2f} {row.cpu_s_per_gb:9.2f}"
        target = f"  {row.target_gb_per_s} GB/s" if row.target_gb_per_s else ""
        print(f"{row.transport:13} {row.size:12} {row.median_ms:10.3f} {row.best_ms:9.3f} {rates}{target}")
    print(
        f"\n{'slow link':13} {'made by':13} {'Gbit/s':>7} {'link ms':>10} {'floor ms':>10} {'median ms':>10}  bound by"
    )
    for link in links:
        times = f"{link.link_ms:10.3f} {link.floor_ms:10.3f} {link.median_ms:10.3f}"
        print(f"{link.transport:13} {link.made_by:13} {link.gbit_per_s:7} {times}  {link.bound_by}")
    if refused:
        print(f"no link shaped by the kernel: {refused}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file for the rows, the machine and the versions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--source", default="", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        be_source(options.source.split(","), options.host)
        return
    rows, links, refused = measure(options.rounds, lambda what: print(f"{what} ...", file=sys.stderr))
    print_tables(rows, links, refused)
    if options.output is not None:
        record = machine.described() | {"load_average_after": [round(each, 2) for each in os.getloadavg()]}
        record |= {"rows": [asdict(row) for row in rows], "links": [asdict(link) for link in links]}
        record |= {"shaping_refused": refused}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
