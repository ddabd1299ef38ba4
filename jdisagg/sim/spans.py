"""What workers did and held, over virtual time: spans for a Gantt, counts of pages for a curve.

A cluster that is given a `SpanLog` writes into it; without one it records nothing. Decode steps that follow each other
without a gap and with the same batch are one span, so that a log grows with changes and not with steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier

SAME_INSTANT_S = 1e-9  # gaps up to this are sums of floats, not idleness


class Work(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"  # KV on its way to the worker


@dataclass(slots=True)
class WorkSpan:
    """One thing that a worker did. amount: prompt tokens, slots of a step, or KV tokens."""

    worker: WorkerId
    work: Work
    start_s: float
    done_s: float
    amount: int

    def continues(self, later: WorkSpan) -> bool:
        """Whether `later` is more of the same decoding."""
        alike = self.work is later.work is Work.DECODE and self.amount == later.amount
        return alike and later.start_s - self.done_s <= SAME_INSTANT_S


class Place(StrEnum):
    """Where KV lies. A page that lies in two places is in both."""

    IN_USE = "HBM, in use"
    KEPT = "HBM, kept"
    DRAM = "DRAM"
    DISK = "disk"
    POOL = "pool"


Curve = list[tuple[float, int]]  # (at_s, how many from then on), an entry a change


@dataclass(slots=True)
class SpanLog:
    """Spans in order of their dispatch; taken pages of each worker; tokens by where they lie, of workers that keep any;
    and tokens that came to HBM from below, or from another worker."""

    spans: list[WorkSpan] = field(default_factory=list)
    pages: dict[WorkerId, Curve] = field(default_factory=dict[WorkerId, Curve])
    lies: dict[tuple[WorkerId, Place], Curve] = field(default_factory=dict[tuple[WorkerId, Place], Curve])
    came: list[tuple[float, Tier, int]] = field(default_factory=list[tuple[float, Tier, int]])  # (at_s, from, tokens)
    num_pages: dict[WorkerId, int] = field(default_factory=dict)
    _last: dict[WorkerId, WorkSpan] = field(default_factory=dict)  # of the worker's devices

    def did(self, span: WorkSpan) -> None:
        last = self._last.get(span.worker)
        if last is not None and last.continues(span):
            last.done_s = span.done_s
            return
        self.spans.append(span)
        if span.work is not Work.TRANSFER:
            self._last[span.worker] = span

    def held(self, worker: WorkerId, at_s: float, pages: int, num_pages: int) -> None:
        """pages: that are not free, of `num_pages`."""
        self.num_pages[worker] = num_pages
        _add(self.pages.setdefault(worker, []), at_s, pages)

    def lie(self, worker: WorkerId, at_s: float, tokens: Mapping[Place, int]) -> None:
        """tokens: that the worker has in each of these places, or the pool where it is the worker."""
        for place, count in tokens.items():
            _add(self.lies.setdefault((worker, place), []), at_s, count)

    @property
    def workers(self) -> list[WorkerId]:
        """All that did or held anything, in the order of their names."""
        return sorted({*self.num_pages, *(span.worker for span in self.spans)})

    def of(self, worker: WorkerId) -> Iterable[WorkSpan]:
        return (span for span in self.spans if span.worker == worker)


def _add(curve: Curve, at_s: float, count: int) -> None:
    if curve and curve[-1][1] == count:
        return
    if curve and curve[-1][0] == at_s:
        curve[-1] = (at_s, count)
    else:
        curve.append((at_s, count))
