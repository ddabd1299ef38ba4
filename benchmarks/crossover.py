"""When does disaggregation pay? One device, two replicas, or prefill and decode apart, on equal hardware.

    python -m benchmarks.crossover --output=crossover.json --plot=crossover.png       # some 12 minutes
    python -m benchmarks.crossover --quick                                            # some 3

A device is a process pinned to one core, with one thread of XLA. The stacks stand side by side and are asked in turn,
burst by burst, with the same prompts; medians of rounds are told with their range, and two figures whose ranges
overlap, or that differ by less than a twentieth, count as equal. A stream asks again as soon as it has its answer; in
the bursty workload all ask at once, and again when all have their answers. The objectives are multiples of what one
stream sees on one idle device.

--profiles shows what the simulator foretells. A turn costs by its slots, so there is a profile for each number:

    for slots in 16 32; do PJRT_NPROC=1 taskset -c 0 python -m jdisagg profile --mesh=prefill:tp1,decode:tp1 \\
        --max_num_seqs=$slots --max_model_len=768 --output=slots$slots.json; done
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import crossover_figures as figures
from benchmarks import crossover_plot, crossover_sim, entry, machine, report
from benchmarks.crossover_figures import ARCHITECTURES, DISAGGREGATED, REPLICATED, SINGLE, Cell, Key, Middle, Turn
from benchmarks.crossover_stacks import PLANS, Stack, standing
from benchmarks.figures import SLO
from benchmarks.http_client import Server
from benchmarks.load import Ask, Burst, closed_loop
from benchmarks.workload import Job, Lengths, Workload
from jdisagg.core.profile import Profile, read_profile
from jdisagg.model.hf_config import read_config
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL

FLAGS = flags.FlagValues()
QUICK = flags.DEFINE_bool("quick", False, "2 rounds at 1, 4 and 16 streams", flag_values=FLAGS)
ROUNDS = flags.DEFINE_integer("rounds", 3, "times that everything is asked", lower_bound=1, flag_values=FLAGS)
CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "2", "4", "8", "16", "32"], "streams at once", flag_values=FLAGS)
WORKLOADS = flags.DEFINE_list(
    "workloads", ["prefill-heavy", "balanced", "decode-heavy", "bursty"], "which to ask for", flag_values=FLAGS
)
MODEL = flags.DEFINE_string("model", "", "model folder; empty: the embedded model", flag_values=FLAGS)
LAUNCH = flags.DEFINE_list("launch", [], "more flags of every process, as load_format=random", flag_values=FLAGS)
SLO_TTFT = flags.DEFINE_float("slo_ttft", 8.0, "times the TTFT of an idle device: a good request's", flag_values=FLAGS)
SLO_TPOT = flags.DEFINE_float("slo_tpot", 3.0, "times the TPOT of an idle device: a good request's", flag_values=FLAGS)
LIMIT_S = flags.DEFINE_float("limit_s", 600.0, "no round begins that would end later, starts apart", flag_values=FLAGS)
START_S = flags.DEFINE_float("start_s", 600.0, "longest wait for the stacks", flag_values=FLAGS)
CACHE_DIR = flags.DEFINE_string("cache_dir", "", "keeps compiled programs for the next run", flag_values=FLAGS)
PROFILES = flags.DEFINE_list(
    "profiles", [], "of jdisagg profile on one core: the simulation is shown beside", flag_values=FLAGS
)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)
PLOT = flags.DEFINE_string("plot", "", "PNG file to write", flag_values=FLAGS)

QUICK_ROUNDS, QUICK_LEVELS = 2, (1, 4, 16)
TIMEOUT_S = 120.0  # longest answer
BURSTY = "bursty"
LENGTHS = {  # prompt and output tokens
    "prefill-heavy": ("256:512", "8:24"),
    "balanced": ("64:192", "32:64"),
    "decode-heavy": ("16:64", "64:128"),
    BURSTY: ("64:384", "16:96"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured."""

    workloads: Mapping[str, Workload]
    levels: tuple[int, ...]
    rounds: int

    def jobs(self, workload: str, streams: int, number: int) -> list[Job]:
        """The same for every architecture, new in each round and at each level."""
        return self.workloads[workload].draw(num_jobs(workload, streams), f"{number}-{workload}-{streams}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(each.prompt.high + each.output.high for each in self.workloads.values())

    def cells(self) -> Iterator[tuple[str, int]]:
        return ((workload, streams) for workload in self.workloads for streams in self.levels)


def num_jobs(workload: str, streams: int) -> int:
    """Enough for a median, whole gangs where all ask at once."""
    return streams * max(2, -(-6 // streams)) if workload == BURSTY else max(6, 3 * streams // 2)


@dataclass(slots=True)
class Found:
    """Every burst so far."""

    turns: dict[Key, list[Turn]] = field(default_factory=dict)

    def bursts(self, workload: str, architecture: str, streams: int) -> list[Burst]:
        return [turn.burst for turn in self.turns.get((workload, architecture, streams), [])]

    def cells(self, asked: Asked, slos: Mapping[str, SLO]) -> list[Cell]:
        least = min(asked.levels)
        return [
            figures.cell(key, turns, slos[key[0]], figures.turn_s(self.bursts(key[0], SINGLE, least)))
            for key, turns in self.turns.items()
        ]

    def objectives(self, asked: Asked, times: tuple[float, float]) -> dict[str, SLO]:
        """Of each workload, by the idle `single`."""
        least = min(asked.levels)
        return {name: figures.objectives(self.bursts(name, SINGLE, least), times) for name in asked.workloads}


async def ask_all(workload: str, jobs: Sequence[Job], streams: int, ask: Ask) -> Burst:
    """A closed loop, or gangs of `streams` that begin together."""
    if workload != BURSTY:
        return await closed_loop(jobs, streams, ask)
    gangs = [await closed_loop(jobs[at : at + streams], streams, ask) for at in range(0, len(jobs), streams)]
    samples = tuple(sample for gang in gangs for sample in gang.samples)
    return Burst(streams, sum(gang.wall_s for gang in gangs), samples)


def measure(stack: Stack, server: Server, workload: str, jobs: Sequence[Job], streams: int) -> Turn:
    """One burst, and each worker's share of its core meanwhile."""
    before = stack.cpu_s()
    burst = asyncio.run(ask_all(workload, jobs, streams, server.ask))
    after = stack.cpu_s()
    return Turn(burst, {name: (after[name] - before[name]) / burst.wall_s for name in before})


def run(console: Console, asked: Asked, stacks: Sequence[Stack]) -> Found:
    """Round after round, each level of each workload by all stacks in turn, another one first each time."""
    servers = {stack.plan.name: stack.server(TIMEOUT_S) for stack in stacks}
    for stack in stacks:
        for workload in asked.workloads:
            measure(stack, servers[stack.plan.name], workload, asked.jobs(workload, 2, -1), 2)
    found, began, order = Found(), time.monotonic(), list(stacks)
    with Progress(console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=asked.rounds * len(asked.workloads) * len(asked.levels) * len(stacks))
        for number in range(asked.rounds):
            if number and (time.monotonic() - began) * (number + 1) / number > LIMIT_S.value:
                console.print(f"--limit_s={LIMIT_S.value:g}: {number} of {asked.rounds} rounds")
                break
            for workload, streams in asked.cells():
                order.append(order.pop(0))
                for stack in order:
                    name = stack.plan.name
                    bar.update(task, description=f"round {number + 1}: {workload}, {streams} streams, {name}")
                    turn = measure(stack, servers[name], workload, asked.jobs(workload, streams, number), streams)
                    found.turns.setdefault((workload, name, streams), []).append(turn)
                    bar.advance(task)
    console.print(f"measured for {time.monotonic() - began:.0f} s", highlight=False)
    return found


def of(cells: Sequence[Cell], workload: str, architecture: str) -> list[Cell]:
    """One curve, by rising streams."""
    mine = [each for each in cells if (each.workload, each.architecture) == (workload, architecture)]
    return sorted(mine, key=lambda each: each.streams)


def table(workload: str, cells: Sequence[Cell], slo: SLO) -> Table:
    """A row an architecture and level; the range of rounds behind the median of tokens/s."""
    mine = [each for each in cells if each.workload == workload]
    words = f"{workload}: TTFT within {slo.ttft_ms:.0f} ms and TPOT within {slo.tpot_ms:.1f} ms is good"
    shown = Table(title=words, caption="medians of rounds, milliseconds; range in brackets")
    for name in ("streams", "", "tokens/s", "TTFT", "TPOT", "ITL p99", "good/s", "good", "busy"):
        shown.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for streams in sorted({each.streams for each in mine}):
        shown.add_section()
        for each in (
            one for name in ARCHITECTURES for one in mine if (one.architecture, one.streams) == (name, streams)
        ):
            shown.add_row(*row(each))
    return shown


def row(each: Cell) -> list[str]:
    return [
        str(each.streams),
        each.architecture + (f" ({each.failed} failed)" if each.failed else ""),
        ranged(each.tokens_per_s),
        *(figures.short(value.mid) for value in (each.ttft_ms, each.tpot_ms, each.itl_p99_ms, each.good_per_s)),
        f"{each.good_share.mid:.0%}",
        " ".join(f"{share:.0%}" for share in each.busy.values()),
    ]


def ranged(value: Middle) -> str:
    return f"{value.mid:.0f} [{value.low:.0f}-{value.high:.0f}]"


def explained(workload: str, cells: Sequence[Cell]) -> list[str]:
    """What a request that is alone pays, where curves cross, and why."""
    apart = of(cells, workload, DISAGGREGATED)
    lines = [f"{workload}:"]
    for other in (SINGLE, REPLICATED):
        theirs = of(cells, workload, other)
        levels = [each.streams for each in apart]
        if other == SINGLE and levels[0] == 1:
            lines.append(figures.single_cost(theirs[0], apart[0]))
        if other == REPLICATED:
            lines += [figures.crossing_text(metric, levels, apart, theirs) for metric in figures.METRICS]
            lines.append(f"why, at {levels[-1]} streams: " + "\n  ".join(figures.why(apart[-1], theirs[-1])))
        else:
            lines.append("against one device, " + figures.crossing_text("tokens_per_s", levels, apart, theirs))
    return lines


def asked_of_flags(model: Path) -> Asked:
    """Raises ValueError for a flag that cannot be."""
    unknown = [name for name in WORKLOADS.value if name not in LENGTHS]
    if unknown or not WORKLOADS.value:
        raise ValueError(f"--workloads={','.join(WORKLOADS.value)}, must be of {', '.join(LENGTHS)}")
    levels = QUICK_LEVELS if QUICK.value else tuple(sorted({int(each) for each in CONCURRENCY.value}))
    if not levels or levels[0] < 1:
        raise ValueError(f"--concurrency={','.join(CONCURRENCY.value)}, must be numbers of 1 or more")
    vocab = read_config(model).vocab_size
    drawn = {name: _workload(name, vocab) for name in WORKLOADS.value}
    return Asked(drawn, levels, QUICK_ROUNDS if QUICK.value else ROUNDS.value)


def _workload(name: str, vocab_size: int) -> Workload:
    prompt, output = map(Lengths.parse, LENGTHS[name])
    return Workload(prompt, output, vocab_size)


def launch_flags(asked: Asked, folder: Path) -> list[str]:
    """Of every process alike."""
    given = [f"--model={MODEL.value}", f"--max_model_len={-(-asked.longest // 256) * 256}"]
    given += [f"--compile_cache_dir={CACHE_DIR.value or folder / 'compiled'}"]
    return [*given, *(f"--{each}" for each in LAUNCH.value)]


def report_of(
    asked: Asked, slos: Mapping[str, SLO], cells: Sequence[Cell], simulated: Sequence[Cell] = ()
) -> dict[str, Any]:
    """The JSON of a run."""
    workloads = {
        name: {"prompt_tokens": str(each.prompt), "output_tokens": str(each.output), "slo_ms": list(slo_of(slos[name]))}
        for name, each in asked.workloads.items()
    }
    return (
        machine.described()
        | {"workloads": workloads, "cells": [each.as_json() for each in cells]}
        | ({"simulated": [each.as_json() for each in simulated]} if simulated else {})
    )


def slo_of(slo: SLO) -> tuple[float, float]:
    return slo.ttft_ms, slo.tpot_ms


def main() -> int:
    console, model = Console(width=None if sys.stdout.isatty() else 120), Path(MODEL.value or EMBEDDED_MODEL)
    asked = asked_of_flags(model)
    cores, profiles = sorted(os.sched_getaffinity(0)), [read_profile(path) for path in PROFILES.value]
    with tempfile.TemporaryDirectory(prefix="jdisagg-crossover-") as temporary:
        folder = Path(temporary)
        console.print(f"starting {', '.join(ARCHITECTURES)} on cores {cores[0]} and {cores[-1]}", highlight=False)
        given = launch_flags(asked, folder)
        with standing(PLANS, (cores[0], cores[-1]), given, asked.levels[-1], folder, START_S.value) as stacks:
            found = run(console, asked, stacks)
    slos = found.objectives(asked, (SLO_TTFT.value, SLO_TPOT.value))
    cells = found.cells(asked, slos)
    simulated = foretold(asked, slos, profiles)
    tell(console, asked, slos, cells, simulated)
    if OUTPUT.value:
        report.write_json(OUTPUT.value, report_of(asked, slos, cells, simulated))
    if PLOT.value:
        words = {name: f"{each.prompt} tokens in, {each.output} out" for name, each in asked.workloads.items()}
        crossover_plot.plot(PLOT.value, cells, note_of(model, simulated), words, simulated)
    return 0


def foretold(asked: Asked, slos: Mapping[str, SLO], profiles: Sequence[Profile]) -> list[Cell]:
    """What the simulator says of the first round's jobs; nothing without a profile."""
    if not profiles:
        return []
    jobs = {(workload, streams): asked.jobs(workload, streams, 0) for workload, streams in asked.cells()}
    return crossover_sim.foreseen(PLANS, jobs, BURSTY, crossover_sim.by_profiles(profiles, asked.levels[-1]), slos)


def tell(
    console: Console, asked: Asked, slos: Mapping[str, SLO], cells: Sequence[Cell], simulated: Sequence[Cell]
) -> None:
    if min(each.rounds for each in cells) < 2:
        console.print("one round tells no spread: differences over a twentieth are taken for real", highlight=False)
    for workload in asked.workloads:
        console.print(table(workload, cells, slos[workload]), highlight=False)
        for line in explained(workload, cells):
            console.print(line, highlight=False, soft_wrap=True)
        if simulated:
            console.print(crossover_sim.beside(workload, cells, simulated), highlight=False)
    if simulated:
        console.print(crossover_sim.same_winners(cells, simulated), highlight=False)


def note_of(model: Path, simulated: Sequence[Cell]) -> str:
    described = machine.described()
    return (
        f"{model.resolve().name}, a device is one core of {described['machine']['processor']}; medians of rounds with"
        f" their range, {described['date'][:10]}{'; dashed: simulated' if simulated else ''}"
    )


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
