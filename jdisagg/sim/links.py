"""Network ports that flows share fairly: arithmetic over bytes and seconds, without queue or clock.

A flow takes bandwidth at every port that it crosses (its source's output, its destination's input). Rates are
max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): the tightest port divides itself evenly, its
flows are settled, and so on with the remaining capacity.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.sim.device import TimeSpan


@dataclass(slots=True)
class LinkTransfer:
    """A transfer in progress. Its rate is constant between two changes of the network, so its end is known."""

    ports: tuple[Hashable, ...]
    remaining_bytes: float
    rate: float = 0.0  # bytes per second
    end_s: float = math.inf

    def advance(self, now_s: float) -> None:
        """Updates the remaining bytes at `now_s` from the predicted end, so that a due flow has exactly none."""
        if self.rate:
            self.remaining_bytes = 0.0 if self.rate == math.inf else max(0.0, self.end_s - now_s) * self.rate

    def settle(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self.end_s = now_s + (self.remaining_bytes / rate if rate < math.inf else 0.0)


class FairLinks:
    """All flows of a network. Ports that `bytes_per_s` does not name are never the bottleneck."""

    def __init__(self, bytes_per_s: Mapping[Hashable, float] | None = None) -> None:
        self.bytes_per_s = dict(bytes_per_s or {})
        self.flows: dict[Hashable, LinkTransfer] = {}
        assert all(rate > 0 for rate in self.bytes_per_s.values()), "a port has a bandwidth"

    def start(self, name: Hashable, ports: tuple[Hashable, ...], size_bytes: float, now_s: float) -> None:
        """Starts a flow, which changes the shares of the others."""
        assert name not in self.flows, f"flow {name!r} is on its way already"
        self.flows[name] = LinkTransfer(tuple(port for port in ports if port in self.bytes_per_s), size_bytes)
        self._share(now_s)

    def stop(self, name: Hashable, now_s: float) -> None:
        """Ends a flow before it is complete."""
        del self.flows[name]
        self._share(now_s)

    @property
    def next_end_s(self) -> float:
        """Returns the time at which the next flow completes if nothing else starts; inf if there is none."""
        return min((flow.end_s for flow in self.flows.values()), default=math.inf)

    def finish(self, now_s: float) -> list[Hashable]:
        """Removes and returns the flows that are complete at `now_s`, in the order of their start."""
        ended = [name for name, flow in self.flows.items() if flow.end_s <= now_s]
        for name in ended:
            del self.flows[name]
        if ended:
            self._share(now_s)
        return ended

    def _share(self, now_s: float) -> None:
        for flow in self.flows.values():
            flow.advance(now_s)
        remaining = {port: self.bytes_per_s[port] for flow in self.flows.values() for port in flow.ports}
        unsettled = list(self.flows.values())
        while unsettled:
            share, tightest = _tightest(unsettled, remaining)
            settled = [flow for flow in unsettled if tightest is None or tightest in flow.ports]
            for flow in settled:
                flow.settle(share, now_s)
                for port in flow.ports:
                    remaining[port] = max(0.0, remaining[port] - share)
            unsettled = [flow for flow in unsettled if tightest is not None and tightest not in flow.ports]


class DomainLinks(FairLinks):
    """Ports named (direction, worker), and behind those of one domain's workers its uplink, named (direction, domain).
    Domains are nested: a host, its rack, its pod. A flow crosses the uplinks of the domains that contain only one of
    its ends: a flow between two workers of one host crosses their ports and no NIC."""

    def __init__(self, bytes_per_s: Mapping[Hashable, float], places: Mapping[Hashable, tuple[str, ...]]) -> None:
        """Sets up the ports. `places`: the domains of each worker, innermost first, with unique names."""
        super().__init__(bytes_per_s)
        self.places = dict(places)

    def start(self, name: Hashable, ports: tuple[Hashable, ...], size_bytes: float, now_s: float) -> None:
        (out, source), (into, destination) = cast(tuple[tuple[str, Hashable], ...], ports)
        source_domains, destination_domains = self.places.get(source, ()), self.places.get(destination, ())
        uplinks = [(out, domain) for domain in source_domains if domain not in destination_domains]
        uplinks += [(into, domain) for domain in destination_domains if domain not in source_domains]
        super().start(name, (*ports, *uplinks), size_bytes, now_s)


def _tightest(flows: list[LinkTransfer], left: Mapping[Hashable, float]) -> tuple[float, Hashable | None]:
    """Returns the smallest share of any port and that port; (inf, None) if no port limits a flow."""
    crossing: dict[Hashable, int] = {}
    for flow in flows:
        for port in flow.ports:
            crossing[port] = crossing.get(port, 0) + 1
    shares = [(left[port] / count, index, port) for index, (port, count) in enumerate(crossing.items())]
    share, _, port = min(shares, default=(math.inf, 0, None))
    return share, port


# KV transfers between workers in virtual time: parts share the links and arrive.

NETWORK = WorkerId("network")


@dataclass(frozen=True, slots=True)
class PartPackedEvent:
    """An event: a part of KV is packed and its flow starts."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class TransferDueEvent:
    """An event: a flow may be complete; it is ignored if the network has changed since."""

    version: int


class TransferNetwork:
    """KV parts in transfer over `links`, with ports ("out" | "in", worker); `latency_s` is added to each part."""

    def __init__(self, links: FairLinks, latency_s: float) -> None:
        self._links, self._latency_s = links, latency_s
        self._version = 0
        self._sent_s: dict[KVTransfer, float] = {}

    def start(self, transfer: KVTransfer, size_bytes: float, now_s: float) -> None:
        self._sent_s[transfer] = now_s
        ports = (("out", transfer.source), ("in", transfer.destination))
        self._links.start(transfer, ports, size_bytes, now_s)

    def is_void(self, event: TransferDueEvent) -> bool:
        return event.version != self._version

    def landed(self, now_s: float) -> Iterator[tuple[KVTransfer, TimeSpan]]:
        """Yields the completed parts, with the time each was sent and arrives."""
        for done in self._links.finish(now_s):
            transfer = cast(KVTransfer, done)
            yield transfer, TimeSpan(self._sent_s.pop(transfer), now_s + self._latency_s)
        self._version += 1

    def lose(self, worker: WorkerId, now_s: float) -> tuple[float, TransferDueEvent] | None:
        """Stops the flows from and to a lost worker; returns the next completion as `next_done`."""
        for transfer in [each for each in self._sent_s if worker in (each.source, each.destination)]:
            self._links.stop(transfer, now_s)
            del self._sent_s[transfer]
        self._version += 1
        return self.next_done()

    def next_done(self) -> tuple[float, TransferDueEvent] | None:
        return (self._links.next_end_s, TransferDueEvent(self._version)) if self._links.flows else None
