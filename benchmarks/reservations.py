"""For how many output tokens decode pages are reserved at first: few preempt, many keep requests waiting.

Simulated, on the public traces: Llama-3-8B on H100s, one prefill and one decode worker with little room for KV. How
long an answer gets is not known beforehand: every request asks for up to `--limit` tokens. Pages that are held by
sequences whose KV is not there yet, or not yet that long, are counted every tenth of a virtual second.

    python -m benchmarks.reservations --data_dir=FOLDER --output=benchmarks/results/reservations.json
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, report
from benchmarks.machine import described
from jdisagg.core.events import Event, Send
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.messages import Preempted
from jdisagg.core.request import WorkerId
from jdisagg.policy.worker.sequence import DecodeSequence
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import ClusterSpec, by_roofline, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.traces import Trace
from jdisagg.sim.traces.workloads import READERS, drawn, read_workload

FLAGS = flags.FlagValues()
flags.DEFINE_string("data_dir", "", "folder of the public traces; none: a mix of lengths", flag_values=FLAGS)
flags.DEFINE_integer("requests", 300, "of each trace, its first", 1, flag_values=FLAGS)
flags.DEFINE_integer("limit", 2000, "output tokens that each request may ask for", 1, flag_values=FLAGS)
flags.DEFINE_integer("slots", 256, "of the decode worker", 1, flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:1xtp1,decode:1xtp1", "of the cluster", flag_values=FLAGS)
flags.DEFINE_float("port_gb_per_s", 40.0, "of a worker, each way", 0.1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

TRACES = {"azure": "azure_llm_2023_conv.csv.gz", "mooncake": "mooncake_fast25_conversation.jsonl.gz"}
RATES = {"azure": (10.0, 14.0), "mooncake": (0.6,), "mix": (10.0,)}  # requests a second
KV_TOKENS = {"azure": 40_000, "mooncake": 150_000, "mix": 20_000}  # of the decode worker
LOOK_S = 0.1
RESERVE_TOKENS = 512, 64, 16


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Shares are of the decode worker's pages, in the mean over the run."""

    trace: str
    rate_rps: float
    reserve_tokens: int
    unused: float  # reserved, and nothing written in them
    waiting: float  # of these, held for KV that was not there yet
    written: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    output_tokens: int
    preempted: int
    span_s: float


class Looked(Cluster):
    """Looks at decode pages again and again, and counts who gives them back."""

    def __init__(self, given: ClusterSpec) -> None:
        super().__init__(given.workers, given.costs, given.links, PATIENT, given.message_s)
        self.looks, self.preempted = list[tuple[int, int, int]](), 0
        self._next_s = 0.0

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        super()._deliver(actor, event)
        while self.now_s >= self._next_s:
            self._next_s += LOOK_S
            self.looks.append(self._look())

    def _look(self) -> tuple[int, int, int]:
        """Pages that wait for KV, pages to grow into, pages that are written."""
        sequences = [each for worker in self.workers.values() for each in worker.decode.sequences.values()]
        waiting = sum(len(each.pages) for each in sequences if not each.is_admitted)
        there = [each for each in sequences if each.is_admitted]
        used = sum(self._written(each) for each in there)
        return waiting, sum(len(each.pages) for each in there) - used, used

    def _written(self, sequence: DecodeSequence) -> int:
        config = next(each.config for each in self.workers.values() if each.config.role.decodes)
        return min(len(sequence.pages), config.pages_for(sequence.num_tokens + len(sequence.output)))

    def send(self, actor: WorkerId, effect: Send) -> None:
        if isinstance(effect.message, Preempted):
            self.preempted += 1
        super().send(actor, effect)


def spec(trace: Trace, kv_tokens: int, reserve_tokens: int) -> ClusterSpec:
    shape = Model(model_of("llama3-8b"), "bfloat16")
    cost_of = by_roofline(lambda tp: Roofline(shape, hardware("h100"), tp))
    longest = int(trace.input_tokens.max()) + max(FLAGS.limit, int(trace.output_tokens.max()))
    sizes = plain_settings(longest, max_num_seqs=FLAGS.slots, reserve_tokens=reserve_tokens)
    given = cluster_spec(MeshSpec.parse(FLAGS.mesh), sizes, cost_of, FLAGS.port_gb_per_s * 1e9)
    pages = max(kv_tokens, longest) // sizes.page_size + 1
    workers = [replace(each, num_pages=pages) if each.role.decodes else each for each in given.workers]
    return replace(given, workers=tuple(workers))


def measure(name: str, trace: Trace, reserve_tokens: int) -> Row:
    given = spec(trace, KV_TOKENS[name], reserve_tokens)
    cluster = Looked(given)
    outcome = cluster.run(trace.unnamed(), limit=FLAGS.limit)
    cluster.check_all_ended()
    assert len(outcome.served) == len(outcome.records), "everybody is served"
    pages = sum(each.num_pages for each in given.workers if each.role.decodes)
    waiting, growing, written = (float(each) / pages for each in np.array(cluster.looks).mean(axis=0))
    spread: dict[str, Any] = {}
    for metric in ("TTFT", "TPOT", "latency"):
        for percent in (50, 99):
            spread[f"{metric.lower()}_p{percent}_s"] = float(np.percentile(outcome.values(metric), percent))
    tokens = sum(each.emitted_tokens for each in outcome.served)
    counts = {"output_tokens": tokens, "preempted": cluster.preempted, "span_s": outcome.span_s}
    shares = {"unused": waiting + growing, "waiting": waiting, "written": written}
    return Row(name, trace.rate_rps, reserve_tokens, **shares, **spread, **counts)


def workloads() -> dict[str, Trace]:
    if not FLAGS.data_dir:
        return {"mix": drawn(read_workload("mix:1000+200@0.8,3000+60@0.2"), 1.0, FLAGS.requests, 0)}
    found = {name: READERS[name](Path(FLAGS.data_dir) / file) for name, file in TRACES.items()}
    return {name: trace.rows(np.arange(len(trace)) < FLAGS.requests) for name, trace in found.items()}


def table(rows: list[Row]) -> Table:
    shown = Table(
        "trace", "requests/s", "reserve_tokens", "unused", "written", "TTFT p50, s", "p99", "TPOT p99", "latency"
    )
    for row in rows:
        shares = (f"{share:.1%}" for share in (row.unused, row.written))
        times = (
            f"{row.ttft_p50_s:.3f}",
            f"{row.ttft_p99_s:.2f}",
            f"{row.tpot_p99_s * 1e3:.1f}",
            f"{row.latency_p50_s:.2f}",
        )
        shown.add_row(row.trace, f"{row.rate_rps:.3g}", str(row.reserve_tokens), *shares, *times)
    return shown


def main() -> int:
    rows = list[Row]()
    for name, trace in workloads().items():
        for rate in RATES[name]:
            rows += [measure(name, trace.at_rate(rate), tokens) for tokens in RESERVE_TOKENS]
            Console().print(table(rows[-len(RESERVE_TOKENS) :]))
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("requests", "limit", "slots", "mesh", "port_gb_per_s")}
        sizes = {"kv_tokens": KV_TOKENS}
        report.write_json(FLAGS.output, {**described(), **about, **sizes, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
