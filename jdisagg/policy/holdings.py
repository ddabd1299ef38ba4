"""Where pages lie, as far as the router knows: a directory of each tier that workers have, and who may lend to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import takewhile

from jdisagg.core.messages import MOST_HOLDERS, CacheChanged, CacheHeld, Holder
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.prefix_directory import PrefixDirectory

OWN = (Tier.HBM, Tier.DRAM, Tier.DISK)


class Holdings:
    """Of the workers that are followed."""

    def __init__(self) -> None:
        self.by_tier = {tier: PrefixDirectory(tier) for tier in OWN}
        self._lenders: dict[WorkerId, WorkerConfig] = {}

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
