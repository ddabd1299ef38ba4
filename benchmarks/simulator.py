"""How fast the simulator is: the router and workers that serve, in virtual time, on the Azure conversation trace.

    python -m benchmarks.simulator --data_dir=FOLDER --output=benchmarks/results/simulator_cpu.json

Llama-3-70B on H100s by roofline: 20 prefill and 20 decode workers of 8 devices at the recorded rate; its first 1,000,
4,000 and 16,000 requests, for growth; and 2,000 requests on 2,000 + 2,000 workers at a hundred times the rate, for
memory. One core. A run turn by turn, of the first 1,000, says what foreseeing turns that repeat is worth.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cluster_spec import by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.traces import Trace, read_azure

FLAGS = flags.FlagValues()
flags.DEFINE_string("data_dir", None, "folder of azure_llm_2023_conv.csv.gz", required=True, flag_values=FLAGS)
flags.DEFINE_integer("most", 0, "runs of more requests are left out; 0: none is", 0, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file for the report", flag_values=FLAGS)

FEW, MANY = 40, 4000  # workers
PORT_BYTES_PER_S = 50e9
CROWD = 100  # times the recorded rate, for as many times the workers


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one run. Turns are those that no event stands for."""

    workers: int
    requests: int
    foreseen: bool
    seconds: float
    events: int
    skipped_steps: int
    virtual_s: float
    peak_gib: float  # of the process, so far

    @property
    def times_real(self) -> float:
        return self.virtual_s / self.seconds


def measured(trace: Trace, workers: int, *, fast_forward: bool = True) -> Speed:
    chip, shape = hardware("h100"), Model(model("llama3-70b"))
    mesh = MeshSpec.parse(f"prefill:{workers // 2}xtp8,decode:{workers // 2}xtp8")
    settings = plain_settings(longest(trace), max_num_seqs=256)
    given = cluster_spec(
        mesh,
        settings,
        by_roofline(lambda tp: Roofline(shape, chip, tp)),
        PORT_BYTES_PER_S,
    )
    began = time.perf_counter()
    cluster = Cluster(given.workers, given.costs, given.links, fast_forward=fast_forward)
    outcome = cluster.run(trace)
    seconds = time.perf_counter() - began
    cluster.check_all_ended()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    span_s = outcome.span_s - float(trace.arrival_s[0])
    return Speed(workers, len(trace), fast_forward, seconds, outcome.events, cluster.skipped_steps, span_s, peak_gib)


def first(trace: Trace, requests: int) -> Trace:
    return trace.rows(np.arange(len(trace)) < requests)


def runs(trace: Trace) -> list[Speed]:
    """Small to large, so that each peak of memory is its own run's."""
    crowd = first(trace, 2000)
    asked = [
        (first(trace, 1000), FEW, False),
        *((first(trace, requests), FEW, True) for requests in (1000, 4000, 16_000)),
        (trace, FEW, True),
        (crowd.at_rate(CROWD * trace.rate_rps), MANY, True),
    ]
    most = FLAGS.most or len(trace)
    return [
        measured(work, workers, fast_forward=fast_forward) for work, workers, fast_forward in asked if len(work) <= most
    ]


def table(speeds: list[Speed]) -> Table:
    shown = Table(title="the simulator's speed, one core")
    names = ("workers", "requests", "", "seconds", "events", "events/s", "requests/s", "x real time", "peak GiB")
    for name in names:
        shown.add_column(name, justify="right")
    for each in speeds:
        rates = f"{each.events / each.seconds:,.0f}", f"{each.requests / each.seconds:,.0f}", f"{each.times_real:,.0f}"
        how = "" if each.foreseen else "turn by turn"
        counts = f"{each.workers:,}", f"{each.requests:,}", how, f"{each.seconds:.1f}", f"{each.events:,}"
        shown.add_row(*counts, *rates, f"{each.peak_gib:.2f}")
    return shown


def main() -> int:
    speeds = runs(read_azure(Path(FLAGS.data_dir) / "azure_llm_2023_conv.csv.gz"))
    Console().print(table(speeds))
    if FLAGS.output:
        rows = [asdict(each) | {"times_real": each.times_real} for each in speeds]
        report = {**described(), "trace": "Azure LLM inference 2023, conversation", "runs": rows}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
