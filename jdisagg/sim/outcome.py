"""What came of a simulated workload: one record a request, and what service objectives make of them.

TTFT is from arrival to the first token; TPOT is (last token - first token) / (tokens - 1), of one request; latency is
from arrival to the end. The parts of a latency are the live ledger's, and sum to it.
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
from jdisagg.sim.tiers import Moved

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)
ASKED = ("request_id", "arrival_s", "input_tokens", "output_tokens", "prefill_worker", "decode_worker", "reason")
CACHED = "cached_tokens"
NOT_CALIBRATED = "not calibrated: these seconds were never checked against a live run"
DERIVED = ("ttft_s", "tpot_s", "latency_s")
WIRE = ("wire_s", "transfer_hidden_s", "transfer_exposed_s")


@dataclass(slots=True, eq=False)
class Record:
    """One request."""

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int  # asked for
    told_tokens: int = 0
    first_s: float = 0.0  # when the client got its first token
    last_s: float = 0.0
    end_s: float = 0.0
    reason: str = ""  # why it ended: a finish reason, or "rejected"
    detail: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    ends: int = 0  # terminal effects that were seen
    ledger: Ledger | None = None

    @property
    def served(self) -> bool:
        return self.reason in NATURAL

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """0 for a single token, which has no gap."""
        return (self.last_s - self.first_s) / (self.told_tokens - 1) if self.told_tokens > 1 else 0.0

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was served within both objectives."""
        return self.served and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


METRICS: dict[str, Callable[[Record], float]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "latency": lambda record: record.latency_s,
}


@dataclass(slots=True)
class Lookups:
    """Prompt tokens that were looked up in kept KV, and found: as the live metrics count them."""

    looked_up: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a whole run. `busy` is the share of the span that each worker's first stage worked."""

    records: Sequence[Record]
    events: int
    span_s: float  # of the virtual clock, from 0 to the last request's end
    busy: dict[str, float]
    lookups: Mapping[Role, Lookups] = field(default_factory=dict[Role, Lookups])  # of workers that keep KV
    moved: Mapping[tuple[Tier, Tier], Moved] = field(default_factory=dict[tuple[Tier, Tier], Moved])  # between tiers

    @property
    def served(self) -> list[Record]:
        return [record for record in self.records if record.served]

    @property
    def cached_tokens(self) -> list[int]:
        """Of each request: prompt tokens that were not computed, their KV being there."""
        return [record.ledger.cached_tokens if record.ledger else 0 for record in self.records]

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Share of all requests, those that failed included, that met both objectives."""
        return sum(record.meets(ttft_s, tpot_s) for record in self.records) / max(1, len(self.records))

    def values(self, metric: str) -> np.ndarray:
        """Seconds of every request that was served, f64[N]; single tokens have no TPOT."""
        chosen = [record for record in self.served if metric != "TPOT" or record.told_tokens > 1]
        return np.array([METRICS[metric](record) for record in chosen])

    def parts_s(self) -> dict[str, float]:
        """Mean seconds of each part of the ledger, over the requests that were served."""
        sums = dict.fromkeys(PARTS, 0)
        for record in self.served:
            assert record.ledger is not None, "whoever was served has a ledger"
            for part, ns in record.ledger.parts_ns().items():
                sums[part] += ns
        return {part: ns / 1e9 / max(1, len(self.served)) for part, ns in sums.items()}


def columns(outcome: Outcome) -> dict[str, list[Any]]:
    """A row a request: what it asked for, who served it, when, and its ledger, in seconds; None where it has none."""
    names = (*ASKED, CACHED, *DERIVED, *(f"{part}_s" for part in PARTS), *WIRE)
    found: dict[str, list[Any]] = {name: [] for name in names}
    found[CACHED] = list(outcome.cached_tokens)
    for record in outcome.records:
        for name in ASKED:
            found[name].append(getattr(record, name))
        for name in DERIVED:
            found[name].append(getattr(record, name) if record.served else None)
        ledger = record.ledger or Ledger()
        for part, ns in ledger.parts_ns().items():
            found[f"{part}_s"].append(ns / 1e9)
        for name, ns in zip(WIRE, (ledger.wire_ns, *ledger.transfer_ns()), strict=True):
            found[name].append(ns / 1e9)
    return found


def write_csv(outcome: Outcome, path: Path | str) -> None:
    """The columns under their names. Raises ConfigError where the file cannot be written."""
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
    """What a good request keeps to, and the share of requests that must be good for a rate to count."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9


@dataclass(frozen=True, slots=True)
class Point:
    """A run at one rate, as goodput sees it. Latencies in seconds, nan where nothing was served."""

    rate_rps: float
    attainment: float
    good_rps_per_device: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float

    @staticmethod
    def of(outcome: Outcome, rate_rps: float, slo: SLO, devices: int) -> Point:
        """rate_rps: of arrivals, the clock's and not the run's, which ends when the last request does."""
        met = outcome.attainment(slo.ttft_s, slo.tpot_s)
        good = met * len(outcome.records) / max(outcome.span_s, 1e-9) / devices
        spreads = [_quantiles(outcome.values(metric), (50, 99)) for metric in ("TTFT", "TPOT")]
        return Point(rate_rps, met, good, *spreads[0], *spreads[1])


def goodput_rps(points: Sequence[Point], share: float) -> float:
    """The rate up to which at least `share` of the requests are good, a straight line between rates.

    0 where the lowest rate fails already; the highest rate where none fails, which is then a lower bound.
    """
    ordered = sorted(points, key=lambda point: point.rate_rps)
    if not ordered or ordered[0].attainment < share:
        return 0.0
    for before, after in pairwise(ordered):
        if after.attainment < share:
            fallen = (before.attainment - share) / (before.attainment - after.attainment)
            return before.rate_rps + fallen * (after.rate_rps - before.rate_rps)
    return ordered[-1].rate_rps


def goodput_text(points: Sequence[Point], share: float) -> str:
    """As 2.36, or ≥ 8 where the highest rate was good as well."""
    best = goodput_rps(points, share)
    return f"{'≥ ' if points and best == max(point.rate_rps for point in points) else ''}{best:.3g}"


def curve_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Head and a row a rate, as text."""
    rows: list[tuple[str, ...]] = [
        ("requests/s", "good", "good/s a device", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99")
    ]
    for point in points:
        latencies = (point.ttft_p50_s, point.ttft_p99_s, point.tpot_p50_s, point.tpot_p99_s)
        good = (f"{point.attainment:.1%}", f"{point.good_rps_per_device:.3g}")
        rows.append((f"{point.rate_rps:g}", *good, *(f"{each * 1e3:,.1f}" for each in latencies)))
    return rows


def trust(checked: Checked | None) -> str:
    """How far a simulation was from a live run when its costs were last checked, in words."""
    if checked is None:
        return NOT_CALIBRATED
    errors = ", ".join(f"{name} {share:+.1%}" for name, share in checked.errors.items())
    last = f"error against a live run, last checked {checked.when} ({checked.workload})"
    return f"{last}: MAPE {checked.mape:.1%} ({errors})"


def _quantiles(values: np.ndarray, percents: Sequence[int]) -> list[float]:
    return [float(each) for each in np.percentile(values, percents)] if len(values) else [math.nan] * len(percents)
