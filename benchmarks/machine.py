"""What a measurement was made on, and what it cost: processor, versions, CPU seconds of a tree of processes."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PROC = Path("/proc")
VERSIONED = ("jdisagg", "jax", "jaxlib", "flax", "numpy")


def described() -> dict[str, Any]:
    """The head of every report: machine, versions, date (UTC), command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "machine": {
            "processor": processor(),
            "cores": usable_cores(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
            "load_average": [round(each, 2) for each in os.getloadavg()],
        },
        "versions": {"python": platform.python_version()} | dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in VERSIONED:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def processor() -> str:
    """As the kernel names it, else the architecture."""
    cpuinfo = PROC / "cpuinfo"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process and its living descendants; None where the system does not tell."""
    processes = dict(_processes())
    if pid not in processes:
        return None
    children: dict[int, list[int]] = {}
    for each, (parent, _) in processes.items():
        children.setdefault(parent, []).append(each)
    ticks, todo = 0, [pid]
    while todo:
        each = todo.pop()
        ticks += processes[each][1]
        todo += children.get(each, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, ticks of CPU)) of every process there is."""
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        yield int(stat.parent.name), (int(fields[1]), int(fields[11]) + int(fields[12]))
