"""Where pages lie, as far as the router knows: a directory of each tier that workers have, and who may lend to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import takewhile

from jdisagg.core.messages import MOST_HOLDERS, CacheChanged, CacheHeld, Holder, Priced
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.prefix_directory import PrefixDirectory
from jdisagg.policy.prices import COMPUTED
from jdisagg.policy.router.routing import FetchEstimate

MANY = 16  # lenders from which on a routing does not weigh what they could lend to whom
OWN = (Tier.HBM, Tier.DRAM, Tier.DISK)


class Holdings:
    """Of the workers that are followed."""

    def __init__(self) -> None:
        self.by_tier = {tier: PrefixDirectory(tier) for tier in OWN}
        self._lenders: dict[WorkerId, WorkerConfig] = {}
        self.prices: dict[WorkerId, dict[str, tuple[float, float]]] = {}  # seconds at all, and a page, by source

    @property
    def hbm(self) -> PrefixDirectory:
        return self.by_tier[Tier.HBM]

    def follow(self, config: WorkerConfig) -> None:
        for directory in self.by_tier.values():
            directory.follow(config)
        if config.prefix_caching and config.peer_fetch:
            self._lenders[config.worker] = config

    def forget(self, worker: WorkerId) -> None:
        self._lenders.pop(worker, None)
        self.prices.pop(worker, None)
        for directory in self.by_tier.values():
            directory.forget(worker)

    def hear(self, config: WorkerConfig, message: CacheChanged | CacheHeld) -> None:
        """As `PrefixDirectory.hear`."""
        directory = self.by_tier.get(message.tier)
        if directory is not None:
            directory.hear(config, message)

    def to_ask(self) -> list[WorkerId]:
        """Workers that are to be asked for all that they keep; each is returned once."""
        return list(dict.fromkeys(worker for directory in self.by_tier.values() for worker in directory.to_ask()))

    def hear_prices(self, worker: WorkerId, message: Priced) -> None:
        if self.hbm.follows(worker):
            self.prices[worker] = {source: (fixed, each) for source, fixed, each in message.lines}

    def seconds(self, worker: WorkerId, source: str, pages: int) -> float | None:
        """What it said that so many pages cost it; None where it said nothing."""
        line = self.prices.get(worker, {}).get(source)
        return None if line is None else line[0] + pages * line[1]

    # ------------------------------------------------------------ what a worker could fetch

    def reach(self, config: WorkerConfig, names: Sequence[PageHash], held: int) -> FetchEstimate | None:
        """The source that saves this worker most behind the `held` pages that it has; None where none is known to."""
        best, saved_s = None, 0.0
        for source, stop in self._sources(config, names, held):
            fetched_s = self.seconds(config.worker, source, stop - held)
            computed_s = self.seconds(config.worker, COMPUTED, stop - held)
            if fetched_s is not None and computed_s is not None and computed_s - fetched_s > saved_s:
                saved_s = computed_s - fetched_s
                best = FetchEstimate(source, stop * config.page_size, fetched_s / computed_s)
        return best

    def _sources(self, config: WorkerConfig, names: Sequence[PageHash], held: int) -> Iterator[tuple[str, int]]:
        """Each with the page before which what it has ends."""
        if held >= len(names) or COMPUTED not in self.prices.get(config.worker, {}):
            return
        for tier in OWN[1:]:
            stop = run_of(names, held, (self.by_tier[tier].told(config.worker),))
            if stop > held:
                yield tier.value, stop
        for each in self.holders(config, names) if len(self._lenders) <= MANY else ():
            if each.first <= held < each.stop:
                yield each.worker, each.stop

    # ------------------------------------------------------------ who may lend

    def holders(self, asker: WorkerConfig, names: Sequence[PageHash]) -> tuple[Holder, ...]:
        """Other workers that have pages of this prompt which the asker lacks, those with most first."""
        if asker.worker not in self._lenders:
            return ()
        held = run_of(names, 0, (self.hbm.told(asker.worker),))
        able = [self._lenders[each] for each in self._with(names[held : held + 1]) if each in self._lenders]
        found = [self._holder(each, names, held) for each in able if _alike(each, asker)]
        found = [each for each in found if each.stop > held]
        return tuple(sorted(found, key=lambda each: (-each.stop, each.worker))[:MOST_HOLDERS])

    def _with(self, names: Sequence[PageHash]) -> Iterable[WorkerId]:
        """Who keeps one of these pages, or is expected to, in any tier; each once."""
        kept = (directory.index.keepers(name) for name in names for directory in self.by_tier.values())
        return dict.fromkeys(worker for workers in kept for worker in workers)

    def _holder(self, lender: WorkerConfig, names: Sequence[PageHash], first: int) -> Holder:
        """What it has around page `first`: what the asker is thought to have may be gone there."""
        kept = [directory.told(lender.worker) for directory in self.by_tier.values()]
        stop = run_of(names, first, kept)
        while stop > first > 0 and _has(names[first - 1], kept):
            first -= 1
        return Holder(lender.worker, first, stop)


def run_of(names: Sequence[PageHash], first: int, kept: Iterable[Set[PageHash]]) -> int:
    """Where the pages from `first` on end that are kept in any of these."""
    sets = tuple(kept)
    return first + sum(1 for _ in takewhile(lambda at: _has(names[at], sets), range(first, len(names))))


def _has(name: PageHash, kept: Iterable[Set[PageHash]]) -> bool:
    return any(name in each for each in kept)


def _alike(lender: WorkerConfig, asker: WorkerConfig) -> bool:
    """Whether the one's records are pages of the other, and they are two."""
    same = (lender.page_size, lender.tier_wire, lender.digests) == (asker.page_size, asker.tier_wire, asker.digests)
    return same and lender.worker != asker.worker
