"""One worker's tiers below HBM: what they hold, what goes down, what comes up, and what each source costs."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.request import Attempt
from jdisagg.core.tiers import PagesFound, PagesMoved, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.demotions import Demotions
from jdisagg.policy.fetches import Fetches
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import PageHash, unpacked
from jdisagg.policy.prices import COMPUTED, Prices
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.step_times import StepTimes
from jdisagg.policy.tier_pool import TierPool


class Tiers:
    """Of one worker; without any (`config.has_tiers`) nothing here ever happens."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: Outbox) -> None:
        self.config, self.shared, self.prices = config, shared, Prices()
        sizes = {Tier.DRAM: config.dram_pages, Tier.DISK: config.disk_pages}
        self.pools = {tier: TierPool(size) for tier, size in sizes.items() if size and config.has_tiers}
        self.steps = StepTimes() if config.has_tiers else None
        self.fetches = Fetches(shared, self.pools, out, self.prices, shared_pool=config.shared_pool)
        self.demotions = Demotions(shared, self.pools, out, self.prices.usable) if config.has_tiers else None

    @property
    def busy(self) -> bool:
        """Somebody waits for pages. Those on their way down, or that nobody waits for, hold nothing of HBM."""
        return bool(self.fetches.under_way)

    def follow(self, config: WorkerConfig, shared: SharedPages) -> Tiers:
        """The worker's role was changed: it holds nothing in HBM. What lies below stays, and what is on its way down
        gets there; what was on its way up and is late goes nowhere."""
        assert _kind_of(config) == _kind_of(self.config), f"tiers of {self.config} cannot be those of {config}"
        assert not self.busy, "who waits for pages is not idle"
        self.config, self.shared, self.fetches.shared = config, shared, shared
        if self.demotions is not None:
            self.steps = StepTimes()
            self.prices.forget(COMPUTED)
            self.demotions.follow(shared)
        return self

    def fetch(self, waiter: Attempt, names: Sequence[PageHash], room: int, now_s: float) -> bool:
        """As `Fetches.begin`."""
        return self.config.has_tiers and self.fetches.begin(waiter, names, room, now_s)

    def moved(self, event: PagesMoved, now_s: float) -> list[Attempt]:
        """A move ended; returns who need not wait any longer."""
        if event.move.destination is Tier.HBM:
            return self.fetches.moved(event, now_s)
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
    return config.has_tiers and (*sizes, config.shared_pool, config.tier_wire)
