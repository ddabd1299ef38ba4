"""How fast KV travels between two workers, as transfers that ended tell: by class of link, and by pair.

A pair that few transfers were seen of is taken to be like its class; a class that none were seen of, like its prior,
as much faster or slower as the other classes turned out to be. Who knows nothing still knows that near is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jdisagg.core.labels import NOWHERE, SHARED_BY, Labels, LinkClass, link_class
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig

PRIOR = {  # bytes a second, one way: NVLink or ICI, PCIe or shared memory, and networks, as one stream gets them
    LinkClass.PROCESS: 200e9,
    LinkClass.HOST: 100e9,
    LinkClass.RACK: 25e9,
    LinkClass.POD: 10e9,
    LinkClass.BEYOND: 2.5e9,
}
KEEP = 0.9  # of what was known, with each transfer
FEW = 3.0  # transfers of a pair that weigh as much as all that is known of its class
MOST_PAIRS = 1 << 16  # that are remembered; the one that was seen first goes first
TOKEN_BYTES = 1 << 17  # of KV, where a worker does not say

Pair = tuple[WorkerId, WorkerId]


@dataclass(slots=True)
class RateEstimate:
    """Decayed sums over the transfers of one kind."""

    transfers: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: float, seconds: float) -> None:
        """Adds a transfer; earlier ones lose weight."""
        self.transfers = KEEP * self.transfers + 1
        self.size_bytes = KEEP * self.size_bytes + size_bytes
        self.seconds = KEEP * self.seconds + seconds

    @property
    def byte_s(self) -> float:
        """Returns seconds per byte."""
        return self.seconds / self.size_bytes


class LinkSpeeds:
    """Seconds per byte of every link, measured or guessed."""

    def __init__(self) -> None:
        self._measured: dict[LinkClass, RateEstimate] = {}
        self._pairs: dict[Pair, RateEstimate] = {}
        self._classes: dict[LinkClass, float] = {}  # seconds per byte of each class
        self._possible = frozenset(LinkClass)
        self._class_of: dict[tuple[Labels, Labels], LinkClass] = {}
        self._least = 0.0
        self._update()

    def learn(self, source: WorkerConfig, destination: WorkerConfig, size_bytes: float, seconds: float) -> None:
        """Learns from a transfer; one without bytes or seconds is ignored."""
        if size_bytes <= 0 or not 0 < seconds < math.inf:
            return
        self._measured.setdefault(self._class(source, destination), RateEstimate()).add(size_bytes, seconds)
        self._pairs.setdefault((source.worker, destination.worker), RateEstimate()).add(size_bytes, seconds)
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        self._update()

    def forget(self, worker: WorkerId) -> None:
        """Removes the links of a worker; what they taught of their classes stays."""
        self._pairs = {pair: known for pair, known in self._pairs.items() if worker not in pair}
        self._update()

    def restrict(self, sources: Iterable[WorkerConfig], destinations: Iterable[WorkerConfig]) -> None:
        """Sets the workers between which KV travels, so that `least_byte_s` is no lower than their nearest class."""
        ends = [{each.labels for each in end} for end in (sources, destinations)]
        found = {LinkClass.BEYOND}  # workers without a common place
        for kind, names in SHARED_BY.items():
            for name in names:
                first, second = ({getattr(each, name) for each in end} - {""} for end in ends)
                if first & second:
                    found.add(kind)
        self._possible = frozenset(found)
        self._class_of.clear()
        self._update()

    def class_byte_s(self, kind: LinkClass) -> float:
        """Returns seconds per byte of a link of this class."""
        return self._classes[kind]

    def byte_s(self, source: WorkerConfig, destination: WorkerConfig) -> float:
        """Returns seconds per byte from one worker to the other."""
        like = self._classes[self._class(source, destination)]
        known = self._pairs.get((source.worker, destination.worker))
        return like if known is None else _between(like, known)

    @property
    def least_byte_s(self) -> float:
        """Returns a lower bound of all links."""
        return self._least

    @property
    def is_uniform(self) -> bool:
        """Returns True if all links are of one class and none was measured."""
        return len(self._possible) == 1 and not self._pairs

    def _class(self, source: WorkerConfig, destination: WorkerConfig) -> LinkClass:
        if source.labels is NOWHERE or destination.labels is NOWHERE:
            return LinkClass.BEYOND
        pair = source.labels, destination.labels
        found = self._class_of.get(pair)
        if found is None:
            if len(self._class_of) >= MOST_PAIRS:
                self._class_of.clear()
            found = self._class_of[pair] = link_class(*pair)
        return found

    def _update(self) -> None:
        scale = self._scale()
        for kind in LinkClass:
            known = self._measured.get(kind)
            self._classes[kind] = scale / PRIOR[kind] if known is None else known.byte_s
        least = min(self._classes[kind] for kind in self._possible)
        self._least = min([least, *[known.byte_s for known in self._pairs.values()]])

    def _scale(self) -> float:
        """Returns how many times slower than their priors links turned out, in the geometric mean of their classes."""
        ratios = [math.log(known.byte_s * PRIOR[kind]) for kind, known in self._measured.items()]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _between(like: float, known: RateEstimate) -> float:
    return (FEW * like + known.transfers * known.byte_s) / (FEW + known.transfers)


def kv_bytes(destination: WorkerConfig, tokens: float) -> float:
    """Returns the bytes of the KV of so many tokens."""
    return tokens * (destination.kv_token_bytes or TOKEN_BYTES)
