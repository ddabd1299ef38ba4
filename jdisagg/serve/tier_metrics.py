"""Metrics of KV below HBM: what moved between tiers, how long that took, what came to nothing, and what lies there."""

from __future__ import annotations

from collections.abc import Mapping

from jdisagg.core.tiers import PagesMoved
from jdisagg.policy.worker import Worker
from jdisagg.serve.metric_families import SECONDS, Families, Fold, Kind


class TierMetrics:
    """A page that was read back is a hit of its source; one that was not there, or was broken, is a miss."""

    def __init__(self, families: Families) -> None:
        ends = "worker", "source", "destination"
        self._pages = families.counter(
            "tier_pages_moved", "KV pages that came from one tier (hbm, dram, disk, pool, peer) to another", *ends
        )
        self._missed = families.counter(
            "tier_pages_missed", "KV pages asked of a tier that were not there, were broken, or were not taken", *ends
        )
        self._bytes = families.counter("tier_bytes", "KV moved between tiers", *ends)
        self._seconds = families.histogram("tier_move_seconds", "Of a move, from its wish to its end", SECONDS, *ends)
        self._failures = families.counter("tier_failures", "Moves of which a tier's store did not answer", *ends)
        self._kept = families.gauge(
            "tier_pages", "KV pages below HBM: free, in_flight, live (being read), cached", "worker", "tier", "use"
        )

    def folds(self) -> Mapping[Kind, Fold]:
        return {PagesMoved: self._moved}

    def _moved(self, actor: str, item: PagesMoved, now_s: float) -> None:
        ends = actor, item.move.source.value, item.move.destination.value
        if item.failed:
            self._failures.of(*ends).inc()
            return
        came = sum(item.good)
        self._pages.of(*ends).inc(came)
        self._missed.of(*ends).inc(len(item.good) - came)
        self._bytes.of(*ends).inc(item.num_bytes)
        self._seconds.of(*ends).observe(item.seconds)

    def watch(self, name: str, worker: Worker) -> None:
        """A worker of this process: its tiers are looked at when somebody asks."""
        for tier, pool in worker.tiers.pools.items():
            for use in pool.by_use():
                gauge = self._kept.of(name, tier.value, use)
                gauge.set_function(lambda pool=pool, use=use: pool.by_use()[use])
