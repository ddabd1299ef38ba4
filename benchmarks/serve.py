"""Load on a server or on a stack in this process: `python -m benchmarks.serve --help`.

    python -m benchmarks.serve --url=http://127.0.0.1:8000/v1 --concurrency=1,2,4,8 --plot=load.png
    python -m benchmarks.serve --mesh=prefill:tp2,decode:pp2 --prompt_tokens=64:256 --output=load.json

Entry of its own: the only file here with flags. Prints tables; --output writes JSON, --plot a picture.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import Progress

from benchmarks import entry, machine, plot, report
from benchmarks.counters import Counters
from benchmarks.figures import SLO, Figures, summed_up
from benchmarks.http_client import Server, first_model
from benchmarks.inprocess import Local, settings_of
from benchmarks.load import Ask, closed_loop
from benchmarks.workload import Lengths, Workload
from jdisagg import devices
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy.assemble import build
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment

FLAGS = flags.FlagValues()
URL = flags.DEFINE_string(
    "url", "", "a running server, as http://127.0.0.1:8000/v1; empty: a stack in this process", flag_values=FLAGS
)
MODEL = flags.DEFINE_string(
    "model", "", "with --url: the model's name; without: its folder (empty: the first, the embedded)", flag_values=FLAGS
)
MESH = flags.DEFINE_string("mesh", "prefill:tp2,decode:pp2", "in process: the stack's mesh", flag_values=FLAGS)
SETTINGS = flags.DEFINE_list(
    "settings", [], "in process: more settings of jdisagg.launch, as dtype=float32,kv_tokens=8192", flag_values=FLAGS
)
CONCURRENCY = flags.DEFINE_list(
    "concurrency", ["1", "2", "4", "8", "16", "32"], "streams, one level after the other", flag_values=FLAGS
)
NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", 0, "requests of a level; 0: four a stream, 16 at least", flag_values=FLAGS
)
PROMPT_TOKENS = flags.DEFINE_string(
    "prompt_tokens", "128", "prompt length: fixed, or uniform as 32:512", flag_values=FLAGS
)
OUTPUT_TOKENS = flags.DEFINE_string(
    "output_tokens", "64", "output length: fixed, or uniform as 16:128", flag_values=FLAGS
)
PROMPTS = flags.DEFINE_enum(
    "prompts",
    "tokens",
    ["tokens", "text"],
    "random token ids, or random words (--prompt_tokens of them)",
    flag_values=FLAGS,
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 4096, "token ids are drawn below this", lower_bound=2, flag_values=FLAGS
)
SEED = flags.DEFINE_integer("seed", 0, "of prompts and lengths", flag_values=FLAGS)
SLO_TTFT_MS = flags.DEFINE_float(
    "slo_ttft_ms", 1000.0, "a good request's longest time to first token", flag_values=FLAGS
)
SLO_TPOT_MS = flags.DEFINE_float(
    "slo_tpot_ms", 50.0, "a good request's longest mean time a token after the first", flag_values=FLAGS
)
LEDGER = flags.DEFINE_bool(
    "ledger", True, "with --url: ask for the phase ledger (other servers ignore or refuse it)", flag_values=FLAGS
)
EXTRA_BODY = flags.DEFINE_string(
    "extra_body", "{}", "with --url: JSON object of more fields for every request", flag_values=FLAGS
)
PID = flags.DEFINE_integer("pid", 0, "with --url: the server's process, for its CPU seconds", flag_values=FLAGS)
TIMEOUT_S = flags.DEFINE_float("timeout_s", 300.0, "longest wait for one answer", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)
PLOT = flags.DEFINE_string("plot", "", "PNG file to write", flag_values=FLAGS)
TITLE = flags.DEFINE_string("title", "", "of table and plot; empty: made up from the target", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: how to ask it, its name, and what can be known of its costs."""

    name: str
    ask: Ask
    cpu_s: Callable[[], float | None]
    counters: Counters | None = None
    vocab_size: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement to be made."""

    levels: tuple[int, ...]
    num_requests: int
    workload: Workload
    seed: int
    slo: SLO

    def within(self, vocab_size: int) -> Plan:
        """The same with no token id outside a model's vocabulary."""
        workload = replace(self.workload, vocab_size=min(self.workload.vocab_size, vocab_size))
        return replace(self, workload=workload)

    def requests_at(self, concurrency: int) -> int:
        return self.num_requests or max(16, 4 * concurrency)


Told = Callable[[int, int, int], object]  # (level, requests done, requests in all)


async def measure(target: Target, plan: Plan, told: Told) -> list[Figures]:
    """Every level, after a warm-up of its own."""
    return [await measure_level(target, plan, level, told) for level in plan.levels]


async def measure_level(target: Target, plan: Plan, level: int, told: Told) -> Figures:
    """One level of concurrency; prompts differ from level to level, so that no prefix cache helps."""
    warm = plan.workload.draw(min(level, plan.requests_at(level)), f"{plan.seed}-{level}-warm")
    await closed_loop(warm, level, target.ask)
    jobs = plan.workload.draw(plan.requests_at(level), f"{plan.seed}-{level}")
    if target.counters is not None:
        target.counters.reset()
    cpu_before, done = target.cpu_s(), itertools.count(1)
    burst = await closed_loop(jobs, level, target.ask, lambda _: told(level, next(done), len(jobs)))
    cpu_after = target.cpu_s()
    cpu_s = cpu_after - cpu_before if cpu_before is not None and cpu_after is not None else None
    engine = target.counters.figures() if target.counters is not None else None
    return summed_up(burst, plan.slo, cpu_s, engine)


def report_of(target: Target, plan: Plan, levels: Sequence[Figures]) -> dict[str, Any]:
    """The JSON of one run."""
    return machine.described() | {
        "target": target.name,
        "workload": {
            "prompt_tokens": str(plan.workload.prompt),
            "output_tokens": str(plan.workload.output),
            "prompts": "text" if plan.workload.text else "tokens",
            "seed": plan.seed,
        },
        "slo": {"ttft_ms": plan.slo.ttft_ms, "tpot_ms": plan.slo.tpot_ms},
        "levels": [each.as_json() for each in levels],
    }


def plan_of_flags() -> Plan:
    """Raises ValueError for a flag that cannot be."""
    levels = tuple(int(each) for each in CONCURRENCY.value)
    if not levels or min(levels) < 1:
        raise ValueError(f"--concurrency is {','.join(CONCURRENCY.value)!r}, must be numbers of 1 or more")
    workload = Workload(
        Lengths.parse(PROMPT_TOKENS.value),
        Lengths.parse(OUTPUT_TOKENS.value),
        VOCAB_SIZE.value,
        PROMPTS.value == "text",
    )
    return Plan(levels, NUM_REQUESTS.value, workload, SEED.value, SLO(SLO_TTFT_MS.value, SLO_TPOT_MS.value))


def http_target() -> Target:
    """The server of --url; asks it for its model's name where --model is empty."""
    model = MODEL.value or asyncio.run(first_model(URL.value))
    extra = ({"ledger": True} if LEDGER.value else {}) | json.loads(EXTRA_BODY.value)
    server = Server(URL.value.rstrip("/"), model, extra, TIMEOUT_S.value)
    pid = PID.value
    return Target(f"{model} over HTTP", server.ask, lambda: machine.cpu_seconds(pid) if pid else None)


def local_target(stack: ExitStack, levels: Sequence[int]) -> Target:
    """A stack of this process, with slots for the highest level unless --settings says otherwise."""
    chosen = {"mesh": MESH.value, "model": MODEL.value, "max_num_seqs": max(levels)} | settings_of(SETTINGS.value)
    settings = Settings(**chosen)
    settings.check()
    num_devices = mesh_of(settings).num_devices
    found = devices.prepare(settings.platform, num_devices, settings.compile_cache_dir)
    deployment = resolve_deployment(
        settings, found[0].platform, devices.memory_bytes(found[0]), chip=devices.chip_of(found[0])
    )
    counters = Counters(deployment.kv.bytes_per_page)
    service = build(deployment, settings, found, observers=[counters])
    stack.callback(service.stop)
    service.start()
    name = f"{deployment.model_name} on {deployment.mesh}, in process"
    return Target(
        name, Local(service).ask, lambda: machine.cpu_seconds(os.getpid()), counters, deployment.model.vocab_size
    )


def run(console: Console) -> None:
    plan = plan_of_flags()
    with ExitStack() as stack:
        target = http_target() if URL.value else local_target(stack, plan.levels)
        plan = plan.within(target.vocab_size)
        bar = stack.enter_context(Progress(console=console, transient=True, refresh_per_second=2))
        task = bar.add_task("warm-up")

        def told(level: int, done: int, total: int) -> None:
            bar.update(task, description=f"{level} streams", completed=done, total=total)

        levels = asyncio.run(measure(target, plan, told))
    title = TITLE.value or target.name
    console.print(report.load_table(title, levels))
    written = report_of(target, plan, levels)
    if OUTPUT.value:
        report.write_json(OUTPUT.value, written)
    if PLOT.value:
        note = (
            f"{plan.workload.prompt} tokens in, {plan.workload.output} out, "
            f"on {written['machine']['cores']} x {written['machine']['processor']}, {written['date'][:10]}"
        )
        plot.plot_load(PLOT.value, title, note, levels, plan.slo)


def main() -> int:
    run(Console())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
