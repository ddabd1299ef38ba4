"""What it is worth to refuse early: requests with objectives at rates below and above what the cluster can do.

Simulated: Llama-3-8B on H100s, two prefill and two decode workers. The same requests twice at each rate: all taken, and
those refused that are predicted to miss what they ask for (`--early_rejection=auto`).

    python -m benchmarks.early_rejection --output=benchmarks/results/early_rejection.json
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, report
from benchmarks.machine import described
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.sim.cluster_spec import ClusterSpec, by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import SLO
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace
from jdisagg.sim.traces.workloads import drawn, read_workload

FLAGS = flags.FlagValues()
flags.DEFINE_string("trace", "mix:4000+200@0.7,1000+300@0.3", "prompts and outputs", flag_values=FLAGS)
flags.DEFINE_list("rates", ["24", "32", "40", "48"], "requests a second", flag_values=FLAGS)
flags.DEFINE_integer("requests", 1000, "of each run", 1, flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:2xtp1,decode:2xtp1", "of the cluster", flag_values=FLAGS)
flags.DEFINE_float("port_gb_per_s", 40.0, "of a worker, each way", 0.1, flag_values=FLAGS)
flags.DEFINE_float("ttft_s", 1.0, "asked for by each request", 0.001, flag_values=FLAGS)
flags.DEFINE_float("tpot_s", 0.03, "so", 0.001, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Row:
    """One rate, with or without; shares of all requests."""

    rate_rps: float
    early: bool
    met: float  # both objectives
    late: float  # served, and missed one
    refused: float
    goodput_rps: float  # requests a second that met both


def spec(trace: Trace) -> ClusterSpec:
    shape = Model(model_of("llama3-8b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("h100"), tp))
    settings = plain_settings(longest(trace), max_num_seqs=256)
    return cluster_spec(MeshSpec.parse(FLAGS.mesh), settings, cost_of, FLAGS.port_gb_per_s * 1e9)


def measure(trace: Trace, rate_rps: float, slo: SLO, early: bool) -> Row:
    cluster = simulated(spec(trace))
    outcome = cluster.run(trace, asks=slo if early else None)
    cluster.check_all_ended()
    number, served = len(outcome.records), len(outcome.served)
    met = round(number * outcome.attainment(slo.ttft_s, slo.tpot_s))
    return Row(
        rate_rps,
        early,
        met=met / number,
        late=(served - met) / number,
        refused=1 - served / number,
        goodput_rps=met / trace.span_s,
    )


def table(rows: list[Row]) -> Table:
    shown = Table("requests/s", "early rejection", "met both", "served late", "refused", "goodput/s")
    for row in rows:
        shares = (f"{share:.1%}" for share in (row.met, row.late, row.refused))
        shown.add_row(f"{row.rate_rps:g}", "auto" if row.early else "off", *shares, f"{row.goodput_rps:.2f}")
    return shown


def main() -> int:
    slo, rows = SLO(FLAGS.ttft_s, FLAGS.tpot_s), list[Row]()
    for rate in map(float, FLAGS.rates):
        trace = drawn(read_workload(FLAGS.trace), rate, FLAGS.requests, 0)
        rows += [measure(trace, rate, slo, early) for early in (False, True)]
    Console().print(table(rows))
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("trace", "requests", "mesh", "port_gb_per_s", "ttft_s", "tpot_s")}
        report.write_json(FLAGS.output, {**described(), **about, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
