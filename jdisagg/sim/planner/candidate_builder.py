"""Where candidates are built: of constants, with a port for each device, or of a profile of the user's own devices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from jdisagg.core.profile import Profile
from jdisagg.sim.cluster_spec import ClusterSpec, CostOf, Sizes, cluster_spec
from jdisagg.sim.links import FairLinks
from jdisagg.sim.measured import cluster_spec_of
from jdisagg.sim.planner.placement import PAIRING, paired, topology_of
from jdisagg.sim.planner.space import Candidate


@dataclass(frozen=True, slots=True)
class CandidateBuilder:
    """A worker's port is as wide as its devices' together. device_bytes_per_s: one way; 0: KV takes no time."""

    sizes: Sizes
    cost_of: CostOf
    device_bytes_per_s: float = 0.0
    inside_bytes_per_s: float = 0.0  # so, within a fast domain

    def build(self, candidate: Candidate) -> ClusterSpec:
        """Raises ConfigError where weights or a page have no room."""
        sizes = replace(self.sizes, chunk_tokens=candidate.chunk_tokens, transfer=candidate.transfer)
        if candidate.domain_devices:
            topology = topology_of(paired(candidate.mesh, candidate.domain_devices), self.device_bytes_per_s)
            given = cluster_spec(candidate.mesh, sizes, self.cost_of, hosts=topology)
            return replace(
                given, links=topology.links(self._ports(candidate, self.inside_bytes_per_s)), routing=PAIRING
            )
        ports = self._ports(candidate, self.device_bytes_per_s)
        return replace(cluster_spec(candidate.mesh, sizes, self.cost_of), links=FairLinks(ports))

    def _ports(self, candidate: Candidate, device_bytes_per_s: float) -> dict[Hashable, float]:
        return {
            (way, place.worker): device_bytes_per_s * len(place.device_ids)
            for place in candidate.mesh.workers()
            for way in ("out", "in")
            if device_bytes_per_s
        }

    def half_the_link(self) -> CandidateBuilder:
        return replace(self, device_bytes_per_s=self.device_bytes_per_s / 2)


@dataclass(frozen=True, slots=True)
class ProfiledCandidateBuilder:
    """Workers as the profile has them, chunks included: only meshes of its shapes can be built."""

    profile: Profile
    link_share: float = 1.0

    def build(self, candidate: Candidate) -> ClusterSpec:
        """Raises ConfigError for shapes that were not timed."""
        given = cluster_spec_of(self.profile, candidate.mesh, candidate.transfer)
        ports = {port: self.link_share * rate for port, rate in given.links.bytes_per_s.items()}
        return replace(given, links=FairLinks(ports))

    def half_the_link(self) -> ProfiledCandidateBuilder:
        return replace(self, link_share=self.link_share / 2)

    @property
    def chunk_tokens(self) -> int:
        """Of its prefill workers."""
        return max(pool.config.prefill_buckets[-1] for pool in self.profile.pools)

    @property
    def max_model_len(self) -> int:
        return min(pool.config.max_model_len for pool in self.profile.pools)
