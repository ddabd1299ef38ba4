"""Figures in prose and the results that back them.

A figure of a measurement is followed by a comment with its key, as in `38 %<!-- =crossover.fewer_tokens.bursty.32 -->`.
It is backed where `figures()` has the key, read from `benchmarks/results/`, and its value rounds to what is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from benchmarks.stored import result

MARK = re.compile(r"([-+±]?\d[\d,]*(?:\.\d+)?)( ?%)?[^\d<|\n]{0,12}<!-- =(\S+) -->")
KEY = re.compile(r"<!-- =(\S+) -->")
OURS = {"ours": "jdisagg colocated:1xtp1", "vllm": "vLLM eager"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure as it stands in prose."""

    shown: str
    percent: bool
    key: str

    def wrong(self, figures: Mapping[str, float]) -> str:
        """What is wrong with it; empty for a figure that is backed."""
        if self.key not in figures:
            return f"{self.shown} is marked {self.key}, which no result has"
        digits = len(self.shown.partition(".")[2])
        value = figures[self.key] * (100 if self.percent else 1)
        if round(value, digits) == float(self.shown.replace(",", "")):
            return ""
        return f"{self.shown} is marked {self.key}, which is {value:.6g}"


def claims(text: str) -> list[Claim]:
    """All that are marked. Raises ValueError for a mark without a figure before it."""
    found = [Claim(shown, bool(percent), key) for shown, percent, key in MARK.findall(text)]
    lost = set(KEY.findall(text)) - {each.key for each in found}
    if lost:
        raise ValueError(f"no figure stands before the marks {', '.join(sorted(lost))}")
    return found


def figures() -> dict[str, float]:
    """Every figure that prose may claim, by its key; shares are of one."""
    return dict([*_crossover(), *_calibration(), *_published(), *_soak(), *_peers(), *_kernels()])


Figures = Iterator[tuple[str, float]]


def _crossover() -> Figures:
    cells = result("crossover")["cells"]
    by_place = {(each["architecture"], each["workload"], each["streams"]): each for each in cells}
    for (architecture, workload, streams), cell in by_place.items():
        for metric in ("tokens_per_s", "ttft_ms", "tpot_ms", "itl_p99_ms", "good_per_s", "stalled"):
            yield f"crossover.{metric}.{architecture}.{workload}.{streams}", cell[metric]["mid"]
        if architecture == "disaggregated":
            replicas = by_place["replicated", workload, streams]["tokens_per_s"]["mid"]
            yield f"crossover.fewer_tokens.{workload}.{streams}", 1 - cell["tokens_per_s"]["mid"] / replicas


def _calibration() -> Figures:
    """By how much the simulator is off, without the sign."""
    for each in result("calibration_cpu")["meshes"]:
        name = "colocated" if each["mesh"].startswith("colocated") else "apart"
        for metric, error in each["errors"].items():
            yield f"calibration.{name}.{metric.removesuffix('_s')}_off", abs(error)


def _published() -> Figures:
    gates = result("published")["gates"]
    within = sum(each["verdict"] == "within" for each in gates)
    yield from (
        ("published.gates", len(gates)),
        ("published.within", within),
        ("published.missed", len(gates) - within),
    )


def _soak() -> Figures:
    report = result("soak_cpu")
    server = report["memory_mib"]["server"]
    yield from (
        ("soak.end_mib", server["end"]),
        ("soak.rise_mib", server["rise"]),
        ("soak.faults", len(report["faults"])),
    )


def _peers() -> Figures:
    for model, bursts in result("peers_cpu_f32")["models"].items():
        for name, engine in OURS.items():
            mine = [each for each in bursts if each["engine"] == engine]
            for metric in ("output_tokens_per_s", "ttft_ms_p50", "itl_ms_p99"):
                key = metric.replace("itl_ms_p99", "itl_p99_ms").replace("ttft_ms_p50", "ttft_ms")
                yield f"peers.{key}.{model}.{name}", median(each[metric] for each in mine)


def _kernels() -> Figures:
    """Times of what bounds a row: 2 is twice its floor."""
    for each in result("kernels_cpu")["rows"]:
        if each["operation"] == "paged_attention":
            shape = "-".join(re.findall(r"[\d,]+", each["shape"])[:2]).replace(",", "")
            yield f"kernels.times_copy.{shape}.page{each['page_size']}", 1 / each["share"]
