"""What came of a simulated workload: one record a request, and what service objectives make of them.

TTFT is from arrival to the first token; TPOT is (last token - first token) / (tokens - 1), of one request; latency is
from arrival to the end. The parts of a latency are the live ledger's, and sum to it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jdisagg.core.ledger import PARTS, Ledger
from jdisagg.core.request import FinishReason

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a whole run. `busy` is the share of the span that each worker's first stage worked."""

    records: Sequence[Record]
    events: int
    span_s: float  # of the virtual clock, from 0 to the last request's end
    busy: dict[str, float]

    @property
    def served(self) -> list[Record]:
        return [record for record in self.records if record.served]

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


def write_csv(outcome: Outcome, path: Path | str) -> None:
    """A row a request: lengths, workers, end, TTFT, TPOT, latency, and the ledger's parts, in seconds."""
    columns = ["request_id", "arrival_s", "input_tokens", "output_tokens", "prefill_worker", "decode_worker", "reason"]
    derived = ["ttft_s", "tpot_s", "latency_s"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*columns, *derived, *(f"{part}_s" for part in PARTS)])
        for record in outcome.records:
            parts = record.ledger.parts_ns() if record.ledger else dict.fromkeys(PARTS, 0)
            times = [getattr(record, name) if record.served else "" for name in derived]
            rows.writerow([*(getattr(record, name) for name in columns), *times, *(parts[p] / 1e9 for p in PARTS)])
