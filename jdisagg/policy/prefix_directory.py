"""Which prompts went to which worker, so that what begins alike may go where its beginning was computed.

Soft state: names of pages only, by what the router sent; it knows nothing of what a worker dropped since, and forgets
what a pool of the worker's size would have. Nothing breaks where it is wrong: a prompt is then computed, or its KV
shipped, though another worker held it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.prefix_cache import PageHash, PrefixCache


@dataclass(slots=True)
class PrefixDirectory:
    """A ledger of names a worker."""

    _held: dict[WorkerId, PrefixCache] = field(default_factory=dict[WorkerId, PrefixCache])
    _pages: count[int] = field(default_factory=count)  # a page there is only a number: the router places none

    def cached_tokens(self, config: WorkerConfig, names: Sequence[PageHash]) -> int:
        """Leading tokens of a prompt with these pages that are thought to be there."""
        held = self._held.get(config.worker)
        return held.match(names) * config.page_size if held is not None else 0

    def sent(self, config: WorkerConfig, names: Sequence[PageHash]) -> None:
        held = self._held.setdefault(config.worker, PrefixCache())
        held.insert(names, tuple(islice(self._pages, len(names))))
        held.evict(len(held) - config.num_pages)

    def forget(self, worker: WorkerId) -> None:
        """It is gone, and its pages with it."""
        self._held.pop(worker, None)
