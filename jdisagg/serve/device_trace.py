"""What JAX's profiler sees of a process for a while, and of several as one zip for TensorBoard or XProf."""

from __future__ import annotations

import io
import platform
import tempfile
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax

from jdisagg.core.errors import JdisaggError

LONGEST_S = 60  # a trace is held in memory
ROUTER_PROCESS = "router"  # what the process of the fronts is called, alone or not
_ONE = threading.Lock()  # the profiler knows one trace at a time
Files = dict[str, bytes]  # of one process, by what they are: xplane.pb, trace.json.gz
Profiles = dict[str, Files]  # by the process


class Busy(JdisaggError):
    """Another trace is being taken (HTTP 409)."""


def device_trace(seconds: float) -> Files:
    """Blocks for `seconds` and some more. Raises Busy."""
    if not _ONE.acquire(blocking=False):
        raise Busy("another profile is being taken; there can be one at a time")
    try:
        with tempfile.TemporaryDirectory(prefix="jdisagg-profile-") as folder:
            jax.profiler.start_trace(folder)
            try:
                time.sleep(seconds)
            finally:
                jax.profiler.stop_trace()
            host = f"{platform.node()}."
            paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            return {path.name.removeprefix(host): path.read_bytes() for path in paths}
    finally:
        _ONE.release()


def own_profile(seconds: float) -> Profiles:
    """Of this process alone. As `device_trace`."""
    return {ROUTER_PROCESS: device_trace(seconds)}


def zipped(profiles: Mapping[str, Files], run: str) -> bytes:
    """One run, in which each process is a host: plugins/profile/RUN/PROCESS.xplane.pb."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for process, files in profiles.items():
            for name, content in files.items():
                archive.writestr(f"plugins/profile/{run}/{process}.{name}", content)
    return out.getvalue()
