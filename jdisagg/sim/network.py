"""KV on its way between workers in virtual time: parts take their places on shared links, and land."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.sim.device import Span
from jdisagg.sim.links import FairLinks

NETWORK = WorkerId("network")


@dataclass(frozen=True, slots=True)
class PartPacked:
    """A part is packed: it takes its place on the network."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class FlowDone:
    """A flow may be through; of an earlier state of the network it is void."""

    version: int


class Network:
    """`links` are ports named ("out" | "in", worker); `latency_s` is of each part, besides its bytes."""

    def __init__(self, links: FairLinks, latency_s: float) -> None:
        self._links, self._latency_s = links, latency_s
        self._version = 0
        self._left_s: dict[KVTransfer, float] = {}

    def start(self, transfer: KVTransfer, size_bytes: float, now_s: float) -> None:
        self._left_s[transfer] = now_s
        ports = (("out", transfer.source), ("in", transfer.destination))
        self._links.start(transfer, ports, size_bytes, now_s)

    def is_void(self, event: FlowDone) -> bool:
        return event.version != self._version

    def landed(self, now_s: float) -> Iterator[tuple[KVTransfer, Span]]:
        """Parts that are through, and when each left and lands."""
        for done in self._links.finish(now_s):
            transfer = cast(KVTransfer, done)
            yield transfer, Span(self._left_s.pop(transfer), now_s + self._latency_s)
        self._version += 1

    def lose(self, worker: WorkerId, now_s: float) -> tuple[float, FlowDone] | None:
        """It is gone: nothing comes from it or reaches it. When the next flow is through, as `next_done`."""
        for transfer in [each for each in self._left_s if worker in (each.source, each.destination)]:
            self._links.stop(transfer, now_s)
            del self._left_s[transfer]
        self._version += 1
        return self.next_done()

    def next_done(self) -> tuple[float, FlowDone] | None:
        return (self._links.next_end_s, FlowDone(self._version)) if self._links.flows else None
