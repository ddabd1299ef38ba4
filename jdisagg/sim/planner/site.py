"""Where candidates are built: the sizes all workers share, what plans cost there, and each device's port."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from jdisagg.sim.fleet import CostOf, Fleet, Sizes, fleet
from jdisagg.sim.links import FairLinks
from jdisagg.sim.planner.space import Candidate


@dataclass(frozen=True, slots=True)
class Site:
    """A worker's port is as wide as its devices' together. device_bytes_per_s: one way; 0: KV takes no time."""

    sizes: Sizes
    cost_of: CostOf
    device_bytes_per_s: float = 0.0

    def build(self, candidate: Candidate) -> Fleet:
        """Raises ConfigError where weights or a page have no room."""
        sizes = replace(self.sizes, chunk_tokens=candidate.chunk_tokens, transfer=candidate.transfer)
        ports: dict[Hashable, float] = {
            (way, place.worker): self.device_bytes_per_s * len(place.device_ids)
            for place in candidate.mesh.workers()
            for way in ("out", "in")
            if self.device_bytes_per_s
        }
        return replace(fleet(candidate.mesh, sizes, self.cost_of), links=FairLinks(ports))
