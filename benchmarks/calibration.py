"""How far the simulator is from the live stack: the same requests at the same times, live and by the profile.

    python -m benchmarks.calibration [--meshes=prefill:tp1,decode:pp1;colocated:1xtp1] [--requests=80] [--load=0.6]
        [--output=FILE] [--profiles=FOLDER]

For each mesh: the run's own programs are timed (as jdisagg profile does) before, between and after the live runs, so
that what else the machine does falls on both sides; the rate is the one at which the simulator's busiest worker is at
work for --load of the time; then Poisson arrivals, open loop, in this process. The simulator is given the instants at
which the requests were really sent. Errors are of means: (simulated - live) / live; MAPE is the mean of their sizes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks import machine as this_machine
from benchmarks.inprocess import Local, settings_of
from benchmarks.load import Sample
from benchmarks.workload import Job, Lengths, Workload
from jdisagg import devices, terminal
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Checked, Profile
from jdisagg.core.settings import Settings
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.profiling.profiler import ProfileRunner, describe_machine
from jdisagg.serve.deploy.assemble import load_executors, router_config, warm
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.sim.measured import cluster_spec_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace

MESHES = "prefill:tp1,decode:pp1;colocated:1xtp1"
MOST_RPS, HALVINGS = 200.0, 14
BAND = 0.15


@dataclass(frozen=True, slots=True)
class Means:
    """Of one run, live or simulated."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float

    def errors(self, live: Means) -> dict[str, float]:
        """Relative, by name."""
        mine, theirs = asdict(self), asdict(live)
        return {name: mine[name] / theirs[name] - 1.0 for name in mine}


def of_samples(samples: Sequence[Sample]) -> Means:
    """Of what the clients saw. Raises ValueError for a run that had failures."""
    failed = [each.error for each in samples if not each.ok]
    if failed:
        raise ValueError(f"{len(failed)} of {len(samples)} requests failed: {failed[0]}")
    span_s = max(each.ended_s for each in samples) - min(each.sent_s for each in samples)
    tpots = [each.tpot_s for each in samples if each.tpot_s is not None]
    ttft_s, tpot_s = (float(np.mean(each)) for each in ([sample.ttft_s for sample in samples], tpots))
    return Means(ttft_s, tpot_s, sum(each.num_tokens for each in samples) / span_s)


def of_outcome(outcome: Outcome) -> Means:
    tokens = sum(record.emitted_tokens for record in outcome.records)
    span_s = outcome.span_s - min(record.arrival_s for record in outcome.records)
    return Means(float(outcome.values("TTFT").mean()), float(outcome.values("TPOT").mean()), tokens / span_s)


def trace_of(jobs: Sequence[Job], at_s: Sequence[float]) -> Trace:
    inputs, outputs = np.array([len(job.prompt) for job in jobs]), np.array([job.max_tokens for job in jobs])
    return Trace(np.array(at_s), inputs, outputs)


def simulate(profile: Profile, mesh: MeshSpec, trace: Trace) -> Outcome:
    cluster = simulated(cluster_spec_of(profile, mesh))
    outcome = cluster.run(trace)
    cluster.check_all_ended()
    return outcome


def poisson_s(number: int, rate_rps: float, seed: int) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_rps, number)).tolist()


def rate_at(load: float, profile: Profile, mesh: MeshSpec, jobs: Sequence[Job]) -> float:
    """Requests a second at which the busiest worker is at work for that share of the time, by the simulator."""
    low, high = 0.0, MOST_RPS
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        busy = max(simulate(profile, mesh, trace_of(jobs, poisson_s(len(jobs), rate, 0))).busy.values())
        low, high = (rate, high) if busy < load else (low, rate)
    return low


async def open_loop(service: LocalService, jobs: Sequence[Job], at_s: Sequence[float]) -> list[Sample]:
    """Each job at its time, whatever became of those before."""
    local, began_s = Local(service), time.perf_counter()

    async def one(job: Job, due_s: float) -> Sample:
        await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        return await local.ask(job)

    return await asyncio.gather(*(one(job, due_s) for job, due_s in zip(jobs, at_s, strict=True)))


class Stack:
    """One mesh's machines, warm, with what is timed on them."""

    def __init__(self, settings: Settings, found: Sequence[object], console: Console) -> None:
        self.settings, self.mesh = settings, mesh_of(settings)
        self.deployment = resolve_deployment(settings, "cpu", None)
        self.bar, self.on_progress = terminal.compile_bar(console)
        with self.bar:
            self.machines = load_executors(self.deployment, settings, found)
            warm(self.machines, self.on_progress)
        self.profiler = ProfileRunner(self.deployment, settings, self.machines)
        self.tokenizer = Tokenizer(self.deployment.model_folder)

    def time(self, rounds: int) -> Profile:
        self.profiler.run(rounds)
        return self.profiler.profile(describe_machine("cpu"))

    def live(self, jobs: Sequence[Job], at_s: Sequence[float]) -> list[Sample]:
        limits, workers = router_config(self.settings), self.deployment.workers
        service = LocalService(
            Router(limits, workers),
            {config.worker: Worker(config) for config in workers},
            self.machines,
            model_name=self.deployment.model_name,
            model_config=self.deployment.model,
            max_model_len=self.deployment.max_model_len,
            tokenizer=self.tokenizer,
        )
        service.start()
        try:
            return asyncio.run(open_loop(service, jobs, at_s))
        finally:
            service.stop()


def calibrate(stack: Stack, values: flags.FlagValues) -> tuple[dict, Profile]:
    """One mesh: its row of the report, and its profile with the errors in it."""
    work = Workload(Lengths.parse(values.inputs), Lengths.parse(values.outputs), stack.deployment.model.vocab_size)
    jobs, mesh = work.draw(values.requests, "calibration"), stack.mesh
    profile = stack.time(values.rounds)
    rate = rate_at(values.load, profile, mesh, jobs)
    stack.live(jobs[:4], [0.0] * 4)  # threads, caches
    runs = []
    for number in range(values.runs):
        runs.append(stack.live(jobs, poisson_s(len(jobs), rate, number)))
        profile = stack.time(values.rounds)
    sent_s = [[sample.sent_s - run[0].sent_s for sample in run] for run in runs]
    outcomes = [simulate(profile, mesh, trace_of(jobs, each)) for each in sent_s]
    live, simulated_means = mean_of([of_samples(run) for run in runs]), mean_of([of_outcome(each) for each in outcomes])
    errors = simulated_means.errors(live)
    mape = float(np.mean([abs(each) for each in errors.values()]))
    text = f"{values.requests} requests, {values.inputs} + {values.outputs} tokens, Poisson at {rate:.3g}/s, {mesh}"
    profile = profile.with_check(Checked(profile.date, text, errors, mape))
    row = {"mesh": str(mesh), "rate_rps": rate, "busy": outcomes[0].busy, "live": asdict(live)}
    row |= {"simulated": asdict(simulated_means), "errors": errors, "mape": mape, "runs": values.runs}
    row |= {"live_runs": [asdict(of_samples(run)) for run in runs]}
    return row | {"slowdown": profile.slowdown, "host": asdict(profile.host), "requests": values.requests}, profile


def mean_of(runs: Sequence[Means]) -> Means:
    return Means(*(float(each) for each in np.mean([list(asdict(run).values()) for run in runs], axis=0)))


def show(console: Console, rows: Sequence[dict]) -> None:
    table = Table("mesh", "", "live", "simulated", "error", title="means, of the same requests at the same times")
    for row in rows:
        for name, error in row["errors"].items():
            scale, unit = (1e3, "ms") if name.endswith("t_s") else (1.0, "tokens/s")
            shown = [f"{scale * row[side][name]:.4g} {unit}" for side in ("live", "simulated")]
            verdict = "" if abs(error) <= BAND else "  over the band"
            table.add_row(row["mesh"], name.partition("_")[0], *shown, f"{100 * error:+.1f} %{verdict}")
        table.add_row(row["mesh"], "MAPE", "", "", f"{100 * row['mape']:.1f} %", end_section=True)
    console.print(table)


def declare() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("meshes", MESHES, "meshes, with semicolons", flag_values=values)
    flags.DEFINE_integer("requests", 80, "of each live run", 4, flag_values=values)
    flags.DEFINE_integer("runs", 2, "live runs of each mesh", 1, flag_values=values)
    flags.DEFINE_integer("rounds", 2, "of timing before and after each live run", 1, flag_values=values)
    flags.DEFINE_float("load", 0.6, "share of the time that the busiest worker is at work", flag_values=values)
    flags.DEFINE_string("inputs", "16:256", "prompt tokens", flag_values=values)
    flags.DEFINE_string("outputs", "8:64", "output tokens", flag_values=values)
    flags.DEFINE_list("settings", ["max_model_len=384"], "as jdisagg.launch takes them", flag_values=values)
    flags.DEFINE_string("output", "", "file for the report, JSON", flag_values=values)
    flags.DEFINE_string("profiles", "", "folder for the profiles, with their errors in them", flag_values=values)
    return values


def main(values: flags.FlagValues) -> int:
    console, rows = Console(), []
    meshes = values.meshes.split(";")
    found = devices.prepare("cpu", max(MeshSpec.parse(mesh).num_devices for mesh in meshes))
    for mesh in meshes:
        settings = Settings(mesh=mesh, **settings_of(values.settings))
        row, profile = calibrate(Stack(settings, found, Console(stderr=True)), values)
        rows.append(row)
        if values.profiles:
            profile.save(Path(values.profiles) / f"profile-{len(rows)}.json")
    show(console, rows)
    if values.output:
        Path(values.output).write_text(json.dumps({**this_machine.described(), "meshes": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    flag_values = declare()
    sys.exit(entry.run(lambda: main(flag_values), flag_values, __doc__, sys.argv))
