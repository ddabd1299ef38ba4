"""An autoscaler of roles against every fixed ratio, and against the best ratio of each hour, known in hindsight.

Simulated: six workers of Llama-3-405B, int8, on eight A100s each. Two courses: Azure's two recorded hours,
conversation, code, and conversation again; and ServeGen's day of a reasoning model, whose clients come and go, each
with lengths of its own (drawn: ServeGen publishes rates and histograms). Of each `--requests` are kept, and time runs
faster until there are as many a second as keep six workers busy: an hour passes in minutes, and a flip takes what it
takes. A good request has its first token within `--ttft_s` and further ones within `--tpot_s` in the mean. The oracle
has in each hour the good requests of the ratio that was best in it, and its flips cost nothing.

    python -m benchmarks.autoscale --data_dir=FOLDER --output=benchmarks/results/autoscale.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.policy.scaling import Scaling
from jdisagg.sim.cluster_spec import ClusterSpec, by_roofline, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import Outcome, Record
from jdisagg.sim.scaled import FlipCosts, ScaledCluster
from jdisagg.sim.traces import Trace, one_after_another, read_azure, read_servegen_clients
from jdisagg.sim.traces.workloads import read_workload

FLAGS = flags.FlagValues()
flags.DEFINE_string("data_dir", "", "folder of the public traces; empty: a small synthetic course", flag_values=FLAGS)
flags.DEFINE_integer("workers", 6, "of both roles together", 2, flag_values=FLAGS)
flags.DEFINE_integer("slots", 8, "sequences that a decode worker runs at once", 1, flag_values=FLAGS)
flags.DEFINE_integer("requests", 800, "of each course", 1, flag_values=FLAGS)
flags.DEFINE_float("azure_rate", 2.6, "requests a second, in the mean", 0.01, flag_values=FLAGS)
flags.DEFINE_float("servegen_rate", 0.25, "so, of ServeGen's day", 0.01, flag_values=FLAGS)
flags.DEFINE_float("ttft_s", 3.0, "objective of the first token", 0.01, flag_values=FLAGS)
flags.DEFINE_float("tpot_s", 0.08, "objective of further tokens", 0.001, flag_values=FLAGS)
flags.DEFINE_float("drain_s", 5.0, "a flip: until what runs on the worker goes elsewhere", 0.0, flag_values=FLAGS)
flags.DEFINE_float("reshape_s", 5.0, "a flip: weights cut anew, programs ready", 0.0, flag_values=FLAGS)
flags.DEFINE_list("courses", ["azure", "servegen"], "with --data_dir: of which", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
PORT_BYTES_PER_S = 50e9
SIZES = ("workers", "slots", "requests", "azure_rate", "servegen_rate")
HOUR_S = 3600.0
SCALING = Scaling(price_s=10.0, horizon_s=300.0, steady_s=5.0, rest_s=20.0)


@dataclass(frozen=True, slots=True)
class Course:
    """A workload, and the seconds of one of its hours as they run here."""

    name: str
    trace: Trace
    hour_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One way of cutting the house."""

    course: str
    ratio: str  # prefill:decode workers, "auto" or "oracle"
    good: int  # requests within both objectives
    requests: int
    hours: tuple[int, ...]  # good requests of each
    flips: int = 0
    of_oracle: float = 0.0

    @property
    def attainment(self) -> float:
        return self.good / max(1, self.requests)


def spec(prefills: int, longest: int) -> ClusterSpec:
    mesh = MeshSpec.parse(f"prefill:{prefills}xtp8,decode:{FLAGS.workers - prefills}xtp8")
    shape = Model(model_of("llama3-405b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("a100"), tp, "int8"))
    return cluster_spec(mesh, plain_settings(longest, max_num_seqs=FLAGS.slots), cost_of, PORT_BYTES_PER_S)


def run(course: Course, prefills: int, scaling: Scaling | None) -> tuple[Outcome, ScaledCluster]:
    given = spec(prefills, int((course.trace.input_tokens + course.trace.output_tokens).max()))
    costs = FlipCosts(FLAGS.drain_s, FLAGS.reshape_s)
    cluster = ScaledCluster(given.workers, given.costs, given.links, scaling=scaling, flip_costs=costs)
    outcome = cluster.run(course.trace)
    cluster.check_all_ended()
    return outcome, cluster


def hours_of(course: Course, records: Sequence[Record]) -> tuple[int, ...]:
    """Good requests by the hour of their arrival."""
    good = [each.arrival_s for each in records if each.meets(FLAGS.ttft_s, FLAGS.tpot_s)]
    count = int(course.trace.arrival_s[-1] // course.hour_s) + 1
    return tuple(np.bincount((np.array(good) // course.hour_s).astype(int), minlength=count).tolist())


def row(course: Course, ratio: str, outcome: Outcome, flips: int = 0) -> Row:
    hours = hours_of(course, outcome.records)
    return Row(course.name, ratio, sum(hours), len(outcome.records), hours, flips)


def compare(course: Course) -> list[Row]:
    """Every fixed ratio, the oracle made of them, and the autoscaler from an even start."""
    fixed = [
        row(course, f"{prefills}:{FLAGS.workers - prefills}", run(course, prefills, None)[0])
        for prefills in range(1, FLAGS.workers)
    ]
    best = tuple(max(hour) for hour in zip(*(each.hours for each in fixed), strict=True))
    oracle = Row(course.name, "oracle", sum(best), len(course.trace), best)
    outcome, cluster = run(course, FLAGS.workers // 2, SCALING)
    assert cluster.scaler is not None
    auto = row(course, "auto", outcome, cluster.scaler.autoscaler.flips)
    return [_against(each, oracle) for each in (*fixed, oracle, auto)]


def _against(each: Row, oracle: Row) -> Row:
    share = each.good / max(1, oracle.good)
    return Row(each.course, each.ratio, each.good, each.requests, each.hours, each.flips, share)


def courses() -> list[Course]:
    if not FLAGS.data_dir:
        return [synthetic()]
    folder = Path(FLAGS.data_dir)
    chat, code = (read_azure(folder / f"azure_llm_2023_{name}.csv.gz") for name in ("conv", "code"))
    azure = one_after_another([chat, code, chat], 1.0)
    azure = azure.rows(np.random.default_rng(0).random(len(azure)) < FLAGS.requests / len(azure))
    day = read_servegen_clients(folder / "servegen_reason_deepseek-r1.tar.gz", FLAGS.requests)
    found = at_rate("azure", azure, FLAGS.azure_rate), at_rate("servegen", day, FLAGS.servegen_rate)
    return [each for each in found if each.name in FLAGS.courses]


def at_rate(name: str, trace: Trace, rate_rps: float) -> Course:
    """Its hours pass as much faster as the rate asks for."""
    return Course(name, trace.at_rate(rate_rps), HOUR_S * trace.rate_rps / rate_rps)


def synthetic() -> Course:
    """Prompts, then outputs, then prompts: for trials without the traces."""
    rows = read_workload("mix:4000+20@0.5,200+400@0.5")
    parts = []
    for index, wanted in enumerate((4000, 200, 4000)):
        some = rows.rows(rows.input_tokens == wanted).sample(120, index)
        parts.append(Trace(np.linspace(0.0, 60.0, 120), some.input_tokens, some.output_tokens))
    return Course("synthetic", one_after_another(parts, 1.0), 61.0)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"good requests ({FLAGS.ttft_s:g} s, {FLAGS.tpot_s:g} s a token)")
    for name in ("course", "prefill:decode", "good", "of requests", "of the oracle", "flips"):
        shown.add_column(name, justify="right")
    for each in rows:
        shares = f"{each.attainment:.1%}", f"{each.of_oracle:.1%}"
        shown.add_row(each.course, each.ratio, f"{each.good:,}", *shares, str(each.flips or ""))
    return shown


def main() -> int:
    rows = [each for course in courses() for each in compare(course)]
    Console().print(table(rows))
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in (*SIZES, "ttft_s", "tpot_s")}
        about |= {"drain_s": FLAGS.drain_s, "reshape_s": FLAGS.reshape_s, "scaling": asdict(SCALING)}
        report = {**described(), **about, "rows": [asdict(each) for each in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
