"""What a lost worker costs, simulated: good requests that are none any more, by role and by how soon another is there.

Llama-3-70B on H100s, four workers of eight; one of them is lost at a time, at moments spread over the run, and the run
is compared with the one that loses nobody. A request is good within --ttft_s and --tpot_s. What one failure costs is
then taken as often as devices were lost in Llama 3's training (419 unexpected interruptions in 54 days of 16,384 GPUs):
failures are too rare for two to meet.

    python -m benchmarks.failures --output=benchmarks/results/failures.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, report
from benchmarks.machine import described
from benchmarks.scale import DEVICE_FAILURES_PER_HOUR
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import ClusterSpec, by_roofline, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.failing import LossSchedule, failing
from jdisagg.sim.hardware import hardware
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.traces import Trace
from jdisagg.sim.traces.workloads import drawn, read_workload

FLAGS = flags.FlagValues()
flags.DEFINE_string("mesh", "prefill:2xtp8,decode:2xtp8", "of the cluster", flag_values=FLAGS)
flags.DEFINE_string("lengths", "mix:1000+200@0.8,3000+400@0.2", "of requests", flag_values=FLAGS)
flags.DEFINE_list("rates", ["20", "30"], "requests a second", flag_values=FLAGS)
flags.DEFINE_float("seconds", 360.0, "over which requests arrive", 1.0, flag_values=FLAGS)
flags.DEFINE_integer("moments", 1, "at which a worker is lost, a run each", 1, flag_values=FLAGS)
flags.DEFINE_float("ttft_s", 2.0, "of a good request", 0.0, flag_values=FLAGS)
flags.DEFINE_float("tpot_s", 0.05, "of a good request", 0.0, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
# Seconds until it is noticed (--peer_silence_s), and then until a worker is there: it again, or one that stands by.
WAYS = {"restart": (5.0, 300.0), "standby": (5.0, 10.0), "standby, told at once": (0.1, 10.0)}
DEVICES = 8  # of a worker


@dataclass(frozen=True, slots=True)
class Row:
    """One role, one way to replace who is lost. The first three are of one failure, in the mean over its moments."""

    rate_rps: float
    role: str
    way: str
    lost_requests: float  # that are not good any more
    late_s: float  # seconds that all requests together end later
    latest_s: float  # that one request ends later, the one that was delayed most
    lost_share: float  # of all good requests, where devices fail at the published rate
    good_share: float  # of requests, without failures


def spec() -> ClusterSpec:
    shape = Model(model("llama3-70b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("h100"), tp))
    return cluster_spec(MeshSpec.parse(FLAGS.mesh), plain_settings(3400, max_num_seqs=128), cost_of, 50e9)


def good(outcome: Outcome) -> int:
    return sum(record.meets(FLAGS.ttft_s, FLAGS.tpot_s) for record in outcome.records)


def losing(given: ClusterSpec, trace: Trace, losses: Sequence[tuple[float, WorkerId]], way: str) -> Outcome:
    cluster = failing(given, LossSchedule(losses, *WAYS[way]))
    outcome = cluster.run(trace)
    cluster.check_all_ended()
    assert len(outcome.served) == len(outcome.records), "a failure loses no request"
    return outcome


def measure(rate: float) -> list[Row]:
    given, trace = spec(), drawn(read_workload(FLAGS.lengths), rate, int(rate * FLAGS.seconds), 0)
    steady = losing(given, trace, (), "standby")
    moments = np.linspace(0.1, 0.2, FLAGS.moments) * trace.span_s
    rows = list[Row]()
    for role in ("prefill", "decode"):
        victim = next(config.worker for config in given.workers if config.role == role)
        for way in WAYS:
            found = [losing(given, trace, ((float(at_s), victim),), way) for at_s in moments]
            rows.append(_row(rate, role, way, steady, found, len(given.workers)))
    return rows


def _row(rate: float, role: str, way: str, steady: Outcome, found: Sequence[Outcome], workers: int) -> Row:
    lost = float(np.mean([good(steady) - good(each) for each in found]))
    ends_s = np.array([record.end_s for record in steady.records])
    late = [np.array([record.end_s for record in each.records]) - ends_s for each in found]
    per_hour = DEVICE_FAILURES_PER_HOUR * DEVICES * workers
    lost_share = lost * per_hour / (rate * 3600 * good(steady) / len(steady.records))
    return Row(
        rate, role, way, lost, float(np.mean([each.sum() for each in late])),
        float(np.mean([each.max() for each in late])), lost_share, good(steady) / len(steady.records),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="one worker is lost")
    for name in ("requests/s", "role", "another", "not good any more", "late, s", "latest, s", "of goodput"):
        shown.add_column(name, justify="left" if name in ("role", "another") else "right")
    for row in rows:
        figures = f"{row.lost_requests:,.0f}", f"{row.late_s:,.0f}", f"{row.latest_s:,.1f}"
        shown.add_row(f"{row.rate_rps:g}", row.role, row.way, *figures, f"{row.lost_share:.3%}")
    return shown


def main() -> int:
    rows = [row for rate in FLAGS.rates for row in measure(float(rate))]
    Console().print(table(rows))
    if FLAGS.output:
        names = ("mesh", "lengths", "seconds", "moments", "ttft_s", "tpot_s")
        about = {name: FLAGS[name].value for name in names}
        report.write_json(FLAGS.output, {**described(), **about, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
