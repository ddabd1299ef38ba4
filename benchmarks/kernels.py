"""The kernels against their floors and their peers, on the device at hand.

    python -m benchmarks.kernels --output=benchmarks/results/kernels_cpu.json
    python -m benchmarks.kernels --suite=latents --output=latents.json
    python -m benchmarks.kernels --suite=tiny --rounds=1

The floor of a memory-bound operation is its bytes over the speed of a copy measured beside it, that of prefill
attention its products over the speed of a square product; decode on a CPU is held against copying the very pages it
reads. `share` is floor over best time: 1 is as fast as the device goes, and a target says how near we mean to come.
Best is the least time of all rounds, what a quiet machine gives; the median says how noisy this one was. A case that
fails, or for which no time is left of --limit_s, is named, ends no other, and makes the exit code 1; what was measured
is written case by case.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import machine, report
from benchmarks.kernels_cases import SUITES, Case, accelerator_cases, cpu_cases
from benchmarks.kernels_contests import contest_of
from benchmarks.kernels_floors import Contest, Sizes, copy_floor, matmul_floor
from benchmarks.kernels_peers import Ground, fastest, peers_of
from benchmarks.kernels_timing import race


@dataclass(frozen=True)
class Row:
    """One case, measured. Milliseconds are of one operation."""

    operation: str
    shape: str
    page_size: int
    headline: bool
    best_ms: float
    median_ms: float
    floor_ms: float
    share: float  # floor_ms / best_ms
    cpu_share: float  # the same of CPU seconds: what other people's jobs disturb least; says nothing of accelerators
    target: float | None
    peers: dict[str, float | str] = field(default_factory=dict)  # best ms, or why there is no figure

    @property
    def verdict(self) -> str:
        return "" if self.target is None else "met" if self.share >= self.target else "missed"


def measure(case: Case, sizes: Sizes, platform: str, rounds: int) -> Row:
    """One case: we and our floor take turns, then each peer, made and dropped one after another."""
    contest = contest_of(case, sizes, platform)
    ours, floor = race([contest.ours, contest.floor], rounds)
    floor_s, floor_cpu_s = floor.best_s * contest.floor_share, floor.cpu_s * contest.floor_share
    peers = measure_peers(contest, sizes, platform, rounds) if case.with_peers else {}
    return Row(
        case.operation, case.shape, case.page_size, case.headline,
        ours.best_s * 1e3, ours.median_s * 1e3, floor_s * 1e3, floor_s / ours.best_s, floor_cpu_s / ours.cpu_s,
        case.target, peers,
    )  # fmt: skip


def measure_peers(contest: Contest, sizes: Sizes, platform: str, rounds: int) -> dict[str, float | str]:
    ground = Ground(contest.case, contest.held, sizes, platform)
    found: dict[str, float | str] = {}
    for name, maker in peers_of(contest.case).items():
        try:
            peer = maker(ground)
            found[name] = "does not run this" if peer is None else race([peer], rounds)[0].best_s * 1e3
        except (ImportError, ValueError, TypeError, NotImplementedError, AssertionError, RuntimeError) as error:
            found[name] = named(error)
    return found


@dataclass
class Measured:
    """What became of the cases, told and written as they go."""

    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, case: Case, sizes: Sizes, platform: str, rounds: int) -> str:
        """Measures one, and says what came of it."""
        began = time.perf_counter()
        try:
            row = measure(case, sizes, platform, rounds)
        except Exception as error:  # of a compiler, a device out of memory, a kernel: whatever it is, others go on
            self.failed.append(f"{case.label}: {named(error)}")
            return f"{case.label} FAILED: {named(error)}"
        self.rows.append(row)
        took_s = time.perf_counter() - began
        return (
            f"{case.label}: {row.best_ms:.3f} ms, {row.share:.0%} of the floor's speed {row.verdict} ({took_s:.0f} s)"
        )


def named(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table("operation", "shape", "page", "best ms", "median", "floor", "share", "cpu", "target", "",
                  "best peer, ms", title=title)  # fmt: skip
    for row in rows:
        peer = fastest(row.peers)
        table.add_row(
            row.operation, row.shape, str(row.page_size), f"{row.best_ms:.3f}", f"{row.median_ms:.3f}",
            f"{row.floor_ms:.3f}", f"{row.share:.2f}", f"{row.cpu_share:.2f}",
            "" if row.target is None else f"{row.target:.2f}", row.verdict,
            "" if peer is None else f"{peer[1]:.3f} {peer[0]}",
        )  # fmt: skip
    return table


def rates_of(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """What the device reaches: bytes copied a second, read and written counted together, and products a second."""
    (copy, bytes_share), (product, flops_share) = copy_floor(sizes, 1), matmul_floor(sizes, 1)
    copied, multiplied = race([copy, product], rounds)
    return {
        "copy_bytes_per_s": 1 / (copied.best_s * bytes_share),
        "matmul_flops_per_s": 1 / (multiplied.best_s * flops_share),
        "dtype": jax.numpy.dtype(sizes.dtype).name,
    }


def record_of(measured: Measured, rates: dict[str, Any], platform: str) -> dict[str, Any]:
    """The JSON of one run."""
    device = jax.devices()[0]
    name = machine.processor() if platform == "cpu" else device.device_kind
    return machine.described() | {
        "device": {"platform": platform, "name": name, "count": jax.device_count()},
        "rates": rates,
        "rows": [asdict(row) | {"verdict": row.verdict} for row in measured.rows],
        "failed": measured.failed,
    }


def chosen(suite: str, only: str, platform: str) -> list[Case]:
    """Raises ValueError where nothing is left."""
    whole = cpu_cases if platform == "cpu" else accelerator_cases
    cases = SUITES.get(suite, whole)()
    left = [case for case in cases if re.search(only, case.label)]
    if not left:
        raise ValueError(f"--only={only!r} fits none of the {len(cases)} cases")
    return left


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--output", default="", help="JSON file for the rows, the device and the versions")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument(
        "--suite",
        choices=("device", *SUITES),
        default="device",
        help="the device's cases, more of an accelerator's, or a test's",
    )
    parser.add_argument("--only", default="", help="cases that this regular expression is found in")
    parser.add_argument("--limit_s", type=float, default=float("inf"), help="no case begins later than this")
    parser.add_argument("--no_peers", action="store_true", help="our kernels alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = options_of(argv)
    platform = jax.default_backend()
    try:
        cases = chosen(options.suite, options.only, platform)
    except (ValueError, re.error) as error:
        print(f"benchmarks.kernels: {error}", file=sys.stderr)
        return 2
    if options.no_peers or (platform == "cpu" and options.suite == "device"):
        cases = [replace(case, with_peers=False) for case in cases]
    console = Console(width=max(160, Console().width))
    sizes = Sizes.of(platform, options.suite == "tiny")
    rates = rates_of(sizes, options.rounds)
    console.print(
        f"copy {rates['copy_bytes_per_s'] / 1e9:,.1f} GB/s read and written,"
        f" {rates['dtype']} products {rates['matmul_flops_per_s'] / 1e12:,.2f} TFLOP/s",
        highlight=False,
    )
    measured = measure_all(cases, sizes, rates, options, console)
    console.print(table_of(measured.rows, f"{jax.devices()[0].device_kind}, {jax.numpy.dtype(sizes.dtype).name}"))
    for each in measured.failed:
        print(f"benchmarks.kernels: failed: {each}", file=sys.stderr)
    return 1 if measured.failed else 0


def measure_all(
    cases: Sequence[Case], sizes: Sizes, rates: dict[str, Any], options: argparse.Namespace, console: Console
) -> Measured:
    measured, platform, began = Measured(), jax.default_backend(), time.perf_counter()
    for number, case in enumerate(cases, 1):
        if time.perf_counter() - began > options.limit_s:
            measured.failed.append(f"{case.label}: no time left of {options.limit_s:g} s")
            continue
        told = measured.add(case, sizes, platform, options.rounds)
        console.print(f"{number}/{len(cases)} {told}", highlight=False)
        if options.output:
            report.write_json(options.output, record_of(measured, rates, platform))
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
