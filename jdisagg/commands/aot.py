"""Compiles every program of a run for accelerators that are not here, and reports whether it fits.

    python -m jdisagg aot --model=configs/llama3_70b --mesh=prefill:tp8,decode:pp4tp2 --target=v5p:2x2x4

The target is a slice of a TPU pod in chips (v5e:2x4, v5p:2x2x4, v6e:4x4, v7x:2x2x1) or GPUs (h100:8, h100:2x8,
h200:8, a100:8). All settings of `jdisagg launch` apply (--config=FILE as well); the model folder needs only its
config.json.

    --all_programs          every declared bucket and stage; else the largest of each kind stands in for the others
    --context_tokens=4096   tokens per sequence in the lower bounds of decode steps
    --json=FILE             the results as JSON
    --save=DIR              keeps every program in DIR, for runs of the same settings with --compile_cache_dir=DIR;
                            --target=cpu:8 saves programs of so many virtual devices, without a check

Exit code: 0 if all compiles and fits, 1 if something does not, 2 for a wrong flag, target or setting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags as absl_flags
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jdisagg import command, devices, flags, saved_programs
from jdisagg import devices as compile_cache
from jdisagg import flags as config
from jdisagg.commands import aot_report
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.hardware import Target
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.devices import usable_bytes
from jdisagg.engine.compile_check import check, memory_of
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.programs import ProgramTable, abstract_table
from jdisagg.engine.ring_declarations import abstract_ring_table
from jdisagg.named_models import located
from jdisagg.parallel.submesh import Device
from jdisagg.parallel.topology import ENVIRONMENT, devices_of
from jdisagg.serve.deploy.deployment import Deployment, resolve_deployment
from jdisagg.serve.deploy.memory import NoRoom

UNFIT = 1
WIDTH = 120  # of tables written to a file or a pipe


def declare() -> flags.FlagValues:
    """Declares this command's own flags, and the settings."""
    values = flags.own()
    absl_flags.DEFINE_bool("all_programs", False, "every declared bucket and stage", flag_values=values)
    absl_flags.DEFINE_integer("context_tokens", 4096, "of decode's floors", lower_bound=1, flag_values=values)
    flags.define(values, json="", save="", target="")
    return flags.define_settings(values)


def body(values: flags.FlagValues) -> int:
    settings = located(config.settings_of(values), Console(stderr=True))
    if not values.target:
        raise FlagError("needed: --target=CHIP:SIDES, as v5p:2x2x4 or h100:8")
    name, _, number = values.target.partition(":")
    if name == "cpu" and values.save:
        return save_for_cpu(settings, number, Path(values.save))
    try:
        return run(settings, Target.parse(values.target), values)
    except NoRoom as error:
        print(f"jdisagg aot: {error}", file=sys.stderr)
        return UNFIT


def run(settings: Settings, target: Target, values: flags.FlagValues) -> int:
    """Compiles and prints; returns the exit code."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # jax must not look for the accelerator that is compiled for
    memory_bytes = usable_bytes(target)
    deployment = resolve_deployment(settings, target.chip.platform, memory_bytes, chip=target.chip)
    if deployment.mesh.num_devices > target.num_devices:
        raise ConfigError(
            f"the mesh {deployment.mesh} needs {deployment.mesh.num_devices} devices, {target} has {target.num_devices}"
        )
    tables = tables_of(deployment, target)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    aot_report.show_deployment(console, deployment, target, memory_bytes)
    checked = compile_all(tables, values.all_programs)
    memory = [
        stage
        for table in tables
        for stage in memory_of(table, [each for each in checked if each.worker == table.config.worker])
    ]
    context = min(values.context_tokens, deployment.max_model_len)
    report = aot_report.CompileReport(deployment, target, memory_bytes, context, checked, memory)
    aot_report.show(console, report)
    if values.json:
        write_json(Path(values.json), report)
    if values.save and not report.faults:
        save(deployment, settings, devices_of(target), Path(values.save), str(target))
    return UNFIT if report.faults else 0


def save_for_cpu(settings: Settings, number: str, folder: Path) -> int:
    """Compiles for virtual devices of this machine. Raises FlagError, MeshError."""
    if not number.isdecimal():
        raise FlagError(f"--target=cpu:{number}: needed is a number of devices, as cpu:8")
    all_devices = devices.prepare("cpu", int(number))
    deployment = resolve_deployment(settings, "cpu", None)
    if deployment.mesh.num_devices > len(all_devices):
        raise ConfigError(
            f"the mesh {deployment.mesh} needs {deployment.mesh.num_devices} devices, --target=cpu:{number}"
        )
    save(deployment, settings, all_devices, folder, f"cpu:{number}")
    return 0


def save(deployment: Deployment, settings: Settings, all_devices: Sequence[Device], folder: Path, target: str) -> None:
    """Compiles every program of every worker again, into the folder. Raises ConfigError if that fails."""
    platform = all_devices[0].platform
    try:
        folder.mkdir(parents=True, exist_ok=True)
        compile_cache.keep_in(folder)
        compilation_cache.reset_cache()
        tables = [
            _table_of(deployment, config, [all_devices[index] for index in deployment.place(config.worker).device_ids])
            for config in deployment.workers
        ]
        programs = {each.key: each for each in every_program(tables)}
        for each in programs.values():
            # Kernels for chips that are not here read the target from the mesh.
            with jax.sharding.set_mesh(each.submesh.mesh) if platform != "cpu" else nullcontext():
                each.program.lower(*each.arguments).compile()
        platform = {"cuda": "gpu"}.get(platform, platform)
        saved_programs.write_manifest(folder, platform, target, settings, deployment.model, len(programs))
    except OSError as error:
        raise ConfigError(f"--save={folder}: {error.strerror}") from error
    print(f"{len(programs)} programs in {folder}: start by --compile_cache_dir={folder}")


def every_program(tables: Sequence[ProgramTable]) -> Iterator[DeclaredProgram]:
    """Yields the programs that all workers warm: steps, moves below HBM, and shipments between all pairs."""
    for table in tables:
        yield from table.steps()
        yield from table.transfers.tier_moves()
        for other in tables:
            if (table.config.role, other.config.role) == (Role.PREFILL, Role.DECODE):
                yield from table.departures(other.shapes)
                yield from other.arrivals(table.shapes)


def tables_of(deployment: Deployment, target: Target) -> list[ProgramTable]:
    """Returns a table for the first worker of each pool, which stands for the others."""
    target_devices = devices_of(target)
    first = {config.role: config for config in reversed(deployment.workers)}
    return [
        _table_of(deployment, config, [target_devices[index] for index in deployment.place(config.worker).device_ids])
        for config in deployment.workers
        if first[config.role] is config
    ]


def _table_of(deployment: Deployment, config: WorkerConfig, devices: Sequence[Device]) -> ProgramTable:
    model, layout, dtype = deployment.model, deployment.layout(config.role), jnp.dtype(deployment.dtype_of(config.role))
    if config.is_ring:
        return abstract_ring_table(config, model, layout, devices, dtype, deployment.weights)
    layers = deployment.layers_of(deployment.place(config.worker))
    return abstract_table(config, model, layout, layers, devices, dtype, deployment.weights)


def compile_all(tables: Sequence[ProgramTable], every: bool) -> list:
    declared = [(table.config.worker, each) for table in tables for each in table.steps()]
    if len(tables) == 2:
        prefill, decode = sorted(tables, key=lambda table: table.config.role.decodes)
        declared += [(prefill.config.worker, each) for each in prefill.departures(decode.shapes)]
        declared += [(decode.config.worker, each) for each in decode.arrivals(prefill.shapes)]
    bar = Progress(
        TextColumn("[bold]compile[/] "),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        line = bar.add_task("", total=None)

        def on_program(each: DeclaredProgram, done: int, total: int) -> None:
            bar.update(line, description=each.label, completed=done, total=total)

        return check(declared, every, on_program)


def write_json(path: Path, report: aot_report.CompileReport) -> None:
    """Writes the report as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(report.as_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json={path}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the head of this file lists the exit codes."""
    return command.run("jdisagg aot", __doc__, declare(), argv, body)


if __name__ == "__main__":
    sys.exit(main())
