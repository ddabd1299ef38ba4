"""The router's directory of cached pages: which worker has which pages in which tier, and which worker may lend them.

A worker sends its changes with numbers. If one is missing, comes out of order or does not lead to the worker's
contents, the router asks for a snapshot; it also does when a worker joins, or finds fewer pages of a prompt than the
directory says (or more, repeatedly). The directory adds pages that are expected: those of prompts that were sent to a
worker and are still being computed. A wrong entry costs time and no token: a prompt is computed, or its KV sent,
although another worker has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

from jdisagg.core.errors import SenselessWord
from jdisagg.core.messages import MOST_HOLDERS, CacheChanged, CacheHeld, Holder, Priced
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.fetch import COMPUTED
from jdisagg.policy.cache.prefix_cache import PageHash, check_of, unpacked
from jdisagg.policy.router.routing import FetchEstimate


class PrefixIndex:
    """The workers that have each page, so that few of many workers are considered for a prompt.

    Workers are kept in tuples: nearly all pages have one, and a set of one takes four times the memory."""

    def __init__(self) -> None:
        self._keepers: dict[PageHash, tuple[WorkerId, ...]] = {}

    def keepers(self, name: PageHash) -> tuple[WorkerId, ...]:
        return self._keepers.get(name, ())

    def add(self, worker: WorkerId, names: Iterable[PageHash]) -> None:
        keepers, alone = self._keepers, (worker,)
        for name in names:
            before = keepers.get(name)
            if before is None:
                keepers[name] = alone
            elif worker not in before:
                keepers[name] = (*before, worker)

    def drop(self, worker: WorkerId, names: Iterable[PageHash]) -> None:
        for name in names:
            rest = tuple(each for each in self._keepers.get(name, ()) if each != worker)
            if rest:
                self._keepers[name] = rest
            else:
                self._keepers.pop(name, None)

    def nearest(self, names: Sequence[PageHash], most: int, turn: int) -> list[WorkerId]:
        """Returns up to `most` workers that have a prefix of these pages, longest prefixes first; of too many with the
        same prefix, those from index `turn` on, in rotation.

        It looks up the longest prefix that a worker has, half of it, a quarter, and so on: a worker that has a page has
        those before it, which are evicted later.
        """
        found, depth = dict[WorkerId, None](), self._longest(names)
        while depth and len(found) < most:
            keepers = self._keepers.get(names[depth - 1], ())
            first = turn % len(keepers) if len(keepers) > most else 0
            for worker in (*keepers[first:], *keepers[:first])[:most]:
                found[worker] = None
            depth //= 2
        return list(found)[:most]

    def _longest(self, names: Sequence[PageHash]) -> int:
        """Returns the length of the longest prefix that a worker has, by bisection."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] in self._keepers else (low, middle - 1)
        return low


NO_NAMES: Set[PageHash] = frozenset()
AGAIN = 16  # words that tell nothing, as the whole has not come, until it is asked for again


@dataclass(slots=True)
class KnownCache:
    """The pages that one worker reported, and those that it is expected to have soon; all are in the index."""

    worker: WorkerId
    index: PrefixIndex
    names: set[PageHash] = field(default_factory=set[PageHash])
    number: int | None = None  # of the last change that was followed; None: the whole is asked for
    check: int = 0
    parts: dict[int, CacheHeld] = field(default_factory=dict[int, CacheHeld])  # of a whole that has not come entirely
    patience: int = 0  # words that are still let go until the whole is asked for again
    expected: OrderedDict[PageHash, None] = field(default_factory=OrderedDict[PageHash, None])  # the latest at the end

    def expect(self, names: Sequence[PageHash], most: int) -> None:
        """Adds expected pages; of all expected ones the latest `most` are kept."""
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
        """Takes one part of a snapshot; returns True if the snapshot is complete and replaces the contents."""
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
    """The cached pages of one tier of all followed workers."""

    def __init__(self, tier: Tier = Tier.HBM) -> None:
        self.tier, self.index = tier, PrefixIndex()
        self._known: dict[WorkerId, KnownCache] = {}
        self._to_ask: list[WorkerId] = []

    def follow(self, config: WorkerConfig) -> None:
        """Starts to follow a worker that joined, and asks it for a snapshot."""
        if config.prefix_caching and config.pages_of(self.tier):
            self._begin(config.worker)
            self._lose(config.worker)

    def forget(self, worker: WorkerId) -> None:
        """Removes a worker with its pages."""
        known = self._known.pop(worker, None)
        if known is not None:
            self.index.drop(worker, (*known.names, *known.expected))

    def _begin(self, worker: WorkerId) -> None:
        """Starts again with no known pages of the worker."""
        self.forget(worker)
        self._known[worker] = KnownCache(worker, self.index)

    def follows(self, worker: WorkerId) -> bool:
        return worker in self._known

    def to_ask(self) -> list[WorkerId]:
        """Returns the workers to ask for a snapshot, each once."""
        found, self._to_ask = self._to_ask, []
        return found

    # ------------------------------------------------------------ what is there

    def cached_tokens(self, config: WorkerConfig, names: Sequence[PageHash]) -> int:
        """Returns the number of leading tokens of a prompt with these pages that the worker is believed to have."""
        known = self._known.get(config.worker)
        if known is None:
            return 0
        kept, expected = known.names, known.expected
        for at, name in enumerate(names):
            if name not in kept and name not in expected:
                return at * config.page_size
        return len(names) * config.page_size

    def told(self, worker: WorkerId) -> Set[PageHash]:
        """Returns the pages that the worker reported."""
        known = self._known.get(worker)
        return NO_NAMES if known is None else known.names

    def sent(self, config: WorkerConfig, names: Sequence[PageHash]) -> None:
        """Records that a prompt with these pages is computed by the worker."""
        known = self._known.get(config.worker)
        if known is not None:
            known.expect(names, config.pages_of(self.tier))

    # ------------------------------------------------------------ what workers say

    def hear(self, config: WorkerConfig, message: CacheChanged | CacheHeld) -> None:
        """Applies a change or a part of a snapshot; raises SenselessWord if the worker reports more pages than it
        has."""
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
        """Applies the next change; a repeated one is ignored, and any other means that a change was missed."""
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
        """Compares the directory with the number of tokens that the worker found of a prompt with these pages."""
        known = self._known.get(config.worker)
        if known is None:
            return
        told = next((at for at, name in enumerate(names) if name not in known.names), len(names)) * config.page_size
        if known.number is not None and told > cached_tokens:
            self._lose(config.worker)
        elif known.number is None or told < cached_tokens:  # what it has found it may be about to tell
            self._wait(config.worker, known)

    def _wait(self, worker: WorkerId, known: KnownCache) -> None:
        """Waits for the snapshot, and asks for it again after `AGAIN` messages: request or answer may be lost."""
        known.patience -= 1
        if known.patience <= 0:
            self._lose(worker)

    def _lose(self, worker: WorkerId) -> None:
        """Asks for a snapshot, because the known pages may be wrong; they serve as a guess until it arrives."""
        known = self._known[worker]
        known.number, known.patience = None, AGAIN
        known.parts.clear()
        self._to_ask.append(worker)


MANY_LENDERS = 16  # lenders from which on a routing does not weigh what they could lend to whom
OWN = (Tier.HBM, Tier.DRAM, Tier.DISK)


class TierDirectory:
    """The directories of all tiers, the workers that lend pages, and the prices that workers report."""

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
        """Passes the message to the directory of its tier, see `PrefixDirectory.hear`."""
        directory = self.by_tier.get(message.tier)
        if directory is not None:
            directory.hear(config, message)

    def to_ask(self) -> list[WorkerId]:
        """Returns the workers to ask for snapshots, each once."""
        return list(dict.fromkeys(worker for directory in self.by_tier.values() for worker in directory.to_ask()))

    def hear_prices(self, worker: WorkerId, message: Priced) -> None:
        if self.hbm.follows(worker):
            self.prices[worker] = {source: (fixed, each) for source, fixed, each in message.lines}

    def seconds(self, worker: WorkerId, source: str, pages: int) -> float | None:
        """Returns the seconds that so many pages from the source cost the worker; None if it did not report that."""
        line = self.prices.get(worker, {}).get(source)
        return None if line is None else line[0] + pages * line[1]

    # ------------------------------------------------------------ what a worker could fetch

    def reach(self, config: WorkerConfig, names: Sequence[PageHash], held: int) -> FetchEstimate | None:
        """Returns the source that saves this worker most time behind its `held` pages; None if none does."""
        best, saved_s = None, 0.0
        for source, stop in self._sources(config, names, held):
            fetched_s = self.seconds(config.worker, source, stop - held)
            computed_s = self.seconds(config.worker, COMPUTED, stop - held)
            if fetched_s is not None and computed_s is not None and computed_s - fetched_s > saved_s:
                saved_s = computed_s - fetched_s
                best = FetchEstimate(source, stop * config.page_size, fetched_s / computed_s)
        return best

    def _sources(self, config: WorkerConfig, names: Sequence[PageHash], held: int) -> Iterator[tuple[str, int]]:
        """Yields each source with the index behind the last page that it has."""
        if held >= len(names) or COMPUTED not in self.prices.get(config.worker, {}):
            return
        for tier in OWN[1:]:
            stop = run_of(names, held, (self.by_tier[tier].told(config.worker),))
            if stop > held:
                yield tier.value, stop
        for each in self.holders(config, names) if len(self._lenders) <= MANY_LENDERS else ():
            if each.first <= held < each.stop:
                yield each.worker, each.stop

    # ------------------------------------------------------------ who may lend

    def holders(self, asker: WorkerConfig, names: Sequence[PageHash]) -> tuple[Holder, ...]:
        """Returns other workers that have pages of this prompt which the asker lacks, those with most pages first."""
        if asker.worker not in self._lenders:
            return ()
        held = run_of(names, 0, (self.hbm.told(asker.worker),))
        able = [self._lenders[each] for each in self._with(names[held : held + 1]) if each in self._lenders]
        found = [self._holder(each, names, held) for each in able if _alike(each, asker)]
        found = [each for each in found if each.stop > held]
        return tuple(sorted(found, key=lambda each: (-each.stop, each.worker))[:MOST_HOLDERS])

    def _with(self, names: Sequence[PageHash]) -> Iterable[WorkerId]:
        """Returns the workers that have, or are expected to have, one of these pages in any tier, each once."""
        kept = (directory.index.keepers(name) for name in names for directory in self.by_tier.values())
        return dict.fromkeys(worker for workers in kept for worker in workers)

    def _holder(self, lender: WorkerConfig, names: Sequence[PageHash], first: int) -> Holder:
        """Returns the lender's run of pages around `first`, because pages that the asker is believed to have may be
        gone."""
        kept = [directory.told(lender.worker) for directory in self.by_tier.values()]
        stop = run_of(names, first, kept)
        while stop > first > 0 and _has(names[first - 1], kept):
            first -= 1
        return Holder(lender.worker, first, stop)


def run_of(names: Sequence[PageHash], first: int, kept: Iterable[Set[PageHash]]) -> int:
    """Returns the index behind the run of pages from `first` on that are in any of these sets."""
    sets = tuple(kept)
    return first + sum(1 for _ in takewhile(lambda at: _has(names[at], sets), range(first, len(names))))


def _has(name: PageHash, kept: Iterable[Set[PageHash]]) -> bool:
    return any(name in each for each in kept)


def _alike(lender: WorkerConfig, asker: WorkerConfig) -> bool:
    """Returns True if two different workers store pages in the same form."""
    same = (lender.page_size, lender.tier_wire, lender.digests) == (asker.page_size, asker.tier_wire, asker.digests)
    return same and lender.worker != asker.worker
