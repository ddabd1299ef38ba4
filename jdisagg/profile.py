"""`python -m jdisagg.profile --mesh=... --output=profile.json`: what this run's programs take on these devices.

Builds and warms the stack that jdisagg.launch would (same settings, --config included), times its programs one by one
and beside each other, and writes the table that `jdisagg.sim --cost=profile:FILE` is priced by: prefill by tokens and
context, steps by batch and context and by stage, draws, KV transfers by bytes and mode, what the host adds, and how
much meshes that share a machine hold each other up. Give the machine nothing else to do meanwhile.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from jdisagg import banner, config, devices, flags
from jdisagg.core.errors import ConfigError, JdisaggError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Profile
from jdisagg.core.settings import Settings
from jdisagg.serve.build import load_executors, warm
from jdisagg.serve.deployment import resolve_deployment
from jdisagg.serve.survey import Survey


def declare() -> flags.FlagValues:
    """This command's own flags; the settings come besides."""
    values = flags.own()
    absl_flags.DEFINE_string("output", "profile.json", "file for the profile", flag_values=values)
    absl_flags.DEFINE_integer("rounds", 7, "samples of each cell; the medians count", 1, flag_values=values)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with one line on stderr for a caller's mistake."""
    values = declare()
    try:
        rest = flags.read(values, sys.argv if argv is None else argv, others=True)
        if values.help:
            print(f"{__doc__}\n{flags.help_of(values)}\n{flags.help_text()}")
            return 0
        settings, _ = config.resolve(rest)
        check_writable(values.output)
        profile = take(settings, values.rounds, Console(stderr=True))
        profile.save(values.output)
    except JdisaggError as error:
        print(f"jdisagg.profile: {error}", file=sys.stderr)
        return flags.BAD_USE
    except KeyboardInterrupt:
        return flags.INTERRUPTED
    show(Console(), profile, values.output)
    return 0


def check_writable(path: str) -> None:
    """Before the minutes that it takes; leaves no file behind. Raises ConfigError."""
    was_there = Path(path).exists()
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(f"--output={path}: {error.strerror}") from error
    if not was_there:
        Path(path).unlink()


def take(settings: Settings, rounds: int, console: Console) -> Profile:
    """Builds the stack and times it, with a progress bar. Raises ConfigError or CheckpointError."""
    mesh = MeshSpec.parse(settings.mesh)
    found = devices.prepare(settings.platform, mesh.num_devices, settings.compile_cache_dir)
    deployment = resolve_deployment(settings, found[0].platform, devices.memory_bytes(found[0]))
    bar, told = banner.compile_bar(console)
    with bar:
        machines = load_executors(deployment, settings, found)
        warm(machines, told)
        survey = Survey(deployment, settings, machines)
        survey.run(rounds, told)
    return survey.profile(machine_name(found[0].device_kind))


def machine_name(device_kind: str) -> str:
    """The processor as the kernel names it, the cores this process may use, and the devices' kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {device_kind} devices"


def show(console: Console, profile: Profile, path: str) -> None:
    """The least and the most of each kind, and what the devices share."""
    table = Table("", "least", "most", title=f"{profile.model} on {profile.mesh}, milliseconds", title_justify="left")
    for pool in profile.pools:
        for kind in (pool.prefill, pool.decode):
            if kind:
                found = [each.seconds for each in kind]
                name = "a chunk" if kind is pool.prefill else "a step"
                table.add_row(
                    f"{pool.config.role}: {name}", *(f"{1e3 * each:.2f}" for each in (min(found), max(found)))
                )
    if profile.transfers:
        found = [each.seconds for each in profile.transfers]
        table.add_row("a part of KV", *(f"{1e3 * each:.2f}" for each in (min(found), max(found))))
    table.add_row(
        "the host: a step, a chunk", f"{1e3 * profile.host.decode_s:.2f}", f"{1e3 * profile.host.prefill_s:.2f}"
    )
    console.print(table)
    for phase, row in profile.slowdown.items():
        beside = ", ".join(f"{100 * share:.0f} % longer beside {other}" for other, share in row.items())
        console.print(f"{phase}: {beside}", highlight=False)
    console.print(f"{profile.machine}; {profile.repeats} samples a cell; written to {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
