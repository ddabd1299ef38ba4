"""What a soak looks at: memory, descriptors and threads of each process, and what /metrics of the router says."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

PROC = Path("/proc")
SAMPLE = re.compile(r"^jdisagg_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="(.*?)"')
Sample = dict[str, float]


def of_process(pid: int) -> Sample:
    """Resident MiB, open descriptors, threads. Raises OSError where the process has ended."""
    status = (PROC / str(pid) / "status").read_text()

    def number(name: str) -> int:
        return int(status.partition(f"{name}:")[2].split()[0])

    descriptors = len(list((PROC / str(pid) / "fd").iterdir()))
    return {"rss_mib": number("VmRSS") / 1024, "descriptors": descriptors, "threads": number("Threads")}


def metrics(url: str) -> dict[str, float]:
    """Every sample of the router's, as `kv_pages_by_use decode-0 live`: its name and the values of its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        values = [each for label, each in LABEL.findall(labels) if label != "model_name"]
        found[" ".join([name, *values])] = float(value)
    return found


def watched(url: str, pids: Mapping[str, int], since_s: float) -> Sample:
    """One sample of everything, by names such as `decode rss_mib`; `at_s` since `since_s`."""
    sample = {"at_s": round(time.monotonic() - since_s, 1)}
    for role, pid in pids.items():
        sample |= {f"{role} {name}": round(value, 2) for name, value in of_process(pid).items()}
    for name, value in metrics(url).items():
        if name.split()[0] in ("kv_pages_by_use", "recompiles", "http_connections", "requests_running"):
            sample[name] = value
    return sample


def held(url: str) -> dict[str, float]:
    """Pages in use and bytes of KV on their way; empty when everything is back."""
    return {
        name: value
        for name, value in metrics(url).items()
        if value and (name.startswith("transport_bytes") or re.match(r"kv_pages_by_use \S+ (live|in_flight)", name))
    }


def rise_per_hour(samples: Sequence[Sample], name: str) -> float:
    """Of the straight line through the second half of the samples."""
    half = samples[len(samples) // 2 :]
    times, values = [each["at_s"] / 3600 for each in half], [each[name] for each in half]
    middle, level = fmean(times), fmean(values)
    spread = sum((at - middle) ** 2 for at in times)
    slope = sum((at - middle) * (value - level) for at, value in zip(times, values, strict=True))
    return slope / spread if spread else 0.0
