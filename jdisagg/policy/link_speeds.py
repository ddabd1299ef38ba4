"""How fast KV travels between two workers, as transfers that ended tell: by class of link, and by pair.

A pair that few transfers were seen of is taken to be like its class; a class that none were seen of, like its prior,
as much faster or slower as the other classes turned out to be. Who knows nothing still knows that near is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from jdisagg.core.labels import LinkClass, link_class
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig

# Bytes a second, one way: NVLink or ICI, PCIe or shared memory, and networks, as one stream gets them.
PRIOR = MappingProxyType(
    {
        LinkClass.PROCESS: 200e9,
        LinkClass.HOST: 100e9,
        LinkClass.RACK: 25e9,
        LinkClass.POD: 10e9,
        LinkClass.BEYOND: 2.5e9,
    }
)
KEEP = 0.9  # of what was known, with each transfer
FEW = 3.0  # transfers of a pair that weigh as much as all that is known of its class
MOST_PAIRS = 1 << 16  # that are remembered; the one that was seen first goes first
TOKEN_BYTES = 1 << 17  # of KV, where a worker does not say

Pair = tuple[WorkerId, WorkerId]


@dataclass(slots=True)
class Seen:
    """Transfers of one kind, the latest counting most: how many, and their bytes and seconds."""

    transfers: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: float, seconds: float) -> None:
        self.transfers = KEEP * self.transfers + 1
        self.size_bytes = KEEP * self.size_bytes + size_bytes
        self.seconds = KEEP * self.seconds + seconds

    @property
    def byte_s(self) -> float:
        return self.seconds / self.size_bytes


class LinkSpeeds:
    """Seconds a byte of every link, measured or guessed."""

    def __init__(self) -> None:
        self._classes: dict[LinkClass, Seen] = {}
        self._pairs: dict[Pair, Seen] = {}
        self._least: float | None = None

    def learn(self, source: WorkerConfig, destination: WorkerConfig, size_bytes: float, seconds: float) -> None:
        """So many bytes took so long; what took no time, or held nothing, tells nothing."""
        if size_bytes <= 0 or not 0 < seconds < math.inf:
            return
        self._classes.setdefault(link_class(source.labels, destination.labels), Seen()).add(size_bytes, seconds)
        self._pairs.setdefault((source.worker, destination.worker), Seen()).add(size_bytes, seconds)
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        self._least = None

    def forget(self, worker: WorkerId) -> None:
        """It is gone; what its links taught of their classes stays."""
        self._pairs = {pair: seen for pair, seen in self._pairs.items() if worker not in pair}
        self._least = None

    def class_byte_s(self, kind: LinkClass) -> float:
        """Seconds a byte of a link of this class."""
        return self._classes[kind].byte_s if kind in self._classes else self._scale() / PRIOR[kind]

    def byte_s(self, source: WorkerConfig, destination: WorkerConfig) -> float:
        """Seconds a byte from the one to the other."""
        like = self.class_byte_s(link_class(source.labels, destination.labels))
        seen = self._pairs.get((source.worker, destination.worker))
        return like if seen is None else _between(like, seen)

    @property
    def least_byte_s(self) -> float:
        """No link is taken to be faster."""
        if self._least is None:
            classes = [self.class_byte_s(kind) for kind in LinkClass]
            self._least = min([*classes, *[seen.byte_s for seen in self._pairs.values()]])
        return self._least

    def _scale(self) -> float:
        """How many times slower than their priors links turned out to be, in the geometric mean of their classes."""
        ratios = [math.log(seen.byte_s * PRIOR[kind]) for kind, seen in self._classes.items()]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _between(like: float, seen: Seen) -> float:
    return (FEW * like + seen.transfers * seen.byte_s) / (FEW + seen.transfers)


def kv_bytes(destination: WorkerConfig, tokens: float) -> float:
    """Of the KV of so many tokens."""
    return tokens * (destination.kv_token_bytes or TOKEN_BYTES)
