"""Runs one process of a worker that spans several: the leader, which joins the router, or a member, which follows it.

Any failure of one process ends all: each prints one line and exits with a nonzero code, for its supervisor to see.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from rich.console import Console

from jdisagg import command, devices, terminal
from jdisagg.cluster.membership import GroupRank
from jdisagg.core.errors import ConfigError, JdisaggError
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.group.assembly import GroupUnfilled
from jdisagg.serve.cluster.group.leader import LeaderStart, MemberStart
from jdisagg.serve.cluster.group.member import GroupEnded, devices_each, worker_devices
from jdisagg.serve.cluster.worker_process import WorkerProcess
from jdisagg.serve.deploy.deployment import Deployment, resolve_deployment

FAILED = 1
RunWorkers = Callable[[WorkerProcess, Settings, Console, "queue.SimpleQueue[str]"], int]


def run_group(settings: Settings, console: Console, place: GroupRank, run_workers: RunWorkers) -> int:
    """Runs this process's part of the group; `run_workers` is that of `jdisagg launch`. Raises ConfigError."""
    settings, each = for_several(settings), devices_each(settings, place)
    devices.configure(settings.platform, each, settings.compile_cache_dir)
    console.print(f"[bold]group[/]    {place.group}: rank {place.rank} of {place.size}, leader at {place.coordinator}")
    try:
        return _lead(settings, console, place, run_workers) if place.rank == 0 else _follow(settings, console, place)
    except GroupUnfilled as error:
        end(str(error))


def end(why: str) -> NoReturn:
    """Ends the process at once, from any thread, since other waits may never end."""
    os.write(2, f"jdisagg: {' '.join(why.split())}\n".encode())
    sys.stdout.flush()
    os._exit(FAILED)


def leave(code: int) -> NoReturn:
    """Exits without JAX's shutdown, which waits for processes that have left as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def for_several(settings: Settings) -> Settings:
    """Returns settings with `draft_kv` "auto" as "rebuild", since groups do not send a draft's KV unless asked to."""
    return replace(settings, draft_kv="rebuild") if settings.draft_kv == "auto" else settings


def check_whole(settings: Settings, deployment: Deployment) -> None:
    """Raises ConfigError for KV that a group cannot ship."""
    if deployment.kv.scaled or deployment.prefill_kv.scaled:
        raise ConfigError(
            f"--group={settings.group} and --kv_dtype={settings.kv_dtype}: several processes keep no quantised pages"
        )


def _lead(settings: Settings, console: Console, place: GroupRank, run_workers: RunWorkers) -> int:
    start = LeaderStart(settings, place, end)
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        start.form_world()
        group_devices = worker_devices(devices.at_hand(settings.platform), place, devices_each(settings, place))
        device_bytes = devices.memory_bytes(group_devices[0])
        deployment = resolve_deployment(
            settings, group_devices[0].platform, device_bytes, chip=devices.chip_of(group_devices[0])
        )
        check_whole(settings, deployment)
        terminal.show(console, deployment, group_devices[0].platform, settings.load_format)
        bar, on_progress = terminal.compile_bar(console)
        with bar:
            workers = start.build(deployment, group_devices, device_bytes, on_progress, ends.put)
    except JdisaggError as error:
        start.failed(error)
        raise
    start.members.on_leave = lambda: ends.put("")
    code = run_workers(workers, settings, console, ends)
    if code:
        start.members.send_end("its leader can do no more")
    start.stop()
    leave(code)


def _follow(settings: Settings, console: Console, place: GroupRank) -> int:
    start = MemberStart(settings, place, end)
    try:
        start.form_world()
        group_devices = worker_devices(devices.at_hand(settings.platform), place, devices_each(settings, place))
        leader_sizes = start.sizes()
        deployment = resolve_deployment(
            settings, group_devices[0].platform, leader_sizes["device_bytes"], chip=devices.chip_of(group_devices[0])
        )
        bar, on_progress = terminal.compile_bar(console)
        with bar:
            member = start.build(deployment, group_devices, leader_sizes, on_progress)
    except GroupEnded as error:
        end(f"group {place.group!r} ends: {error}")
    except JdisaggError as error:
        start.failed(error)
        raise
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:
        if stopping.is_set():
            os._exit(command.INTERRUPTED)
        stopping.set()
        threading.Thread(target=member.leave, daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    console.print(f"[bold]ready[/]    rank {place.rank} of {place.group}", highlight=False)
    why = member.run()
    if why:
        end(f"group {place.group!r} ends: {why}")
    leave(0)
