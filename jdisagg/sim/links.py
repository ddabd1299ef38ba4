"""Network ports that flows share fairly: pure arithmetic over bytes and seconds, no queue and no clock of its own.

A flow takes bandwidth at every port that it crosses (its source's way out, its destination's way in). Rates are
max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): the tightest port divides itself evenly, its flows
are settled, and so on with what is left.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.sim.device import Span


@dataclass(slots=True)
class Flow:
    """Bytes on their way. Between two changes of the network a flow's rate is constant, so its end is known."""

    ports: tuple[Hashable, ...]
    remaining_bytes: float
    rate: float = 0.0  # bytes a second
    end_s: float = math.inf

    def advance(self, now_s: float) -> None:
        """What is left at `now_s`, from the end as it was foreseen: a flow that is due has exactly nothing left."""
        if self.rate:
            self.remaining_bytes = 0.0 if self.rate == math.inf else max(0.0, self.end_s - now_s) * self.rate

    def settle(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self.end_s = now_s + (self.remaining_bytes / rate if rate < math.inf else 0.0)


class FairLinks:
    """All flows of a network. Ports that `bytes_per_s` does not name are never the bottleneck."""

    def __init__(self, bytes_per_s: Mapping[Hashable, float] | None = None) -> None:
        self.bytes_per_s = dict(bytes_per_s or {})
        self.flows: dict[Hashable, Flow] = {}
        assert all(rate > 0 for rate in self.bytes_per_s.values()), "a port has a bandwidth"

    def start(self, name: Hashable, ports: tuple[Hashable, ...], size_bytes: float, now_s: float) -> None:
        """A flow begins; everybody's share changes."""
        assert name not in self.flows, f"flow {name!r} is on its way already"
        self.flows[name] = Flow(tuple(port for port in ports if port in self.bytes_per_s), size_bytes)
        self._share(now_s)

    def stop(self, name: Hashable, now_s: float) -> None:
        """A flow ends before it is through."""
        del self.flows[name]
        self._share(now_s)

    @property
    def next_end_s(self) -> float:
        """When the next flow is through if nothing else begins; infinite where there is none."""
        return min((flow.end_s for flow in self.flows.values()), default=math.inf)

    def finish(self, now_s: float) -> list[Hashable]:
        """Takes out the flows that are through at `now_s`, in the order in which they began."""
        ended = [name for name, flow in self.flows.items() if flow.end_s <= now_s]
        for name in ended:
            del self.flows[name]
        if ended:
            self._share(now_s)
        return ended

    def _share(self, now_s: float) -> None:
        for flow in self.flows.values():
            flow.advance(now_s)
        left = {port: self.bytes_per_s[port] for flow in self.flows.values() for port in flow.ports}
        unsettled = list(self.flows.values())
        while unsettled:
            share, tightest = _tightest(unsettled, left)
            settled = [flow for flow in unsettled if tightest is None or tightest in flow.ports]
            for flow in settled:
                flow.settle(share, now_s)
                for port in flow.ports:
                    left[port] = max(0.0, left[port] - share)
            unsettled = [flow for flow in unsettled if tightest is not None and tightest not in flow.ports]


class DomainLinks(FairLinks):
    """Ports named (way, worker), and behind those of the workers of one place its uplink, named (way, place).

    Places lie within each other: a host, its rack, its pod. A flow crosses the uplinks of the places that only one of
    its ends stands in: what goes from one worker to another of the same host crosses their ports and no NIC.
    """

    def __init__(self, bytes_per_s: Mapping[Hashable, float], places: Mapping[Hashable, tuple[str, ...]]) -> None:
        """places: of each worker, the innermost first; their names are different."""
        super().__init__(bytes_per_s)
        self.places = dict(places)

    def start(self, name: Hashable, ports: tuple[Hashable, ...], size_bytes: float, now_s: float) -> None:
        (out, source), (into, destination) = cast(tuple[tuple[str, Hashable], ...], ports)
        left, entered = self.places.get(source, ()), self.places.get(destination, ())
        uplinks = [(out, place) for place in left if place not in entered]
        uplinks += [(into, place) for place in entered if place not in left]
        super().start(name, (*ports, *uplinks), size_bytes, now_s)


def _tightest(flows: list[Flow], left: Mapping[Hashable, float]) -> tuple[float, Hashable | None]:
    """The port that gives each of its flows least, and how much; (infinite, None) where no port limits any."""
    crossing: dict[Hashable, int] = {}
    for flow in flows:
        for port in flow.ports:
            crossing[port] = crossing.get(port, 0) + 1
    shares = [(left[port] / count, index, port) for index, (port, count) in enumerate(crossing.items())]
    share, _, port = min(shares, default=(math.inf, 0, None))
    return share, port


# KV on its way between workers in virtual time: parts take their places on shared links, and land.

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
