"""The simulator: a workload on a mesh, by the router and workers that serve, in virtual time.

    python -m jdisagg.sim --trace=azure:FILE --rate=4 --mesh=prefill:2xtp1,decode:1xtp1 --model=opt-13b --cost=distserve
    python -m jdisagg.sim --trace=lengths:FILE --rate=8 --requests=500 --mesh=prefill:tp2,decode:tp2
        --model=llama3-70b --cost=roofline --hardware=h100 --slo_ttft_s=1 --slo_tpot_s=0.05 --csv=requests.csv

A trace is a kind and a file: azure (TIMESTAMP, ContextTokens, GeneratedTokens), mooncake (JSON lines) or lengths
(num_prefill_tokens, num_decode_tokens; arrivals are drawn, Poisson). --rate stretches recorded arrivals alike.
--cost=distserve are fits to measurements on A100-80G; --cost=roofline is arithmetic, and optimistic about old engines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from jdisagg import flags
from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.arithmetic import DTYPE_BYTES, MODELS, model
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cost_models import ENGINES, Model, Roofline
from jdisagg.sim.fleet import CostOf, Fleet, Sizes, by_roofline, fleet, longest, published
from jdisagg.sim.hardware import HARDWARE, hardware
from jdisagg.sim.outcome import METRICS, Outcome, write_csv
from jdisagg.sim.traces import Trace, poisson, read_azure, read_lengths, read_mooncake, spread_ticks

READERS = {"azure": read_azure, "mooncake": read_mooncake, "lengths": read_lengths}
QUANTILES = (50, 90, 99)


def declare() -> flags.FlagValues:
    values = flags.own()
    _define_workload(values)
    _define_cluster(values)
    absl_flags.DEFINE_float("slo_ttft_s", 1.0, "objective for the first token", 0.0, flag_values=values)
    absl_flags.DEFINE_float("slo_tpot_s", 0.1, "objective for the mean gap between tokens", 0.0, flag_values=values)
    absl_flags.DEFINE_string("csv", "", "file for a row a request", flag_values=values)
    return values


def _define_workload(values: flags.FlagValues) -> None:
    absl_flags.DEFINE_string("trace", "", f"KIND:FILE, KIND one of {', '.join(READERS)}", flag_values=values)
    absl_flags.DEFINE_float("rate", 0.0, "requests a second; 0: as recorded", 0.0, flag_values=values)
    absl_flags.DEFINE_integer(
        "requests", 0, "the trace's first so many; of lengths, drawn; 0: all", 0, flag_values=values
    )
    absl_flags.DEFINE_float("inputs", 1.0, "input lengths times this", flag_values=values)
    absl_flags.DEFINE_float("outputs", 1.0, "output lengths times this", flag_values=values)
    absl_flags.DEFINE_integer("max_model_len", 0, "longer requests are left out; 0: none is", 0, flag_values=values)
    absl_flags.DEFINE_integer("seed", 0, "of whatever is drawn", flag_values=values)


def _define_cluster(values: flags.FlagValues) -> None:
    absl_flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "as jdisagg.launch takes it", flag_values=values)
    absl_flags.DEFINE_string("model", "opt-13b", f"one of {', '.join(MODELS)}", flag_values=values)
    absl_flags.DEFINE_enum("cost", "roofline", ["distserve", "roofline"], "where seconds come from", flag_values=values)
    absl_flags.DEFINE_enum("engine", "distserve", list(ENGINES), "--cost=distserve: whose fit", flag_values=values)
    absl_flags.DEFINE_enum("hardware", "h100", list(HARDWARE), "--cost=roofline: the devices", flag_values=values)
    absl_flags.DEFINE_enum(
        "dtype", "bfloat16", list(DTYPE_BYTES), "--cost=roofline: of weights and KV", flag_values=values
    )
    absl_flags.DEFINE_float("host_s", 1e-3, "of the host, a plan", 0.0, flag_values=values)
    absl_flags.DEFINE_float("port_gb_per_s", 0.0, "of a worker, each way; 0: KV takes no time", 0.0, flag_values=values)
    absl_flags.DEFINE_enum("transfer", "chunk", list(map(str, TransferMode)), "when KV leaves", flag_values=values)
    absl_flags.DEFINE_integer("slots", 256, "sequences a decode stage takes at once", 1, flag_values=values)
    absl_flags.DEFINE_integer("chunk_tokens", 2048, "of one prefill plan", 1, flag_values=values)
    absl_flags.DEFINE_integer("page_size", 16, "tokens a page", 1, flag_values=values)
    absl_flags.DEFINE_integer("reserve_tokens", 512, "of output that a bed holds pages for", 1, flag_values=values)


def workload(values: flags.FlagValues) -> Trace:
    """The trace as asked for. Raises ConfigError."""
    kind, _, path = values.trace.partition(":")
    if kind not in READERS or not path:
        raise ConfigError(f"--trace={values.trace!r}: write KIND:FILE, KIND one of {', '.join(READERS)}")
    trace = READERS[kind](path).scaled_lengths(values.inputs, values.outputs)
    if values.max_model_len:
        trace = trace.rows(trace.input_tokens + trace.output_tokens <= values.max_model_len)
    if kind == "lengths":
        if not values.rate:
            raise ConfigError("lengths have no arrivals: --rate=R draws them")
        return poisson(trace.sample(values.requests or len(trace), values.seed), values.rate, values.seed)
    trace = spread_ticks(trace) if kind == "mooncake" else trace
    trace = trace.rows(np.arange(len(trace)) < (values.requests or len(trace)))
    return trace.at_rate(values.rate) if values.rate else trace


def costs(values: flags.FlagValues) -> CostOf:
    """Where the seconds of each worker come from."""
    if values.cost == "distserve":
        return published(values.model, values.engine, values.host_s)
    chip, shape = hardware(values.hardware), Model(model(values.model), values.dtype)
    return by_roofline(lambda tp: Roofline(shape, chip, tp, values.dtype, values.host_s))


def build(values: flags.FlagValues, trace: Trace) -> Fleet:
    sizes = Sizes(
        max_model_len=longest(trace),
        page_size=values.page_size,
        num_slots=values.slots,
        chunk_tokens=values.chunk_tokens,
        reserve_tokens=values.reserve_tokens,
        transfer=TransferMode(values.transfer),
    )
    return fleet(MeshSpec.parse(values.mesh), sizes, costs(values), values.port_gb_per_s * 1e9 or None)


def latencies(outcome: Outcome) -> Table:
    """Mean and quantiles, milliseconds."""
    table = Table(title=f"{len(outcome.served)} of {len(outcome.records)} requests served, milliseconds")
    for name in ("", "mean", *(f"p{q}" for q in QUANTILES)):
        table.add_column(name, justify="right" if name else "left")
    for metric in METRICS:
        values = outcome.values(metric)
        found = [values.mean(), *np.percentile(values, QUANTILES)] if len(values) else [float("nan")] * 4
        table.add_row(metric, *(f"{1e3 * each:,.1f}" for each in found))
    for part, mean_s in outcome.parts_s().items():
        table.add_row(f"  {part.replace('_', ' ')}", f"{1e3 * mean_s:,.1f}", *[""] * len(QUANTILES))
    return table


def verdict(outcome: Outcome, devices: int, ttft_s: float, tpot_s: float, took_s: float) -> list[str]:
    """Attainment, throughput, how busy the workers were, and how fast all this was."""
    span_s, requests = max(outcome.span_s, 1e-9), len(outcome.records)
    tokens, met = sum(record.told_tokens for record in outcome.records), outcome.attainment(ttft_s, tpot_s)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items())
    return [
        f"attainment {met:.1%} of TTFT <= {ttft_s:g} s and TPOT <= {tpot_s:g} s:"
        f" {met * requests / span_s / devices:.3g} requests/s a device within both",
        f"{requests / span_s:.4g} requests/s, {tokens / span_s:,.0f} tokens/s over {outcome.span_s:,.1f} s; busy:"
        f" {busy}",
        f"simulated in {took_s:.2f} s: {outcome.events / took_s:,.0f} events/s, {requests / took_s:,.0f} requests/s,"
        f" {outcome.span_s / took_s:,.1f} x real time",
    ]


def simulate(values: flags.FlagValues) -> tuple[Outcome, float]:
    """What came of it, and the seconds that it took."""
    trace = workload(values)
    given = build(values, trace)
    cluster = Cluster(given.workers, given.costs, given.links)
    began = time.perf_counter()
    outcome = cluster.run(trace)
    took_s = time.perf_counter() - began
    cluster.check_all_ended()
    return outcome, took_s


def run(values: flags.FlagValues) -> int:
    outcome, took_s = simulate(values)
    devices = MeshSpec.parse(values.mesh).num_devices
    console = Console()
    console.print(latencies(outcome), highlight=False)
    for line in verdict(outcome, devices, values.slo_ttft_s, values.slo_tpot_s, took_s):
        console.print(line, highlight=False, soft_wrap=True)
    if values.csv:
        write_csv(outcome, values.csv)
        console.print(f"a row a request in {values.csv}", highlight=False)
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 with one line on what was wrong."""
    return flags.command("jdisagg.sim", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
