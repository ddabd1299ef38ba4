"""`python -m jdisagg profile --mesh=... --output=profile.json`: measures this run's programs on these devices.

It builds and warms the stack that `jdisagg launch` would (same settings, --config included), and times its programs
one by one and next to each other. It writes the table that `jdisagg sim --cost=profile:FILE` reads: prefill by
tokens and context, steps by batch and context and by stage, sampling, each declared program over null pages, KV
transfers by bytes and mode, the host's overhead, and how much meshes on one machine slow each other. Run nothing
else on the machine meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags
from rich.console import Console

from jdisagg import command, devices, flags, terminal
from jdisagg.core.errors import ConfigError
from jdisagg.core.profile import Profile
from jdisagg.core.settings import Settings
from jdisagg.named_models import located
from jdisagg.profiling.profiler import ProfileRunner, describe_machine, show_profile
from jdisagg.serve.deploy.assemble import load_executors, warm
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment


def declare() -> flags.FlagValues:
    values = flags.own()
    flags.define(values, output="profile.json")
    absl_flags.DEFINE_integer("rounds", 7, "samples of each case; the medians count", 1, flag_values=values)
    return flags.define_settings(values)


def run(values: flags.FlagValues) -> int:
    """Measures the run and writes the profile. Raises ConfigError or CheckpointError."""
    check_writable(values.output)
    profile = take(flags.settings_of(values, output=""), values.rounds, Console(stderr=True))
    profile.save(values.output)
    show_profile(Console(), profile, values.output)
    return 0


def check_writable(path: str) -> None:
    """Raises ConfigError if `path` cannot be written, before the minutes of measuring; leaves no new file."""
    existed = Path(path).exists()
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(f"--output={path}: {error.strerror}") from error
    if not existed:
        Path(path).unlink()


def take(settings: Settings, rounds: int, console: Console) -> Profile:
    """Builds the stack and times it, with a progress bar. Raises ConfigError or CheckpointError."""
    settings = located(settings, console)
    mesh = mesh_of(settings)
    all_devices = devices.prepare_mesh(mesh, settings.platform, settings.compile_cache_dir)
    first = devices.first_of_most(all_devices)
    deployment = resolve_deployment(settings, first.platform, devices.memory_bytes(first), chip=devices.chip_of(first))
    if any(each.is_pipelined_multi_step for each in deployment.workers):
        what = f"--multi_step={settings.multi_step} of the stages of --mesh={settings.mesh}"
        raise ConfigError(f"{what} is not timed: leave it away, or take a ring")
    bar, on_progress = terminal.compile_bar(console)
    with bar:
        executors = load_executors(deployment, settings, all_devices)
        warm(executors, on_progress)
        profiler = ProfileRunner(deployment, settings, executors)
        profiler.run(rounds, on_progress)
    return profiler.profile(describe_machine(all_devices[0].device_kind))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg profile", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main())
