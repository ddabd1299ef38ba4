"""The outcome of a simulated workload: one record per request, and how many meet the service objectives.

TTFT is from arrival to the first token; TPOT is (last token - first token) / (tokens - 1) of one request; latency is
from arrival to the end. The parts of a latency are those of the serving ledger, and add up to it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.ledger import PARTS, Ledger
from jdisagg.core.profile import Checked
from jdisagg.core.request import FinishReason
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role
from jdisagg.sim.tiers import MoveStats

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)
ASKED = ("request_id", "arrival_s", "input_tokens", "output_tokens", "prefill_worker", "decode_worker", "reason")
CACHED = "cached_tokens"
NOT_CALIBRATED = "not calibrated: these seconds were never checked against a live run"
DERIVED = ("ttft_s", "tpot_s", "latency_s")
WIRE = ("wire_s", "transfer_hidden_s", "transfer_exposed_s")


@dataclass(slots=True, eq=False)
class Record:
    """The times, token counts and result of one request."""

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int  # requested
    emitted_tokens: int = 0
    first_s: float = 0.0  # when the client got its first token
    last_s: float = 0.0
    end_s: float = 0.0
    reason: str = ""  # why it ended: a finish reason, or "rejected"
    detail: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    ends: int = 0  # terminal effects so far
    ledger: Ledger | None = None

    @property
    def is_served(self) -> bool:
        return self.reason in NATURAL

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Returns the TPOT in seconds; 0 for a single token, which has no gap."""
        return (self.last_s - self.first_s) / (self.emitted_tokens - 1) if self.emitted_tokens > 1 else 0.0

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Returns True if the request was served within both objectives."""
        return self.is_served and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


METRICS: dict[str, Callable[[Record], float]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "latency": lambda record: record.latency_s,
}


@dataclass(slots=True)
class CacheLookups:
    """Prompt tokens that were looked up in prefix caches, and found, as the serving metrics count them."""

    looked_up: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a whole run. `busy` is the share of the span in which each worker's first stage ran."""

    records: Sequence[Record]
    events: int
    span_s: float  # of the virtual clock, from 0 to the last request's end
    busy: dict[str, float]
    lookups: Mapping[Role, CacheLookups] = field(
        default_factory=dict[Role, CacheLookups]
    )  # of workers with a prefix cache
    moved: Mapping[tuple[Tier, Tier], MoveStats] = field(default_factory=dict[tuple[Tier, Tier], MoveStats])

    @property
    def served(self) -> list[Record]:
        return [record for record in self.records if record.is_served]

    @property
    def cached_tokens(self) -> list[int]:
        """Returns for each request the prompt tokens that were not computed because their KV was cached."""
        return [record.ledger.cached_tokens if record.ledger else 0 for record in self.records]

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Returns the share of all requests, failed ones included, that met both objectives."""
        return sum(record.meets(ttft_s, tpot_s) for record in self.records) / max(1, len(self.records))

    def values(self, metric: str) -> np.ndarray:
        """Returns the seconds of every served request, f64[N]; single tokens have no TPOT."""
        chosen = [record for record in self.served if metric != "TPOT" or record.emitted_tokens > 1]
        return np.array([METRICS[metric](record) for record in chosen])

    def parts_s(self) -> dict[str, float]:
        """Returns the mean seconds of each part of the ledger, over the served requests."""
        sums = dict.fromkeys(PARTS, 0)
        for record in self.served:
            assert record.ledger is not None, "whoever was served has a ledger"
            for part, ns in record.ledger.parts_ns().items():
                sums[part] += ns
        return {part: ns / 1e9 / max(1, len(self.served)) for part, ns in sums.items()}


def columns(outcome: Outcome) -> dict[str, list[Any]]:
    """Returns columns with one row per request: sizes, workers, times and ledger, in seconds; None if missing."""
    names = (*ASKED, CACHED, *DERIVED, *(f"{part}_s" for part in PARTS), *WIRE)
    values_by_name: dict[str, list[Any]] = {name: [] for name in names}
    values_by_name[CACHED] = list(outcome.cached_tokens)
    for record in outcome.records:
        for name in ASKED:
            values_by_name[name].append(getattr(record, name))
        for name in DERIVED:
            values_by_name[name].append(getattr(record, name) if record.is_served else None)
        ledger = record.ledger or Ledger()
        for part, ns in ledger.parts_ns().items():
            values_by_name[f"{part}_s"].append(ns / 1e9)
        for name, ns in zip(WIRE, (ledger.wire_ns, *ledger.transfer_ns()), strict=True):
            values_by_name[name].append(ns / 1e9)
    return values_by_name


def write_csv(outcome: Outcome, path: Path | str) -> None:
    """Writes the columns as CSV. Raises ConfigError if the file cannot be written."""
    table = columns(outcome)
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(table)
            rows.writerows(zip(*table.values(), strict=True))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class SLO:
    """The objectives of a request, and the share of requests that must meet them for a rate to count."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9


@dataclass(frozen=True, slots=True)
class Point:
    """The results of a run at one rate. Latencies in seconds, nan if no request was served."""

    rate_rps: float
    attainment: float
    good_rps_per_device: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float

    @staticmethod
    def of(outcome: Outcome, rate_rps: float, slo: SLO, devices: int) -> Point:
        """Returns the point of a run. `rate_rps` is the arrival rate on the clock, not over the longer run."""
        attainment = outcome.attainment(slo.ttft_s, slo.tpot_s)
        good = attainment * len(outcome.records) / max(outcome.span_s, 1e-9) / devices
        spreads = [_quantiles(outcome.values(metric), (50, 99)) for metric in ("TTFT", "TPOT")]
        return Point(rate_rps, attainment, good, *spreads[0], *spreads[1])


def goodput_rps(points: Sequence[Point], share: float) -> float:
    """Returns the rate up to which at least `share` of the requests are good, interpolated between rates. Returns 0 if
    the lowest rate fails already, and the highest rate, then a lower bound, if none fails."""
    ordered = sorted(points, key=lambda point: point.rate_rps)
    if not ordered or ordered[0].attainment < share:
        return 0.0
    for before, after in pairwise(ordered):
        if after.attainment < share:
            fraction = (before.attainment - share) / (before.attainment - after.attainment)
            return before.rate_rps + fraction * (after.rate_rps - before.rate_rps)
    return ordered[-1].rate_rps


def goodput_text(points: Sequence[Point], share: float) -> str:
    """Returns the rate as text: 2.36, or ≥ 8 if the highest rate was good as well."""
    best = goodput_rps(points, share)
    return f"{'≥ ' if points and best == max(point.rate_rps for point in points) else ''}{best:.3g}"


def curve_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Returns a header and one row per rate, as text."""
    rows: list[tuple[str, ...]] = [
        ("requests/s", "good", "good/s a device", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99")
    ]
    for point in points:
        latencies = (point.ttft_p50_s, point.ttft_p99_s, point.tpot_p50_s, point.tpot_p99_s)
        good = (f"{point.attainment:.1%}", f"{point.good_rps_per_device:.3g}")
        rows.append((f"{point.rate_rps:g}", *good, *(f"{each * 1e3:,.1f}" for each in latencies)))
    return rows


def trust(checked: Checked | None) -> str:
    """Returns a sentence on the error against a serving run when the costs were last checked."""
    if checked is None:
        return NOT_CALIBRATED
    errors = ", ".join(f"{name} {share:+.1%}" for name, share in checked.errors.items())
    last = f"error against a live run, last checked {checked.when} ({checked.workload})"
    return f"{last}: MAPE {checked.mape:.1%} ({errors})"


def _quantiles(values: np.ndarray, percents: Sequence[int]) -> list[float]:
    return [float(each) for each in np.percentile(values, percents)] if len(values) else [math.nan] * len(percents)
