"""What JAX's profiler sees of this process for a while, as a zip for TensorBoard, XProf or Perfetto."""

from __future__ import annotations

import io
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import jax

from jdisagg.core.errors import JdisaggError

LONGEST_S = 60  # a trace is held in memory
_ONE = threading.Lock()  # the profiler knows one trace at a time


class Busy(JdisaggError):
    """Another trace is being taken (HTTP 409)."""


def device_trace(seconds: float) -> bytes:
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
            return _zipped(Path(folder))
    finally:
        _ONE.release()


def _zipped(folder: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, str(path.relative_to(folder)))
    return out.getvalue()
