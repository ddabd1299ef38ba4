"""`jdisagg launch`: starts a serving stack, or one process of a cluster, with one command. See --help.

Settings, ports and the deployment are checked before anything is loaded, so that a mistake costs a second and one
line.
"""

from __future__ import annotations

import sys

from jdisagg import command, supervise

if __name__ == "__main__":  # before the imports below, which take seconds
    if supervise.asked(sys.argv):
        sys.exit(supervise.run(supervise.child_of(sys.argv)))
    command.end_at_once("starting")

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from absl import flags as absl_flags
from rich.console import Console
from rich.progress import Progress

from jdisagg import command, devices, flags, saved_programs, terminal
from jdisagg.cluster.membership import POD_PORT, GroupRank, resolve
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.settings import Settings
from jdisagg.groups import run_group
from jdisagg.model.checkpoint import read_model, weight_files
from jdisagg.named_models import located
from jdisagg.serve.cluster.router_process import (
    ALL_ROLES,
    FRONT_ROLE,
    ROUTER_ROLE,
    build_front,
    build_router,
    num_devices,
    read_secret,
    roles_of,
)
from jdisagg.serve.cluster.worker_process import WorkerProcess, build_workers
from jdisagg.serve.deploy import servers
from jdisagg.serve.deploy.assemble import build
from jdisagg.serve.deploy.deployment import AUTO, mesh_of, place_of, resolve_deployment
from jdisagg.serve.deploy.dry_run import DryRun
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.frontends.batch import PLAIN_ROWS, AnswerFile, Batch, holds_calls, read_calls, read_jobs, rows_of
from jdisagg.serve.observability.log_lines import write_logs
from jdisagg.serve.observability.tracing import Profiles, own_profile

FAILED = 1
FLUSH_S = 2.0  # for answers to end with the error after the driver has died


def declare() -> flags.FlagValues:
    values = flags.define_settings(flags.own())
    meaning = "print each process's devices, shards, bytes, ports and command, and stop"
    absl_flags.DEFINE_bool("dry_run", False, meaning, flag_values=values)
    flags.define(values, target="")
    return values


def body(values: flags.FlagValues) -> int:
    settings = flags.settings_of(values)
    if values.target and not values.dry_run:
        raise FlagError(f"--target={values.target} is for --dry_run: a run has the devices that there are")
    return preview(settings, values.target) if values.dry_run else run(settings)


def preview(settings: Settings, target: str) -> int:
    """Prints what would run where. Nothing is loaded, fetched or bound, and no device is touched."""
    console = Console(soft_wrap=True)
    platform, memory_bytes, chip = devices.imagined(settings.platform, target, not settings.kv_tokens)
    deployment = resolve_deployment(settings, platform, memory_bytes, chip=chip)
    has_weights = bool(weight_files(deployment.model_folder))  # a config.json alone is enough
    terminal.show(console, deployment, platform, settings.load_format if has_weights else "random", is_identified=False)
    group = GroupRank(settings.group, 0, settings.group_size, settings.coordinator or f"LEADER:{POD_PORT}")
    place = group if settings.group_size > 1 else resolve(settings, os.environ)
    for line in DryRun(deployment, settings, platform, place).lines():
        console.print(line, highlight=False, markup=False)
    return 0


def run(settings: Settings) -> int:
    """Builds the stack and does what the settings ask for."""
    if settings.supervise:  # as a file or the environment says
        return supervise.run(supervise.child_of(sys.argv))
    write_logs(settings.log_level, settings.log_format)
    settings = replace(settings, labels=str(terminal.here(settings.labels)))
    console = Console(stderr=bool(settings.prompt or settings.chat), soft_wrap=True)
    if settings.role != ALL_ROLES:
        return run_in_cluster(settings, console)
    if settings.mesh != AUTO:
        MeshSpec.parse(settings.mesh)
    once = bool(settings.prompt or settings.prompts or settings.chat)
    with servers.Sockets() if once else servers.bind(settings) as sockets, _batch(settings) as batch:
        return run_alone(settings, console, sockets, batch)


def run_alone(settings: Settings, console: Console, sockets: servers.Sockets, batch: Batch | None) -> int:
    """Runs the whole stack in this process: it serves, or answers its prompts and ends."""
    settings = located(settings, console)
    mesh = mesh_of(settings)
    saved_programs.check_settings(settings, lambda: read_model(place_of(settings)))
    devices_found = devices.prepare_mesh(mesh, settings.platform, settings.compile_cache_dir)
    first = devices.first_of_most(devices_found)
    deployment = resolve_deployment(settings, first.platform, devices.memory_bytes(first), chip=devices.chip_of(first))
    terminal.show(console, deployment, " and ".join(mesh.platforms) or first.platform, settings.load_format)
    bar, on_progress = terminal.compile_bar(console)
    with bar:
        service = build(deployment, settings, devices_found, on_progress, told=partial(terminal.show_weights, console))
    service.start()
    try:
        if batch is not None or settings.prompt or settings.chat:
            command.raise_again()
            return asyncio.run(_run_once(service, settings, console, batch))
        return uvloop.run(serve(service, settings, sockets, console))
    finally:
        command.end_at_once("stopping")
        service.stop()


async def _run_once(service: LocalService, settings: Settings, console: Console, batch: Batch | None) -> int:
    if settings.chat:
        return await terminal.converse(service, settings, console)
    if settings.prompt or batch is None:
        return await terminal.complete_one(service, settings, console)
    return await run_batch(service, settings, batch)


def run_in_cluster(settings: Settings, console: Console) -> int:
    """Runs some of the roles; other processes have the others."""
    roles = roles_of(settings)
    read_secret(settings)
    if settings.prompt or settings.prompts or settings.chat:
        raise ConfigError(f"--role={settings.role} serves; give prompts to the whole stack, or to the router's server")
    if not roles & {ROUTER_ROLE, FRONT_ROLE}:
        return run_roles(settings, roles, console, None)
    with servers.bind(settings) as sockets:
        return run_roles(settings, roles, console, sockets)


def run_roles(settings: Settings, roles: frozenset[str], console: Console, sockets: servers.Sockets | None) -> int:
    """Runs these roles; `sockets`: those of a router or a front."""
    servers.check_cluster_ports(settings, ROUTER_ROLE in roles, bool(roles - {ROUTER_ROLE, FRONT_ROLE}))
    settings = located(settings, console)
    if sockets is not None and FRONT_ROLE in roles:
        return run_front(settings, console, sockets)
    place = resolve(settings, os.environ)
    if place is not None:
        return run_group(settings, console, place, run_workers)
    mesh = mesh_of(settings)
    if mesh.platforms:
        raise ConfigError(f"--mesh={mesh} names platforms, which is for one process: give each process its --platform")
    count = num_devices(mesh, roles)
    devices_found, platform = devices_of(settings, count)
    sized = count > 0
    deployment = resolve_deployment(
        settings, platform, devices.memory_bytes(devices_found[0]), sized, devices.chip_of(devices_found[0])
    )
    terminal.show(console, deployment, platform, settings.load_format, sized)
    bar, on_progress = terminal.compile_bar(console)
    if sockets is not None:
        with bar:
            process = build_router(deployment, settings, devices_found, on_progress)
        process.start()
        console.print(
            f"[bold]router[/]   workers join at {settings.host}:{process.control_server.port}", highlight=False
        )
        try:
            return uvloop.run(serve(process.service, settings, sockets, console, process.profiles.take))
        finally:
            command.end_at_once("stopping")
            process.stop()
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    with bar:
        workers = build_workers(deployment, settings, devices_found, on_progress, ends.put)
    return run_workers(workers, settings, console, ends)


def run_front(settings: Settings, console: Console, sockets: servers.Sockets) -> int:
    """Serves clients through a router in another process."""
    devices_found, platform = devices_of(settings, 0)
    deployment = resolve_deployment(settings, platform, devices.memory_bytes(devices_found[0]), False)
    process = build_front(deployment, settings)
    process.start()
    console.print(f"[bold]front[/]    of the router at {settings.router or 'the leader'}", highlight=False)
    try:
        return uvloop.run(serve(process.service, settings, sockets, console))
    finally:
        command.end_at_once("stopping")
        process.stop()


def devices_of(settings: Settings, count: int) -> tuple[list[Any], str]:
    """Returns devices for `count` of the mesh's, and the workers' platform. A router alone needs none of
    --platform's."""
    if not count and settings.platform != AUTO:
        return devices.prepare("cpu", 1, settings.compile_cache_dir), settings.platform
    devices_found = devices.prepare(settings.platform, max(1, count), settings.compile_cache_dir)
    return devices_found, devices_found[0].platform


def run_workers(workers: WorkerProcess, settings: Settings, console: Console, ends: queue.SimpleQueue[str]) -> int:
    """Works for the router until the first Ctrl-C or SIGTERM, then drains and leaves; a second one stops at once."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(command.INTERRUPTED) if stopping.is_set() else ends.put(""))
    workers.start()
    console.print(
        f"[bold]ready[/]    {', '.join(workers.node.machines)} for {settings.router or 'the leader'}",
        highlight=False,
    )
    why = ends.get()
    stopping.set()
    if not why:
        console.print(f"draining: no new work, at most {settings.drain_s:g} s (again to stop at once)")
        done = workers.leave(settings.drain_s)
        console.print("leaving: nothing is left here" if done else "leaving: others take over what is left here")
    workers.stop()
    if why:
        print(f"jdisagg: {why}", file=sys.stderr)
    return FAILED if why else 0


@contextmanager
def _batch(settings: Settings) -> Iterator[Batch | None]:
    """Opens the lines of --prompts and the file of their answers before anything is loaded; None without --prompts."""
    if not settings.prompts:
        yield None
        return
    prompts = Path(settings.prompts)
    if not prompts.exists():
        raise ConfigError(f"--prompts={prompts}: there is no such file")
    try:
        calls = read_calls(prompts) if holds_calls(prompts) else []
        jobs = calls or read_jobs(prompts)
    except OSError as error:
        raise ConfigError(f"--prompts={prompts}: {error}") from error
    rows = rows_of(calls) if calls else PLAIN_ROWS
    with AnswerFile(Path(settings.output), {job.line for job in jobs}, prompts, rows) as answers:
        yield Batch(jobs, answers)


async def run_batch(service: LocalService, settings: Settings, batch: Batch) -> int:
    """Runs the lines of --prompts that --output does not have yet."""
    unanswered = batch.left
    with Progress() as bar:
        done = len(batch.jobs) - len(unanswered)
        task = bar.add_task(f"{settings.prompts} -> {settings.output}", total=len(batch.jobs), completed=done)
        app, sampling = servers.offline_app(service, settings), terminal.sampling_of(settings)
        failed = await batch.run(service, app, sampling, lambda: bar.advance(task))
    if failed:
        print(f"jdisagg: {failed} of {len(unanswered)} prompts failed; run it again to try them again", file=sys.stderr)
    return FAILED if failed else 0


async def serve(
    service: LocalService,
    settings: Settings,
    sockets: servers.Sockets,
    console: Console,
    profiles: Callable[[float], Profiles] = own_profile,
) -> int:
    """Serves until the first Ctrl-C or SIGTERM, then drains; a second one stops at once. If the driver dies, it ends
    with a nonzero code, so that a supervisor can start another process."""
    running = await servers.start(service, settings, sockets, profiles)
    for line in running.urls:
        console.print(f"[bold]ready[/]    {line}", highlight=False)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop_or_die, stop)
    stopped, ended = asyncio.create_task(stop.wait()), asyncio.create_task(running.wait())
    died = asyncio.create_task(service.died())
    await asyncio.wait({stopped, ended, died}, return_when=asyncio.FIRST_COMPLETED)
    if service.alive:
        console.print(f"draining: {service.running} running, at most {settings.drain_s:g} s (again to stop at once)")
    await service.drain(settings.drain_s if service.alive else FLUSH_S)
    await running.stop()
    stopped.cancel()
    died.cancel()
    await asyncio.wait({ended}, timeout=None if service.alive else FLUSH_S)
    if not service.alive:
        print(f"jdisagg: {service.why_dead}", file=sys.stderr)
    return 0 if service.alive else FAILED


def _stop_or_die(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(command.INTERRUPTED)
    stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 after a clean end, 1 if prompts failed or the driver died, 2 with one line for an
    error."""
    return command.run("jdisagg", __doc__, declare(), argv, body)


if __name__ == "__main__":
    sys.exit(main())
