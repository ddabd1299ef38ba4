"""Where the pages of a prompt come from that HBM lacks: run by run, by what each source costs beside computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jdisagg.core.messages import Holder
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import NOBODY, Tier
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.prices import Prices
from jdisagg.policy.tier_pool import TierPool

CHUNK_PAGES = 64  # that another worker is asked for by one word


class Run(NamedTuple):
    """So many pages, from there."""

    tier: Tier
    worker: WorkerId  # where the tier is a peer's
    size: int

    @property
    def source(self) -> str:
        return self.worker or self.tier.value


class Sources:
    """Of one worker. `tiers` are its own below HBM, the upper one first."""

    def __init__(self, tiers: Mapping[Tier, TierPool], prices: Prices, *, shared_pool: bool) -> None:
        self.tiers, self.prices, self.shared_pool = tiers, prices, shared_pool

    def runs(self, missing: Sequence[PageHash], holders: Sequence[Holder], now_s: float) -> list[Run]:
        """One behind the other, from the first missing page on. Holders count pages from there."""
        runs, at = list[Run](), 0
        while at < len(missing):
            run = self._own(missing, at, now_s) or self._others(len(missing), holders, at, now_s)
            if run is None:
                break
            runs.append(run)
            at += run.size
        return runs

    def _own(self, missing: Sequence[PageHash], at: int, now_s: float) -> Run | None:
        for tier, pool in self.tiers.items():
            size = pool.match(missing[at:])
            if size and self.prices.pays(tier, size, now_s):
                return Run(tier, NOBODY, size)
        return None

    def _others(self, end: int, holders: Sequence[Holder], at: int, now_s: float) -> Run | None:
        """Of what pays the cheapest a page; what nobody has measured is tried before that."""
        there = [each for each in holders if each.first <= at < min(each.stop, end)]
        found = [Run(Tier.PEER, each.worker, min(each.stop, end) - at) for each in there]
        if self.shared_pool:
            found.append(Run(Tier.POOL, NOBODY, end - at))
        found = [run for run in found if self.prices.pays(run.source, run.size, now_s)]
        if not found:
            return None
        best = min(found, key=lambda run: (self.prices.seconds(run.source, run.size, now_s) or 0.0) / run.size)
        return best if best.tier is Tier.POOL else best._replace(size=min(best.size, CHUNK_PAGES))
