"""What digests of every page cost a shipment: packed, put on the other mesh, checked, inserted, with them and without.

    python -m benchmarks.digests [--rounds=30] [--output=FILE]

One device to one device of this process, by the programs that serve: the shortest way there is, so the largest share.
Rounds take turns, and a share is the median over pairs of neighbours, by the clock and by CPU time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import devices
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.worker_config import Digests
from jdisagg.kv.pools import StagePages
from jdisagg.kv.shipping import TransferPrograms, check_landed, insert_landed, ship_pages
from jdisagg.parallel.submesh import StageMesh

TARGET = 0.15
SHAPES = {
    "32 pages, 4 heads of 64, 8 layers": (KVLayout(8, 4, 64, 32), 32),
    "64 pages, 4 heads of 64, 8 layers": (KVLayout(8, 4, 64, 32), 64),
    "16 pages, 8 heads of 128, 8 layers": (KVLayout(8, 8, 128, 32), 16),
}
FLAGS = flags.FlagValues()
flags.DEFINE_integer("rounds", 30, "pairs of shipments of each shape", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one shape: medians, milliseconds; shares are of the shipment without digests."""

    shape: str
    mib: float
    bare_ms: float
    full_ms: float
    share: float
    bare_cpu_ms: float
    full_cpu_ms: float
    cpu_share: float


class Way:
    """From pages on one device to pages on another."""

    def __init__(
        self, layout: KVLayout, pages: int, source: StageMesh, destination: StageMesh, digests: Digests
    ) -> None:
        self.pages = list(range(1, pages + 1))
        self.source, self.destination = (
            [StagePages(layout, range(layout.num_layers), 2 * pages, submesh)] for submesh in (source, destination)
        )
        self.programs = {submesh: TransferPrograms(submesh, digests) for submesh in (source, destination)}

    def ship(self) -> tuple[float, float]:
        """Seconds by the clock and of CPU, of all there is."""
        began, cpu = time.perf_counter(), time.process_time()
        landed, _ = ship_pages(self.source, self.programs, self.destination, self.pages, self.pages[::-1])
        assert all(np.asarray(each).all() for each in check_landed(self.destination, self.programs, landed))
        insert_landed(self.destination, self.programs, landed)
        jax.block_until_ready(self.destination[0].pools)
        return time.perf_counter() - began, time.process_time() - cpu


def cost_of(shape: str, rounds: int, source: StageMesh, destination: StageMesh) -> Cost:
    layout, pages = SHAPES[shape]
    bare, full = (Way(layout, pages, source, destination, each) for each in (Digests.OFF, Digests.FULL))
    pairs = [(bare.ship(), full.ship()) for _ in range(rounds + 2)][2:]  # the first two compile, and touch memory anew
    clock, cpu = ([(without[at], with_them[at]) for without, with_them in pairs] for at in (0, 1))
    return Cost(shape, pages * layout.bytes_per_page / 2**20, *_of_pairs(clock), *_of_pairs(cpu))


def _of_pairs(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Medians in ms, and of the pairs' own shares."""
    without, with_them = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    return without, with_them, statistics.median(later / max(first, 1e-9) - 1 for first, later in pairs)


def table(costs: list[Cost]) -> Table:
    shown = Table(title=f"digests of every page (aim: {TARGET:.0%} of a shipment at most)")
    for name in ("shipment", "MiB", "without, ms", "with, ms", "more", "CPU without, ms", "CPU with, ms", "more"):
        shown.add_column(name, justify="right")
    for each in costs:
        clock = f"{each.bare_ms:.2f}", f"{each.full_ms:.2f}", f"{each.share:.0%}"
        shown.add_row(
            each.shape, f"{each.mib:.0f}", *clock, f"{each.bare_cpu_ms:.2f}", f"{each.full_cpu_ms:.2f}",
            f"{each.cpu_share:.0%}",
        )  # fmt: skip
    return shown


def main() -> int:
    report = described()
    first, second = devices.prepare("cpu", 2)[:2]
    costs = [cost_of(shape, FLAGS.rounds, StageMesh((first,)), StageMesh((second,))) for shape in SHAPES]
    Console(width=140).print(table(costs))
    if FLAGS.output:
        report |= {"rounds": FLAGS.rounds, "target": TARGET, "costs": [asdict(each) for each in costs]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
