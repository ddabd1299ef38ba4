"""What a profile was taken on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine(device_kind: str) -> str:
    """The processor as the kernel names it, the cores this process may use, and the devices' kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {device_kind} devices"
