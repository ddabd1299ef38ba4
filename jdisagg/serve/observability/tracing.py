"""Traces: a time window of a cluster for https://ui.perfetto.dev or chrome://tracing, and profiles of JAX's profiler.

A process of a window's trace is a worker or the router. Its rows are steps by microbatch, chunks, KV by stage, and one
row per request with the spans of its ledger. Arrows lead from where a part of KV left to where it arrived. The trace is
made of stored records; times are microseconds of the driver's clock. A step is dispatched before the previous one is
read, so it is shown from the end of the previous one.
"""

from __future__ import annotations

import io
import platform
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import ROUTER
from jdisagg.serve.observability.step_log import RanStep

# The worker that a part of the ledger is charged to; the router has the other parts.
WHOSE = {"prefill": "prefill", "transfer": "decode", "first_step": "decode", "decode": "decode"}
INSTANT_US = 1  # the length of a slice whose end is unknown
Event = dict[str, Any]


class Rows:
    """Numbers of processes and rows of a trace, and the events that name them."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}
        self.named: list[Event] = []

    def pid(self, worker: str) -> int:
        if worker not in self._pids:
            self._pids[worker] = len(self._pids) + 1
            self._name("process_name", worker, self._pids[worker], 0)
        return self._pids[worker]

    def row(self, worker: str, name: str) -> dict[str, int]:
        pid = self.pid(worker)
        if (pid, name) not in self._tids:
            self._tids[pid, name] = len(self._tids) + 1
            self._name("thread_name", name, pid, self._tids[pid, name])
        return {"pid": pid, "tid": self._tids[pid, name]}

    def _name(self, what: str, name: str, pid: int, tid: int) -> None:
        self.named.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})


def chrome_trace(
    requests: Iterable[Mapping[str, Any]], steps: Iterable[RanStep], begin_s: float, end_s: float
) -> dict[str, Any]:
    """Returns the trace of a window; slices wholly outside it are left out. `requests` are as in /debug/requests/ID."""
    rows = Rows()
    rows.pid(ROUTER)
    events = _steps(rows, steps)
    for request in requests:
        events += [*_spans(rows, request), *_chunks(rows, request), *_parts(rows, request)]
    shown = [each for each in events if each["ts"] <= end_s * 1e6 and each["ts"] + each.get("dur", 0) >= begin_s * 1e6]
    ends = {each["id"] for each in shown if each["ph"] == "f"}
    starts = {each["id"] for each in shown if each["ph"] == "s"}
    whole = [each for each in shown if each["ph"] not in "sf" or each["id"] in ends & starts]  # an arrow has two ends
    return {"traceEvents": [*rows.named, *sorted(whole, key=lambda each: each["ts"])], "displayTimeUnit": "ms"}


def _slice(
    row: Mapping[str, int], name: str, began_s: float, ended_s: float, kind: str, args: Mapping[str, Any]
) -> Event:
    duration_us = max(INSTANT_US, (ended_s - began_s) * 1e6)
    return {"ph": "X", "name": name, "cat": kind, "ts": began_s * 1e6, "dur": duration_us, "args": dict(args), **row}


def _steps(rows: Rows, steps: Iterable[RanStep]) -> list[Event]:
    found, free_s = list[Event](), dict[tuple[int, int], float]()
    for step in steps:
        chunks = [f"{step.chunk_tokens} prompt tokens"] if step.chunk_tokens else []
        decodes = [f"{step.rows} rows"] if step.rows else []
        label = "steps" if step.microbatch is None else f"steps of microbatch {step.microbatch}"
        row = rows.row(step.worker, label)
        began_s = max(step.began_s, free_s.get((row["pid"], row["tid"]), step.began_s))
        free_s[row["pid"], row["tid"]] = step.ended_s
        name = ", ".join([*chunks, *decodes]) or "step"
        found.append(_slice(row, name, began_s, step.ended_s, "step", {"step": step.step_id}))
    return found


def _spans(rows: Rows, request: Mapping[str, Any]) -> list[Event]:
    workers, name = request["workers"], request["request_id"]
    found = []
    for span in request["spans"]:
        worker = workers.get(WHOSE.get(span["part"], "")) or ROUTER
        args = {"request": name, "prompt_tokens": request["prompt_tokens"], "tokens": request["tokens"]}
        row = rows.row(worker, f"request {name}")
        found.append(_slice(row, span["part"], span["start_s"], span["end_s"], "ledger", args))
    return found


def _chunks(rows: Rows, request: Mapping[str, Any]) -> list[Event]:
    return [
        _slice(
            rows.row(chunk["worker"], "chunks"),
            f"tokens {chunk['start']} to {chunk['start'] + chunk['tokens']}",
            chunk["at_s"],
            chunk["at_s"],
            "chunk",
            {"request": request["request_id"]},
        )
        for chunk in request["chunks"]
    ]


def _parts(rows: Rows, request: Mapping[str, Any]) -> list[Event]:
    """Returns the parts of KV that arrived, each from departure to arrival, with an arrow."""
    found, left = list[Event](), dict[int, float]()
    for part in request["parts"]:
        if part["what"] in ("to leave", "left"):
            left[part["part"]] = part["at_s"]
        elif part["what"].startswith("arrived"):
            at_s, wire_s = float(part["at_s"]), part.get("wire_s", 0.0)
            began_s = at_s - wire_s if wire_s else left.get(part["part"], at_s)
            found += _part(rows, request["request_id"], part, began_s)
    return found


def _part(rows: Rows, name: str, part: Mapping[str, Any], began_s: float) -> list[Event]:
    stage = "KV" if not part["layers"] else f"KV of layers {part['layers'][0]} to {part['layers'][1] - 1}"
    source, destination = rows.row(part["from"], f"{stage}, out"), rows.row(part["to"], f"{stage}, in")
    args = {"request": name, "pages": part["pages"], "wire": part["wire"], "resends": part["resends"]}
    label = f"part {part['part']}: {part['pages']} pages"
    arrow = {"cat": "kv", "name": "handoff", "id": f"{name}/{part['part']}/{part['resends']}"}
    return [
        _slice(source, label, began_s, part["at_s"], "kv", args),
        _slice(destination, label, part["at_s"], part["at_s"], "kv", args),
        {"ph": "s", "ts": began_s * 1e6, **arrow, **source},
        {"ph": "f", "bp": "e", "ts": part["at_s"] * 1e6, **arrow, **destination},
    ]


def overlapping(requests: Sequence[Mapping[str, Any]], begin_s: float) -> list[Mapping[str, Any]]:
    """Returns the requests that had not ended by `begin_s`."""
    return [each for each in requests if each["finish"] is None or each["spans"][-1]["end_s"] >= begin_s]


# Profiles of JAX's profiler, zipped for TensorBoard or XProf.

LONGEST_S = 60  # the longest profile, because it is held in memory
ROUTER_PROCESS = "router"  # the name of the router's process, or of the only one
_ONE = threading.Lock()  # the profiler takes one trace at a time
Files = dict[str, bytes]  # of one process, by name: xplane.pb, trace.json.gz
Profiles = dict[str, Files]  # by the process


class Busy(JdisaggError):
    """Another profile is being taken (HTTP 409)."""


def device_trace(seconds: float) -> Files:
    """Takes a profile; blocks for `seconds` and the time to write it. Raises Busy."""
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
    return {ROUTER_PROCESS: device_trace(seconds)}


def zipped(profiles: Mapping[str, Files], run: str) -> bytes:
    """Returns a zip of one run with each process as a host: plugins/profile/RUN/PROCESS.xplane.pb."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for process, files in profiles.items():
            for name, content in files.items():
                archive.writestr(f"plugins/profile/{run}/{process}.{name}", content)
    return out.getvalue()
