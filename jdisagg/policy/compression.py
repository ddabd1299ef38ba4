"""`--transfer_compress`: what a part's numbers travel as.

Quantising pays where the link needs longer for the bytes that it saves than the devices need to quantise. What packing
a page costs each way is measured once, before the first request; what the link takes is learnt from every handoff.
What cannot be taken as compressed (broken on the way, or a layer that lost more than the bound) is shipped again raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jdisagg.core.events import WireCost
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Compress, WorkerConfig
from jdisagg.policy.streaming import Fit

GAIN = 1.1  # a wire is left for another only where that is faster by this factor


def choose_wire(costs: Sequence[WireCost], link_page_s: float) -> str:
    """The wire whose pages arrive soonest. costs: raw among them; link_page_s: seconds the link takes a raw page."""
    raw = next(cost for cost in costs if cost.wire == RAW)
    seconds = {cost.wire: cost.pack_s + link_page_s * cost.page_bytes / raw.page_bytes for cost in costs}
    best = min(seconds, key=lambda wire: seconds[wire])
    return best if seconds[best] * GAIN < seconds[RAW] else RAW


class Wires:
    """What one prefill worker ships in, and what it has learnt of its links."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.link = Fit(part_s=5e-4, page_s=1e-4)  # a page here is a raw page's bytes
        self.costs: tuple[WireCost, ...] = ()

    def measured(self, costs: tuple[WireCost, ...]) -> None:
        self.costs = costs

    def shipped(self, parts: Iterable[KVTransfer], seconds: float) -> None:
        """These parts, shipped once each, were on the wire for `seconds` in all."""
        sizes = [self._raw_pages(part) for part in parts]
        if sizes and seconds > 0:
            self.link.learn(len(sizes), sum(sizes), seconds)

    def choose(self) -> str:
        """What the next part is to travel as."""
        if self.config.compress is not Compress.AUTO:
            return RAW if self.config.compress is Compress.NONE else self.config.compress.value
        return choose_wire(self.costs, self.link.page_s) if self.costs else RAW

    def _raw_pages(self, part: KVTransfer) -> float:
        """How many raw pages of all layers would have as many bytes."""
        sizes = {cost.wire: cost.page_bytes for cost in self.costs}
        share = sizes[part.wire] / sizes[RAW] if part.wire in sizes else 1.0
        if part.layers is not None:
            share *= (part.layers[1] - part.layers[0]) / self.config.layer_groups[-1][1]
        return share * len(part.source_pages)

    def describe(self) -> str:
        """What was learnt, for people."""
        costs = ", ".join(f"{cost.wire} {1e3 * cost.pack_s:.3g} ms" for cost in self.costs)
        return f"a raw page {1e3 * self.link.page_s:.3g} ms on the link; packing a page: {costs or 'not measured'}"
