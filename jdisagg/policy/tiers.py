"""One worker's tiers below HBM: what they hold, what goes down, what comes up, and what each source costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jdisagg.core.messages import FetchPages, Holder, NoPages
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.tiers import PagesFound, PagesMoved, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache_changes import CacheChanges
from jdisagg.policy.demotions import Demotions
from jdisagg.policy.fetches import Fetches
from jdisagg.policy.lending import Lending
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import PageHash, unpacked
from jdisagg.policy.prices import COMPUTED, Prices
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.step_times import StepTimes
from jdisagg.policy.tier_pool import TierPool

TOLD_EACH_S = 1.0  # at most, of prices


class Tiers:
    """Of one worker; without any (`config.has_tiers`) nothing here ever happens."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: Outbox) -> None:
        self.config, self.shared, self.out, self.prices = config, shared, out, Prices()
        sizes = {Tier.DRAM: config.dram_pages, Tier.DISK: config.disk_pages}
        self.pools = {tier: TierPool(size) for tier, size in sizes.items() if size and config.has_tiers}
        self.steps = StepTimes() if config.has_tiers else None
        self.fetches = Fetches(shared, self.pools, out, self.prices, shared_pool=config.shared_pool)
        self.demotions = Demotions(shared, self.pools, out, self.prices.usable) if config.keeps_below else None
        self._told_s = -math.inf  # when the router was told of prices
        self.lending = Lending(shared, self.pools, out)
        self.changes = tuple(CacheChanges(pool, tier) for tier, pool in self.pools.items())

    @property
    def busy(self) -> bool:
        """Somebody waits for pages. Those on their way down, or that nobody waits for, hold nothing of HBM."""
        return bool(self.fetches.under_way)

    def follow(self, config: WorkerConfig, shared: SharedPages) -> Tiers:
        """The worker's role was changed: it holds nothing in HBM. What lies below stays, and what is on its way down
        gets there; what was on its way up and is late goes nowhere."""
        assert _kind_of(config) == _kind_of(self.config), f"tiers of {self.config} cannot be those of {config}"
        assert not self.busy, "who waits for pages is not idle"
        self.config, self.shared, self.fetches.shared, self.lending.shared = config, shared, shared, shared
        if config.has_tiers:
            self.steps = StepTimes()
            self.prices.forget(COMPUTED)
        if self.demotions is not None:
            self.demotions.follow(shared)
        return self

    def fetch(
        self, waiter: Attempt, names: Sequence[PageHash], room: int, now_s: float, holders: Sequence[Holder] = ()
    ) -> bool:
        """As `Fetches.begin`."""
        lenders = holders if self.config.peer_fetch else ()
        return self.config.has_tiers and self.fetches.begin(waiter, names, room, now_s, lenders)

    def hear(self, message: FetchPages | NoPages, sender: WorkerId, now_s: float, *, lends: bool) -> list[Attempt]:
        """Another worker asks, or has nothing; returns who need not wait any longer. Where it `lends` nothing now, what
        is asked for is not there."""
        if isinstance(message, NoPages):
            return self.fetches.refused(message, sender, now_s)
        if lends:
            self.lending.asked(message, sender)
        else:
            self.out.send(sender, NoPages(message.attempt))
        return []

    def moved(self, event: PagesMoved, now_s: float) -> list[Attempt]:
        """A move ended; returns who need not wait any longer."""
        if event.move.destination is Tier.HBM:
            return self.fetches.moved(event, now_s)
        if event.move.destination is Tier.PEER:
            self.lending.moved(event)
            return []
        assert self.demotions is not None, "only who has tiers moves pages"
        self.demotions.moved(event)
        if event.failed:
            self.prices.failed(event.move.destination, now_s)
        else:
            self.prices.answered(event.move.destination)
        return []

    def found(self, event: PagesFound) -> None:
        self.pools[Tier.DISK].restore(event.pages, unpacked(event.names))

    def tend(self, now_s: float) -> None:
        if self.demotions is not None:
            self.demotions.tend(now_s)
        if self.prices.fresh and self.shared.changes.followed and now_s >= self._told_s + TOLD_EACH_S:
            self._told_s = now_s
            self.out.tell_router(self.prices.known(now_s))

    # ------------------------------------------------------------ what computing costs

    def step_dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        if self.steps is not None:
            self.steps.dispatched(step_id, tokens, now_s)

    def step_done(self, step_id: int, now_s: float) -> None:
        if self.steps is not None:
            tokens, took_s = self.steps.done(step_id, now_s)
            self.prices.learn(COMPUTED, tokens / self.config.page_size, took_s, now_s)

    def step_failed(self, step_id: int) -> None:
        if self.steps is not None:
            self.steps.failed(step_id)

    def check_invariants(self) -> None:
        for pool in self.pools.values():
            pool.check_invariants()


def _kind_of(config: WorkerConfig) -> object:
    """What pages below HBM depend on."""
    sizes = config.page_size, config.dram_pages, config.disk_pages
    return config.has_tiers and (*sizes, config.shared_pool, config.peer_fetch, config.tier_wire)
