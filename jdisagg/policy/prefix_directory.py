"""Which pages each worker keeps, so that what begins alike may go where its beginning was computed.

A worker tells its changes by number. Where one is missing, comes out of its turn, or does not lead to what the worker
has, the worker is asked for the whole; so it is where it has joined, or found less of a prompt than it was thought to
have (or more, time and again). To this is added what is expected: prompts that were sent there and are still being
computed. Nothing breaks where any of it is wrong: a prompt is then computed, or its KV shipped, though another worker
held it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from jdisagg.core.errors import SenselessWord
from jdisagg.core.messages import CacheChanged, CacheHeld
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache_changes import check_of
from jdisagg.policy.prefix_cache import PageHash, unpacked
from jdisagg.policy.prefix_index import PrefixIndex

NO_NAMES: Set[PageHash] = frozenset()
AGAIN = 16  # words that tell nothing, as the whole has not come, until it is asked for again


@dataclass(slots=True)
class KnownCache:
    """What one worker said that it keeps, and what it is expected to keep soon; all of it is in the index."""

    worker: WorkerId
    index: PrefixIndex
    names: set[PageHash] = field(default_factory=set[PageHash])
    number: int | None = None  # of the last change that was followed; None: the whole is asked for
    check: int = 0
    parts: dict[int, CacheHeld] = field(default_factory=dict[int, CacheHeld])  # of a whole that has not come entirely
    patience: int = 0  # words that are still let go until the whole is asked for again
    expected: OrderedDict[PageHash, None] = field(default_factory=OrderedDict[PageHash, None])  # the latest at the end

    def expect(self, names: Sequence[PageHash], most: int) -> None:
        """These will be there, as long as no more than `most` that came later are."""
        expected, known = self.expected, self.names
        for name in reversed(names):
            if name not in known:
                if name in expected:
                    expected.move_to_end(name)
                else:
                    expected[name] = None
        self.index.add(self.worker, names)
        while len(self.expected) > most:
            name, _ = self.expected.popitem(last=False)
            if name not in self.names:  # it was told meanwhile
                self.index.drop(self.worker, (name,))

    def change(self, message: CacheChanged) -> None:
        added, removed = unpacked(message.added), unpacked(message.removed)
        self.names.difference_update(removed)
        self.names.update(added)
        for name in (*added, *removed):
            self.expected.pop(name, None)
        self.index.drop(self.worker, removed)
        self.index.add(self.worker, added)
        self.number, self.check = message.number, check_of(removed, check_of(added, self.check))

    def replace(self, message: CacheHeld) -> bool:
        """Takes the whole, once its last part is here; whether it is."""
        if any(each.number != message.number for each in self.parts.values()):
            self.parts.clear()
        self.parts[message.part] = message
        if len(self.parts) < message.num_parts:
            return False
        before = self.names
        self.names = {name for part in self.parts.values() for name in unpacked(part.names)}
        self.index.drop(self.worker, (name for name in before if name not in self.names and name not in self.expected))
        self.index.add(self.worker, self.names - before)
        self.number, self.check = message.number, check_of(self.names)
        self.parts.clear()
        return True


class PrefixDirectory:
    """What is known of one tier of the workers that are followed; of others, nothing."""

    def __init__(self, tier: Tier = Tier.HBM) -> None:
        self.tier, self.index = tier, PrefixIndex()
        self._known: dict[WorkerId, KnownCache] = {}
        self._to_ask: list[WorkerId] = []

    def follow(self, config: WorkerConfig) -> None:
        """The worker has joined, and nothing is known of what it keeps."""
        if config.prefix_caching and config.pages_of(self.tier):
            self._begin(config.worker)
            self._lose(config.worker)

    def forget(self, worker: WorkerId) -> None:
        """It is gone, and its pages with it."""
        known = self._known.pop(worker, None)
        if known is not None:
            self.index.drop(worker, (*known.names, *known.expected))

    def _begin(self, worker: WorkerId) -> None:
        """As if it kept nothing."""
        self.forget(worker)
        self._known[worker] = KnownCache(worker, self.index)

    def follows(self, worker: WorkerId) -> bool:
        return worker in self._known

    def to_ask(self) -> list[WorkerId]:
        """Workers that are to be asked for the whole; each is returned once."""
        found, self._to_ask = self._to_ask, []
        return found

    # ------------------------------------------------------------ what is there

    def cached_tokens(self, config: WorkerConfig, names: Sequence[PageHash]) -> int:
        """Leading tokens of a prompt with these pages that are thought to be there."""
        known = self._known.get(config.worker)
        if known is None:
            return 0
        kept, expected = known.names, known.expected
        for at, name in enumerate(names):
            if name not in kept and name not in expected:
                return at * config.page_size
        return len(names) * config.page_size

    def told(self, worker: WorkerId) -> Set[PageHash]:
        """What the worker has said that it keeps."""
        known = self._known.get(worker)
        return NO_NAMES if known is None else known.names

    def sent(self, config: WorkerConfig, names: Sequence[PageHash]) -> None:
        """A prompt with these pages is computed there."""
        known = self._known.get(config.worker)
        if known is not None:
            known.expect(names, config.pages_of(self.tier))

    # ------------------------------------------------------------ what workers say

    def hear(self, config: WorkerConfig, message: CacheChanged | CacheHeld) -> None:
        """Raises SenselessWord where the worker would keep more than it has."""
        known = self._known.get(config.worker)
        if known is None:
            return
        if isinstance(message, CacheHeld):
            if (known.number is None or message.number >= known.number) and known.replace(message):
                self._check_size(config, known)
        elif known.number is None:
            self._wait(config.worker, known)
        else:
            self._follow_change(config, known, message)

    def _follow_change(self, config: WorkerConfig, known: KnownCache, message: CacheChanged) -> None:
        """The next change, or one that was heard before; from any other it follows that something was missed."""
        if known.number is not None and message.number == known.number + 1:
            known.change(message)
        if (message.number, message.check) == (known.number, known.check):
            self._check_size(config, known)
        else:
            self._lose(config.worker)

    def _check_size(self, config: WorkerConfig, known: KnownCache) -> None:
        most = config.pages_of(self.tier)
        if len(known.names) > most:
            self._begin(config.worker)
            raise SenselessWord(f"{config.worker} keeps {len(known.names)} pages for their content, it has {most}")

    def found(self, config: WorkerConfig, names: Sequence[PageHash], cached_tokens: int) -> None:
        """The worker looked a prompt up, of which it could have read these pages, and found so many tokens."""
        known = self._known.get(config.worker)
        if known is None:
            return
        told = next((at for at, name in enumerate(names) if name not in known.names), len(names)) * config.page_size
        if known.number is not None and told > cached_tokens:
            self._lose(config.worker)
        elif known.number is None or told < cached_tokens:  # what it has found it may be about to tell
            self._wait(config.worker, known)

    def _wait(self, worker: WorkerId, known: KnownCache) -> None:
        """The question may have been lost, or the answer."""
        known.patience -= 1
        if known.patience <= 0:
            self._lose(worker)

    def _lose(self, worker: WorkerId) -> None:
        """What is known may be wrong: until the whole comes it is as good as any other guess."""
        known = self._known[worker]
        known.number, known.patience = None, AGAIN
        known.parts.clear()
        self._to_ask.append(worker)
