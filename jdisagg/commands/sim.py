"""Simulates a workload on a mesh with the serving router and workers, in virtual time.

    python -m jdisagg sim --trace=azure:FILE --rate=4 --mesh=prefill:2xtp1,decode:1xtp1 --model=opt-13b --cost=distserve
    python -m jdisagg sim --trace=lengths:FILE --rate=8 --requests=500 --mesh=prefill:tp2,decode:tp2
        --model=llama3-70b --cost=roofline --hardware=h100 --slo_ttft_s=1 --slo_tpot_s=0.05 --csv=requests.csv
    python -m jdisagg sim --trace=lengths:FILE --rates=1,2,4,8 --report=out.html --parquet=requests.parquet ...

A trace is a kind and a file: azure (TIMESTAMP, ContextTokens, GeneratedTokens), mooncake (JSON lines) or lengths
(num_prefill_tokens, num_decode_tokens); or mix:INPUT+OUTPUT@SHARE,... Arrivals of the last two are drawn: Poisson, or
by --servegen's rates. --rate scales recorded arrivals by one factor.

    --cost=distserve         fits to measurements on A100-80G
    --cost=roofline          arithmetic, and optimistic about old engines
    --cost=kernels:rtx4090   measured kernels (or rtxpro6000, or a folder of LLMServingSim's tables)
    --cost=profile:FILE      your own devices timed by `jdisagg profile`: the model, sizes and transfers of that run

If a trace has block hashes (mooncake), prompts with common prefixes share KV, as in serving; --dram_tokens,
--disk_tokens and --pool_tokens keep it below HBM.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from absl import flags as absl_flags
from rich.console import Console

from jdisagg import command, flags
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Checked, Profile, read_profile
from jdisagg.core.router_config import RESERVE_TOKENS, RouterConfig, Routing
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import TransferMode
from jdisagg.policy.scaling import Scaling
from jdisagg.sim.arithmetic import DTYPE_BYTES
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import (
    FREE_LINK,
    ClusterSpec,
    CostOf,
    Hosts,
    PortOf,
    by_device,
    by_kernels,
    cluster_spec,
    devices_of,
    longest,
    published,
    with_room,
    with_tiers,
)
from jdisagg.sim.cost_models import ENGINES, Model, Roofline
from jdisagg.sim.failing import FailingCluster, LossSchedule, describe_losses, drawn_losses, failing
from jdisagg.sim.hardware import model_of
from jdisagg.sim.kernel_tables import KernelTables, read_kernels, shipped_kernels
from jdisagg.sim.measured import check_fits, cluster_spec_of
from jdisagg.sim.outcome import SLO, Point, trust, write_csv
from jdisagg.sim.scaled import FlipCosts, ScaledCluster, describe_scaling, flips_of, scaled
from jdisagg.sim.shared import simulated
from jdisagg.sim.simulation import SpanLog
from jdisagg.sim.summary import SimulationRun, curve, latencies, summary_lines, write_json
from jdisagg.sim.tiers import TierSpec, rates_said, tier_speeds
from jdisagg.sim.traces import Trace, closed_loop
from jdisagg.sim.traces.workloads import by_rates, cut, drawn, read_workload

PORT_HELP = (
    "GB/s of a worker's port, each way; 0: the NICs of --hardware (of an A100 for distserve); inf: KV takes no time"
)
FITTED_ON = "a100"  # DistServe's measurements
WRITERS = {"parquet": "jdisagg.sim.parquet", "report": "jdisagg.sim.report"}  # they need optional packages


def declare() -> flags.FlagValues:
    values = flags.own()
    _define_workload(values)
    _define_cluster(values)
    _define_output(values)
    return values


def _define_output(values: flags.FlagValues) -> None:
    flags.define(values, slo_ttft_s=1.0, slo_tpot_s=0.1, attainment=0.9, json="")
    absl_flags.DEFINE_string("csv", "", "file for a row a request", flag_values=values)
    absl_flags.DEFINE_string("parquet", "", "the same as Parquet; needs pyarrow", flag_values=values)
    absl_flags.DEFINE_string("report", "", "HTML page that stands alone; needs matplotlib", flag_values=values)


def _define_workload(values: flags.FlagValues) -> None:
    flags.define(values, trace="", rate=0.0, inputs=1.0, outputs=1.0, max_model_len=0, seed=0)
    absl_flags.DEFINE_string("window", "", "START:STOP, seconds of recorded arrivals or rates", flag_values=values)
    absl_flags.DEFINE_string("part", "", "K/N: each recorded request falls to one of N parts", flag_values=values)
    absl_flags.DEFINE_string(
        "servegen", "", "FILE@MODEL: arrivals as these rates go up and down, --rate in the mean", flag_values=values
    )
    absl_flags.DEFINE_list(
        "rates", [], "as 1,2,4: goodput over these; told in full: --rate, else the highest good one", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "requests", 0, "the trace's first so many; of lengths, drawn; 0: all", 0, flag_values=values
    )
    absl_flags.DEFINE_integer(
        "concurrency", 0, "so many clients, each with one request at a time; 0: by arrivals", 0, flag_values=values
    )
    absl_flags.DEFINE_float("think_s", 0.0, "--concurrency: from an answer to the next request", flag_values=values)


def _define_cluster(values: flags.FlagValues) -> None:
    kinds = {"engine": list(ENGINES), "dtype": list(DTYPE_BYTES)}
    flags.define(values, kinds, model="opt-13b", engine="distserve", dtype="bfloat16")
    flags.define(values, mesh="prefill:tp1,decode:tp1", cost="roofline", hardware="h100", host_s=1e-3, kv_tokens=0)
    flags.define(values, early_rejection="off")
    flags.define(values, routing="cache_aware", prefix_caching="on", mixed_steps="on", transfer="auto")
    flags.define(values, max_num_seqs=0, max_num_batched_tokens=0, page_size=0, reserve_tokens=RESERVE_TOKENS)
    flags.define(values, dram_tokens=0, disk_tokens=0)
    absl_flags.DEFINE_integer(
        "pool_tokens",
        0,
        "KV in a pool that all workers share, as of --pool live; 0: there is none",
        0,
        flag_values=values,
    )
    absl_flags.DEFINE_bool("peer_fetch", False, flags.WORDS["peer_fetch"].help, flag_values=values)
    absl_flags.DEFINE_list(
        "tier_gb_per_s", [], "of a worker, each way, as dram:25,pool:12,peer:12; else --hardware's", flag_values=values
    )
    absl_flags.DEFINE_float("port_gb_per_s", 0.0, PORT_HELP, 0.0, flag_values=values)
    absl_flags.DEFINE_float("nic_gb_per_s", 0.0, "of a host, each way, shared by its workers", 0.0, flag_values=values)
    flags.define(values, autoscale="off")
    until, change = "--autoscale: until what runs there goes on elsewhere", "--autoscale: of a machine's change of role"
    absl_flags.DEFINE_float("flip_drain_s", 10.0, until, 0.0, flag_values=values)
    absl_flags.DEFINE_float("flip_reshape_s", 5.0, change, 0.0, flag_values=values)
    every, noticed = "a worker is lost so often, in the mean; 0: never", "--lost_every_s: until a loss is noticed"
    absl_flags.DEFINE_float("lost_every_s", 0.0, every, 0.0, flag_values=values)
    absl_flags.DEFINE_float("noticed_s", 5.0, noticed, 0.0, flag_values=values)
    absl_flags.DEFINE_float("back_s", 300.0, "--lost_every_s: from then until another joins", 0.0, flag_values=values)
    absl_flags.DEFINE_integer("workers_per_host", 8, "in the mesh's order; with --nic_gb_per_s", 1, flag_values=values)


def workload(values: flags.FlagValues, rate: float) -> Trace:
    """Returns the requested trace at `rate` requests per second (0: as recorded). Raises ConfigError."""
    trace = read_workload(values.trace).scaled_lengths(values.inputs, values.outputs)
    if values.max_model_len:
        trace = trace.rows(trace.input_tokens + trace.output_tokens <= values.max_model_len)
    if not trace.span_s or values.servegen:
        return _with_arrivals(values, trace, rate)
    trace = cut(trace, values.window, values.part, values.seed)
    trace = trace.rows(np.arange(len(trace)) < (values.requests or len(trace)))
    return trace.at_rate(rate) if rate else trace


def _with_arrivals(values: flags.FlagValues, lengths: Trace, rate: float) -> Trace:
    if values.servegen:
        trace = by_rates(lengths, values.servegen, values.window, rate, values.seed)
        return trace.rows(np.arange(len(trace)) < (values.requests or len(trace)))
    if rate:
        return drawn(lengths, rate, values.requests, values.seed)
    if not values.concurrency:
        raise ConfigError("lengths have no arrivals: --rate=R or --servegen draws them, --concurrency=N has none")
    return closed_loop(lengths.sample(values.requests or len(lengths), values.seed), values.concurrency)


def costs(values: flags.FlagValues) -> CostOf:
    """Returns the costs of each worker and its capacity in KV tokens."""
    cost_of = _costs(values)
    return with_room(cost_of, values.kv_tokens) if values.kv_tokens else cost_of


def _costs(values: flags.FlagValues) -> CostOf:
    if values.cost == "distserve":
        return published(values.model, values.engine, values.host_s)
    kind, _, tables = values.cost.partition(":")
    if kind == "kernels" and tables:
        return _kernels(values, tables)
    if values.cost != "roofline":
        raise FlagError(f"--cost={values.cost!r}, must be distserve, roofline, kernels:DEVICE or profile:FILE")
    devices, shape = devices_of(values.hardware), Model(model_of(values.model), values.dtype)
    return by_device(devices, lambda chip, tp: Roofline(shape, chip, tp, values.dtype, values.host_s))


def _kernels(values: flags.FlagValues, tables: str) -> CostOf:
    """Returns kernels measured on a device with shipped tables, or the tables of a folder (of one tp)."""
    if not values.kv_tokens:
        raise FlagError("--cost=kernels: --kv_tokens=N says how many tokens of KV a worker has room for")
    shape = Model(model_of(values.model), values.dtype)

    def of(tp: int) -> KernelTables:
        kernels = read_kernels(tables) if Path(tables).is_dir() else shipped_kernels(tables, values.model, tp)
        return KernelTables(shape, kernels, tp, values.host_s)

    return by_kernels(of, values.kv_tokens)


def build(values: flags.FlagValues, trace: Trace) -> ClusterSpec:
    """Returns the cluster with the tiers below its workers' HBM. Raises ConfigError."""
    given, tier_rates = _in_hbm(values, trace), rates_said(values.tier_gb_per_s)
    tokens = {"dram_tokens": values.dram_tokens, "disk_tokens": values.disk_tokens, "pool_tokens": values.pool_tokens}
    if not any(tokens.values()) and not values.peer_fetch:
        return given
    if not any(each.prefix_caching for each in given.workers):
        what = ", ".join(f"--{name}={size}" for name, size in tokens.items() if size) or "--peer_fetch"
        raise ConfigError(
            f"{what}: nothing is kept of --trace={values.trace} with --prefix_caching={values.prefix_caching}:"
            " take a trace that names its blocks (mooncake), and on"
        )
    speeds = tier_speeds(MeshSpec.parse(values.mesh), devices_of(values.hardware), tier_rates)
    spec = TierSpec(speeds, values.pool_tokens)
    return with_tiers(given, spec, values.dram_tokens, values.disk_tokens, peer_fetch=values.peer_fetch)


def _in_hbm(values: flags.FlagValues, trace: Trace) -> ClusterSpec:
    """Returns the cluster without lower tiers; prefix caching is off if no block has a hash."""
    keeps = values.prefix_caching == "on" and bool(trace.block_hashes)
    if values.cost.startswith("profile:"):
        mode = TransferMode(values.transfer) if values["transfer"].present else None
        given = cluster_spec_of(_profiled(values), MeshSpec.parse(values.mesh), mode, prefix_caching=keeps)
        check_fits(given, trace)
        return given
    mesh, cost_of = MeshSpec.parse(values.mesh), costs(values)
    is_kernels = values.cost.startswith("kernels:")
    hosts = Hosts(values.workers_per_host, values.nic_gb_per_s * 1e9) if values.nic_gb_per_s else None
    settings = settings_of(values, longest(trace), keeps=keeps)
    ahead = {"chunks_in_flight": 1} if is_kernels and settings.mixed_steps == "on" else {}
    return cluster_spec(mesh, settings, cost_of, port_of(values, mesh), hosts, **ahead)


def settings_of(values: flags.FlagValues, max_model_len: int, *, keeps: bool) -> Settings:
    """Returns the server's settings for the flags; settings without a flag here have the server's defaults. `keeps`:
    the prompts have block hashes, so that prefix caching can find KV. Raises FlagError."""
    is_fit, is_kernels = values.cost == "distserve", values.cost.startswith("kernels:")
    if is_fit and values["mixed_steps"].present and values.mixed_steps == "on":
        raise FlagError("--mixed_steps=on and --cost=distserve: fits have no times of mixed steps; say off")
    mixed = "off" if is_fit else values.mixed_steps
    one_at_a_time = is_kernels and mixed == "on"  # as such engines run
    return Settings(
        max_model_len=max_model_len,
        page_size=values.page_size,
        max_num_seqs=values.max_num_seqs,
        max_num_batched_tokens=values.max_num_batched_tokens,
        reserve_tokens=values.reserve_tokens,
        transfer=values.transfer,
        mixed_steps=mixed,
        prefix_caching="on" if keeps else "off",
        short_prompt_tokens=0 if is_fit else Settings.short_prompt_tokens,
        steps_in_flight=1 if one_at_a_time else Settings.steps_in_flight,
    )


def port_of(values: flags.FlagValues, mesh: MeshSpec) -> float | PortOf:
    """Returns each worker's port: --port_gb_per_s, else its devices' NICs. Raises FlagError if neither is known."""
    if values.port_gb_per_s:
        return values.port_gb_per_s * 1e9
    if len(mesh.pools) == 1 or values.nic_gb_per_s:
        return FREE_LINK  # no KV crosses a port, or the hosts' NICs are the bottleneck
    if values.cost.startswith("kernels:"):
        raise FlagError(f"--cost={values.cost} has no link: say --port_gb_per_s=N; inf: KV takes no time")
    devices = devices_of(FITTED_ON if values.cost == "distserve" else values.hardware)
    return lambda place: devices[place.role].port_bytes_per_s * len(place.device_ids)


def simulate(values: flags.FlagValues, rate: float) -> SimulationRun:
    trace = workload(values, rate)
    given = build(values, trace)
    log = SpanLog() if values.report else None
    cluster = clustered(values, given, trace, log=log, router=router_of(values))
    began = time.perf_counter()
    asks = slo_of(values) if values.early_rejection == "auto" else None
    outcome = cluster.run(trace, clients=values.concurrency, think_s=values.think_s, asks=asks)
    took_s = time.perf_counter() - began
    cluster.check_all_ended()
    run = SimulationRun(outcome, took_s, rate or trace.rate_rps, log)
    if isinstance(cluster, FailingCluster):
        return replace(run, changes=describe_losses(cluster))
    if isinstance(cluster, ScaledCluster):
        return replace(run, changes=describe_scaling(cluster), flips=flips_of(cluster))
    return run


def clustered(values: flags.FlagValues, given: ClusterSpec, trace: Trace, **named: Any) -> Cluster:
    """Returns the cluster, with an autoscaler or losses if requested. Raises ConfigError."""
    if values.lost_every_s:
        if values.autoscale != "off":
            raise ConfigError(f"--lost_every_s: who is lost is simulated without --autoscale={values.autoscale}")
        losses = drawn_losses(given.workers, values.lost_every_s, trace.span_s, values.seed)
        return failing(given, LossSchedule(losses, values.noticed_s, values.back_s), **named)
    if values.autoscale == "off":
        return simulated(given, **named)
    if values.cost.startswith("profile:"):
        raise ConfigError("--autoscale: a profile has each worker's prices in its own role alone; take another --cost")
    costs = FlipCosts(values.flip_drain_s, values.flip_reshape_s)
    return scaled(given, Scaling(), costs, flips=values.autoscale == "flip", **named)


def slo_of(values: flags.FlagValues) -> SLO:
    return SLO(values.slo_ttft_s, values.slo_tpot_s, values.attainment)


def router_of(values: flags.FlagValues) -> RouterConfig:
    return replace(PATIENT, routing=Routing(values.routing), routing_seed=values.seed)


def sweep(values: flags.FlagValues, slo: SLO, devices: int) -> tuple[SimulationRun, list[Point]]:
    """Returns the run to report in full, and a point for each rate; only one whole run is kept in memory."""
    rates = rates_of(values)
    reported, points = simulate(values, rates[0]), []
    for rate in rates:
        run = simulate(values, rate) if rate != rates[0] else reported
        points.append(Point.of(run.outcome, run.rate_rps, slo, devices))
        if rate == values.rate or (not values.rate and points[-1].attainment >= slo.share):
            reported = run
    return reported, points


def rates_of(values: flags.FlagValues) -> list[float]:
    """Returns every requested rate in ascending order; [0] if there is none. Raises FlagError."""
    try:
        rates = {float(each) for each in values.rates} | ({values.rate} if values.rate else set())
    except ValueError as error:
        raise FlagError(f"--rates={','.join(values.rates)}: {error}") from error
    if rates and min(rates) <= 0:
        raise FlagError(f"--rates={','.join(values.rates)} has {min(rates):g}, must be more than 0")
    return sorted(rates) or [values.rate]


def run(values: flags.FlagValues) -> int:
    slo = slo_of(values)
    devices = MeshSpec.parse(values.mesh).num_devices
    writers = {flag: _writer_module(flag) for flag in WRITERS if values[flag].value}  # checked before any work
    reported, points = sweep(values, slo, devices)
    console = Console()
    console.print(latencies(reported.outcome), highlight=False)
    for line in summary_lines(reported, slo, devices):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(trust(checked_of(values)), highlight=False, soft_wrap=True)
    if len(points) > 1:
        console.print(curve(points, slo), highlight=False)
    if values.csv:
        write_csv(reported.outcome, values.csv)
    if values.json:
        write_json(reported, slo, devices, values.json)
    if "parquet" in writers:
        writers["parquet"].write_parquet(reported.outcome, values.parquet)
    if "report" in writers:
        writers["report"].write_report(story(values, writers["report"], reported, points), values.report)
    for path in filter(None, (values.csv, values.json, values.parquet, values.report)):
        console.print(f"wrote {path}", highlight=False)
    return 0


def story(values: flags.FlagValues, report_module: ModuleType, reported: SimulationRun, points: Sequence[Point]) -> Any:
    """Returns the contents of the page of --report."""
    outcome = reported.outcome
    facts = {
        "model": _profiled(values).model if values.cost.startswith("profile:") else values.model,
        "costs": values.cost
        + {"roofline": f" of {values.hardware}", "distserve": f", {values.engine}"}.get(values.cost, ""),
        "workload": f"{Path(values.trace.partition(':')[2]).name}, {len(outcome.records):,} requests",
        "rate": f"{reported.rate_rps:.4g} requests/s",
        "simulated": f"{outcome.span_s:,.0f} s in {reported.took_s:.1f} s",
    }
    return report_module.ReportContent(
        title=f"{facts['model']} on {values.mesh}, simulated",
        command="python -m jdisagg sim " + shlex.join(sys.argv[1:]),
        facts=facts,
        outcome=outcome,
        log=reported.log,
        slo=slo_of(values),
        devices=MeshSpec.parse(values.mesh).num_devices,
        curve=points,
        checked=checked_of(values),
    )


def checked_of(values: flags.FlagValues) -> Checked | None:
    """Returns the result of the last check of a profile's costs; None for other costs."""
    return _profiled(values).checked if values.cost.startswith("profile:") else None


def _profiled(values: flags.FlagValues) -> Profile:
    """Reads the profile of --cost=profile:FILE. Raises ConfigError."""
    return read_profile(values.cost.partition(":")[2])


def _writer_module(flag: str) -> ModuleType:
    """Returns the module that writes the flag's file. Raises ConfigError if a package it needs is not installed."""
    try:
        return importlib.import_module(WRITERS[flag])
    except ModuleNotFoundError as error:
        raise ConfigError(f"--{flag} needs {error.name}: pip install matplotlib pyarrow") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg sim", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main())
