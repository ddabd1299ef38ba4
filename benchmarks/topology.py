"""What it is worth to know where workers stand: two racks with a slow link between them, routed with and without that.

Simulated: Llama-3-8B on H100s, each rack with as many prefill as decode workers, each worker with a port of its own and
each rack with one uplink. The same requests by each routing; `cache_aware` with labels, and without them, so that it
can only learn each pair's link from what travels over it.

    python -m benchmarks.topology --output=benchmarks/results/topology.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.labels import NOWHERE, Labels
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.router_config import Routing
from jdisagg.sim.cluster_spec import ClusterSpec, Topology, by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace
from jdisagg.sim.traces.workloads import drawn, read_workload

FLAGS = flags.FlagValues()
flags.DEFINE_string("trace", "mix:4000+200@0.7,1000+300@0.3", "prompts and outputs", flag_values=FLAGS)
flags.DEFINE_float("rate", 16.0, "requests a second", 0.1, flag_values=FLAGS)
flags.DEFINE_integer("requests", 1500, "of each run", 1, flag_values=FLAGS)
flags.DEFINE_integer("workers", 4, "of each role, half of them in each rack", 2, flag_values=FLAGS)
flags.DEFINE_float("port_gb_per_s", 40.0, "of a worker, each way", 0.1, flag_values=FLAGS)
flags.DEFINE_float("uplink_gb_per_s", 3.0, "of a rack, each way", 0.1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
CASES = (
    ("least_loaded", False),
    ("cache_aware", False),
    ("cache_aware", True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One routing; seconds."""

    routing: str
    labels: bool
    crossed: float  # share of the requests whose KV went from rack to rack
    ttft_p50_s: float
    ttft_p99_s: float
    transfer_p50_s: float  # exposed: from the first token to all KV there
    transfer_p99_s: float
    tpot_p99_s: float


def rack_of(worker: str) -> str:
    return f"rack-{int(worker.rpartition('-')[2]) % 2}"


def spec(trace: Trace, routing: Routing, labelled: bool) -> ClusterSpec:
    """`labelled`: whether the router is told where workers stand; the links are the same."""
    mesh = MeshSpec.parse(f"prefill:{FLAGS.workers}xtp1,decode:{FLAGS.workers}xtp1")
    labels = {each.worker: Labels(host=f"host-{each.worker}", rack=rack_of(each.worker)) for each in mesh.workers()}
    topology = Topology(labels, {f"rack-{rack}": FLAGS.uplink_gb_per_s * 1e9 for rack in range(2)})
    shape = Model(model_of("llama3-8b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("h100"), tp))
    settings = plain_settings(longest(trace), max_num_seqs=256)
    given = cluster_spec(mesh, settings, cost_of, FLAGS.port_gb_per_s * 1e9, topology)
    if not labelled:
        given = replace(given, workers=tuple(replace(each, labels=NOWHERE) for each in given.workers))
    return replace(given, routing=routing)


def measure(trace: Trace, routing: str, labelled: bool) -> Row:
    cluster = simulated(spec(trace, Routing(routing), labelled))
    outcome = cluster.run(trace)
    cluster.check_all_ended()
    transfer_s = np.array([each.ledger.parts_ns()["transfer"] / 1e9 for each in outcome.served if each.ledger])
    crossed = [rack_of(each.prefill_worker) != rack_of(each.decode_worker) for each in outcome.served]
    return Row(
        routing=routing,
        labels=labelled,
        crossed=float(np.mean(crossed)),
        ttft_p50_s=quantile(outcome, "TTFT", 0.5),
        ttft_p99_s=quantile(outcome, "TTFT", 0.99),
        transfer_p50_s=float(np.quantile(transfer_s, 0.5)),
        transfer_p99_s=float(np.quantile(transfer_s, 0.99)),
        tpot_p99_s=quantile(outcome, "TPOT", 0.99),
    )


def quantile(outcome: Outcome, what: str, share: float) -> float:
    return float(np.quantile(outcome.values(what), share))


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"two racks, {FLAGS.uplink_gb_per_s:g} GB/s between them, {FLAGS.rate:g} requests/s")
    for name in ("routing", "labels", "crossed", "TTFT p50, p99 ms", "transfer p50, p99 ms", "TPOT p99 ms"):
        shown.add_column(name, justify="right")
    for row in rows:
        first, transfer = (row.ttft_p50_s, row.ttft_p99_s), (row.transfer_p50_s, row.transfer_p99_s)
        times = [" ".join(f"{1e3 * each:,.1f}" for each in pair) for pair in (first, transfer)]
        crossed = f"{row.crossed:.0%}"
        shown.add_row(row.routing, "yes" if row.labels else "no", crossed, *times, f"{1e3 * row.tpot_p99_s:.1f}")
    return shown


def main() -> int:
    trace = drawn(read_workload(FLAGS.trace), FLAGS.rate, FLAGS.requests, 0)
    rows = [measure(trace, *case) for case in CASES]
    Console().print(table(rows))
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("trace", "rate", "requests", "workers")}
        about |= {"port_gb_per_s": FLAGS.port_gb_per_s, "uplink_gb_per_s": FLAGS.uplink_gb_per_s}
        report = {**described(), **about, "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
