"""What the compiler's flags and cuts of sums do to a layer's collectives: seconds that nothing hides, by the schedule
that the compiler wrote, with and without.

Llama-3-70B's layers on eight devices that are not here, a prefill chunk of 2,048 tokens and a decode step of 64 rows;
a few layers show the schedule as well as eighty. Seconds are a layer's, without the logits' gather. Sums of chunks are
cut in halves of rows, those of decode steps in blocks of columns. Other rows stay in the file:

    python -m benchmarks.compiler_flags --output=benchmarks/results/compiler_flags.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from benchmarks.shallow import shallow
from jdisagg.commands import aot
from jdisagg.commands.aot_report import CompiledTimes
from jdisagg.core.hardware import Target, Work
from jdisagg.core.request import WorkerId
from jdisagg.core.schedule import End, Start, Turns
from jdisagg.core.settings import Settings
from jdisagg.devices import usable_bytes
from jdisagg.engine.compile_check import check
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.model import network, norms
from jdisagg.parallel import compiler_flags
from jdisagg.parallel.compiler_flags import COMPILER_FLAGS, CompilerOption
from jdisagg.parallel.topology import ENVIRONMENT, devices_of
from jdisagg.serve.deploy.deployment import resolve_deployment

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "configs/llama3_70b", "folder with a config.json", flag_values=FLAGS)
flags.DEFINE_list("targets", ["v5p:2x2x2", "v6e:2x4", "v5e:2x4", "h100:8"], "eight devices each", flag_values=FLAGS)
flags.DEFINE_integer("layers", 4, "of the model", flag_values=FLAGS)
flags.DEFINE_list("kinds", ["prefill", "decode"], "programs", flag_values=FLAGS)
flags.DEFINE_list("without", [], "what to leave out, in turn; empty: nothing, each flag, all", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
CHUNK, SLOTS, CONTEXT = 2048, 64, 4096
UNCUT = 1 << 30  # rows, or bytes
ALL = "cuts and flags"


@dataclass(frozen=True, slots=True)
class Told:
    """Of one layer's collectives in one program. without: what was left out of how programs are made."""

    target: str
    kind: str
    without: str
    total_us: float
    exposed_us: float
    temp_mib: float
    compile_s: float


def tried(target: Target) -> Iterator[tuple[str, tuple[CompilerOption, ...], int]]:
    """(what is left out, the flags that are left, fewest rows of a half)."""
    kind = devices_of(target)[0].device_kind
    concerned = tuple(each for each in COMPILER_FLAGS if each.concerns(kind))
    yield "", concerned, norms.FEWEST_ROWS
    for flag in concerned:
        yield flag.name, tuple(each for each in concerned if each is not flag), norms.FEWEST_ROWS
    yield ALL, (), UNCUT


def steps(folder: Path, target: Target) -> tuple[CompiledTimes, list[tuple[WorkerId, DeclaredProgram]]]:
    """The largest prefill and decode step of a worker of eight devices."""
    settings = Settings(
        model=str(folder),
        mesh="colocated:tp8",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=CHUNK,
        kv_tokens=SLOTS * 256,
    )
    deployment = resolve_deployment(settings, target.chip.platform, usable_bytes(target))
    (made,) = aot.tables_of(deployment, target)
    largest = [
        max((each for each in made.steps() if each.kind == kind), key=lambda each: each.size) for kind in FLAGS.kinds
    ]
    return CompiledTimes(deployment, target, CONTEXT), [(made.config.worker, each) for each in largest]


def of_layers(event: Work | Start | End | Turns) -> bool:
    """Not the logits' gather, which is once a step."""
    return not (isinstance(event, Start) and event.collective.kind == "all-gather")


def told(folder: Path, target: Target) -> Iterator[Told]:
    for without, left, fewest in tried(target):
        if FLAGS.without and without not in FLAGS.without:
            continue
        compiler_flags.forget()
        with (
            mock.patch.object(compiler_flags, "COMPILER_FLAGS", left),
            mock.patch.object(norms, "FEWEST_ROWS", fewest),
            mock.patch.object(network, "SENT_BESIDE_BYTES", UNCUT if without == ALL else network.SENT_BESIDE_BYTES),
        ):
            times, declared = steps(folder, target)
            checked = check(declared, every=True)
        for each in checked:
            assert not each.facts.why, each.facts.why
            facts = replace(each.facts, schedule=tuple(filter(of_layers, each.facts.schedule)))
            waited = times.waited(replace(each, facts=facts))
            microseconds = (1e6 * seconds / FLAGS.layers for seconds in (waited.total_s, waited.exposed_s))
            figures = *microseconds, facts.temp_bytes / (1 << 20), facts.compile_s
            found = Told(str(target), each.declared.kind, without, *(round(figure, 1) for figure in figures))
            print(found, flush=True)
            yield found


def write(path: Path, about: dict[str, Any], found: list[Told]) -> None:
    """Beside what the file holds that is not found anew."""
    rows = json.loads(path.read_text(encoding="utf-8"))["told"] if path.exists() else []
    told = {(each.target, each.without, each.kind): each for each in (*(Told(**row) for row in rows), *found)}
    report = {**about, "model": Path(FLAGS.model).name, "layers": FLAGS.layers}
    report["told"] = [asdict(told[key]) for key in sorted(told)]
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(found: list[Told]) -> Table:
    shown = Table("target", "step", "without", "collectives us", "exposed us", "temp MiB", "compile s")
    for each in found:
        figures = each.total_us, each.exposed_us, each.temp_mib, each.compile_s
        shown.add_row(each.target, each.kind, each.without, *(f"{figure:,.1f}" for figure in figures))
    return shown


def main() -> int:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    about, found = described(), list[Told]()
    with tempfile.TemporaryDirectory() as name:
        folder = shallow(Path(FLAGS.model), FLAGS.layers, Path(name))
        for target in FLAGS.targets:
            for each in told(folder, Target.parse(target)):
                found.append(each)
                if FLAGS.output:
                    write(Path(FLAGS.output), about, found)
    Console().print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
