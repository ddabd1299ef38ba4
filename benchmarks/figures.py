"""Samples become figures: percentiles, rates, goodput, phase means. Pure arithmetic, milliseconds out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load import Burst, Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles and mean in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float

    @staticmethod
    def of(values_s: Iterable[float]) -> Spread | None:
        """None of nothing. Percentiles are values that occurred (nearest rank)."""
        ordered = sorted(values_s)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] * 1e3 for share in (0.5, 0.9, 0.99))
        return Spread(p50, p90, p99, sum(ordered) / len(ordered) * 1e3)


@dataclass(frozen=True, slots=True)
class SLO:
    """What a request must meet to count as good, in milliseconds. A single token has no TPOT to miss."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, sample: Sample) -> bool:
        return sample.ok and sample.ttft_s * 1e3 <= self.ttft_ms and (sample.tpot_s or 0.0) * 1e3 <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Figures:
    """One burst, summed up. Rates are per second of wall time; `good` is among all requests, failed ones included."""

    concurrency: int
    requests: int
    failed: int
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    good_share: float
    good_requests_per_s: float
    ledger_ms: dict[str, float]
    server_cpu_s: float | None = None
    engine: dict[str, Any] | None = None  # see benchmarks/counters.py; in process only

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summed_up(
    burst: Burst, slo: SLO, server_cpu_s: float | None = None, engine: dict[str, Any] | None = None
) -> Figures:
    """The figures of one burst; failed requests count as requests and nowhere else."""
    done = [each for each in burst.samples if each.ok]
    good = sum(map(slo.met_by, burst.samples))
    tokens = sum(each.num_tokens for each in done)
    return Figures(
        concurrency=burst.concurrency,
        requests=len(burst.samples),
        failed=len(burst.samples) - len(done),
        wall_s=burst.wall_s,
        prompt_tokens=sum(each.num_prompt_tokens for each in done),
        output_tokens=tokens,
        output_tokens_per_s=tokens / burst.wall_s,
        requests_per_s=len(done) / burst.wall_s,
        ttft_ms=Spread.of(each.ttft_s for each in done),
        tpot_ms=Spread.of(each.tpot_s for each in done if each.tpot_s is not None),
        itl_ms=Spread.of(gap for each in done for gap in each.itl_s),
        e2e_ms=Spread.of(each.e2e_s for each in done),
        good_share=good / max(1, len(burst.samples)),
        good_requests_per_s=good / burst.wall_s,
        ledger_ms=ledger_means(done),
        server_cpu_s=server_cpu_s,
        engine=engine,
    )


def ledger_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean milliseconds of each phase, over the samples that have a ledger; empty where none has."""
    ledgers = [each.ledger_ns for each in samples if each.ledger_ns]
    names = list(ledgers[0]) if ledgers else []
    return {name: sum(each.get(name, 0) for each in ledgers) / len(ledgers) / 1e6 for name in names}
