"""The candidates for a number of devices: meshes, chunk sizes and transfer modes worth trying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from jdisagg.core.errors import ConfigError
from jdisagg.core.labels import Labels
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, Schedule, WorkerMesh
from jdisagg.core.profile import Profile
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.sim.cluster_spec import FREE_LINK, ClusterSpec, CostOf, PortOf, Topology, cluster_spec
from jdisagg.sim.links import FairLinks
from jdisagg.sim.measured import cluster_spec_of

# Which workers share fast domains (nodes, slices), so that KV uses fast links.
#
# DistServe (Zhong et al., OSDI 2024) has placements for two kinds of cluster. If links between nodes are as fast as
# others (algorithm 1, high node-affinity), workers can be anywhere. If they are slow (algorithm 2, low node-affinity),
# each pair stays within a node, or each pair of equal stages does. Here both are candidates, and their simulated
# goodput decides.

PAIRING = Routing.CACHE_AWARE  # keeps requests on pairs of one domain as long as that is faster


@dataclass(frozen=True, slots=True)
class DomainGroup:
    """Workers that share a domain; or, with equal stages together, as many domains as they have stages."""

    name: str
    workers: tuple[WorkerId, ...]
    devices: int
    domains: int = 1

    def __str__(self) -> str:
        where = "one domain" if self.domains == 1 else f"{self.domains} domains, equal stages together"
        return f"{', '.join(self.workers)} in {where}"


def paired(mesh: MeshSpec, domain_devices: int) -> tuple[DomainGroup, ...]:
    """Distributes prefill and decode workers over as few units as fit their domains. Returns () if not even one unit
    with one worker of each role fits."""
    prefills = [place for place in mesh.workers() if place.role is Role.PREFILL]
    decodes = [place for place in mesh.workers() if place.role is Role.DECODE]
    for count in range(1, min(len(prefills), len(decodes)) + 1):
        assigned = [(*prefills[unit::count], *decodes[unit::count]) for unit in range(count)]
        units = [_unit(f"domain-{number}", places, domain_devices) for number, places in enumerate(assigned)]
        fitting = tuple(unit for unit in units if unit is not None)
        if len(fitting) == count:
            return fitting
    return ()


def _unit(name: str, places: Sequence[WorkerMesh], domain_devices: int) -> DomainGroup | None:
    workers, devices = tuple(place.worker for place in places), sum(len(place.device_ids) for place in places)
    if devices <= domain_devices:
        return DomainGroup(name, workers, devices)
    stages = {place.pp for place in places}
    if len(stages) == 1 and sum(place.tp for place in places) <= domain_devices:
        return DomainGroup(name, workers, devices, stages.pop())
    return None


def topology_of(units: Sequence[DomainGroup], device_bytes_per_s: float) -> Topology:
    """Returns a topology with a location per unit, whose uplink is as wide as its devices' ports; 0: no limit."""
    labels = {worker: Labels(host=unit.name) for unit in units for worker in unit.workers}
    uplinks = {unit.name: device_bytes_per_s * unit.devices for unit in units if device_bytes_per_s}
    return Topology(labels, uplinks)


class Kind(StrEnum):
    """The architectures of a candidate."""

    SINGLE = "single"  # one worker of both roles
    REPLICATED = "replicated"  # several of them, chunks of prefill between decode steps
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """One configuration: a mesh, chunk size and transfer mode."""

    mesh: MeshSpec
    chunk_tokens: int
    transfer: TransferMode = TransferMode.CHUNK
    domain_devices: int = 0  # pairs are within fast domains of this many devices; 0: no constraint

    def __str__(self) -> str:
        ships = f", {self.transfer}" if self.kind is Kind.DISAGGREGATED else ""
        pairs = f", pairs within {self.domain_devices} devices" if self.domain_devices else ""
        return f"{self.mesh} (chunks of {self.chunk_tokens}{ships}{pairs})"

    @property
    def kind(self) -> Kind:
        roles = {pool.role for pool in self.mesh.pools}
        if Role.COLOCATED not in roles:
            return Kind.DISAGGREGATED
        return Kind.REPLICATED if sum(pool.count for pool in self.mesh.pools) > 1 else Kind.SINGLE

    @property
    def devices(self) -> int:
        return sum(devices_of(pool) for pool in self.mesh.pools)

    def part(self, least_devices: int = 0) -> tuple[PlanCandidate, int]:
        """Returns a cluster of the same proportions with at least `least_devices`, and how many of it make this one. A
        smaller part evens out bursts less over its workers, so it does a little worse than its share."""
        copies = math.gcd(*(pool.count for pool in self.mesh.pools))
        parts = next(
            parts
            for parts in range(copies, 0, -1)
            if copies % parts == 0 and (parts == 1 or self.devices // parts >= least_devices)
        )
        pools = tuple(replace(pool, count=pool.count // parts) for pool in self.mesh.pools)
        return replace(self, mesh=MeshSpec(pools)), parts


@dataclass(frozen=True, slots=True)
class CandidateSource:
    """The candidates for a number of devices.

    `fill`: candidates use as many of the devices as their shapes can; else any number of them. `domain_devices`:
    size of a fast domain (a node, a slice), 0: none; meshes whose pairs fit such domains are also tried with that
    constraint. `slice_devices`: the numbers of devices that a worker may have; empty: any. `host_devices`: devices
    of a host, 0: no limit; a larger worker has whole hosts, and only decode pipelines span them.
    """

    devices: int
    tps: tuple[int, ...] = (1, 2, 4, 8)
    pps: tuple[int, ...] = (1, 2, 4)
    chunks: tuple[int, ...] = (512, 1024, 2048, 4096)
    transfers: tuple[TransferMode, ...] = (TransferMode.CHUNK, TransferMode.LAYER, TransferMode.WHOLE)
    fill: bool = True
    domain_devices: int = 0
    schedules: tuple[Schedule, ...] = (Schedule.STAGES,)  # of decode pipelines
    prefill_pps: tuple[int, ...] = (1,)
    slice_devices: tuple[int, ...] = ()
    host_devices: int = 0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"{self.devices} devices: there must be at least 1")
        for name in ("tps", "pps", "chunks", "transfers", "schedules", "prefill_pps"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} to choose from among {self.devices} devices")

    def __iter__(self) -> Iterator[PlanCandidate]:
        """Yields the candidates with the first transfer mode; the others are tried on the leaders (`neighbours`)."""
        for mesh in [*self._colocated(), *self._disaggregated()]:
            for chunk in self.chunks:
                yield PlanCandidate(mesh, chunk, self.transfers[0])
                if self._has_paired_form(mesh):
                    yield PlanCandidate(mesh, chunk, self.transfers[0], self.domain_devices)

    def _has_paired_form(self, mesh: MeshSpec) -> bool:
        """Returns True if the mesh's pairs fit into the available domains."""
        units = paired(mesh, self.domain_devices) if self.domain_devices and len(mesh.pools) > 1 else ()
        return 0 < sum(unit.domains for unit in units) <= -(-self.devices // self.domain_devices)

    def neighbours(self, candidate: PlanCandidate) -> Iterator[PlanCandidate]:
        """Yields the same mesh with the other transfer modes, and with the next smaller and larger chunk size."""
        at = self.chunks.index(candidate.chunk_tokens)
        for chunk in (*self.chunks[max(0, at - 1) : at], *self.chunks[at + 1 : at + 2]):
            yield replace(candidate, chunk_tokens=chunk)
        if candidate.kind is Kind.DISAGGREGATED:
            for transfer in self.transfers:
                if transfer is not candidate.transfer:
                    yield replace(candidate, transfer=transfer)

    def _colocated(self) -> Iterator[MeshSpec]:
        for pool in self._shapes(Role.COLOCATED, self.devices):
            most = self.devices // devices_of(pool)
            for count in (most,) if self.fill else range(1, most + 1):
                yield MeshSpec((replace(pool, count=count),))

    def _disaggregated(self) -> Iterator[MeshSpec]:
        for prefill in self._shapes(Role.PREFILL, self.devices - 1):
            for decode in self._shapes(Role.DECODE, self.devices - devices_of(prefill)):
                yield from self._splits(prefill, decode)

    def _splits(self, prefill: PoolSpec, decode: PoolSpec) -> Iterator[MeshSpec]:
        for count in range(1, self.devices // devices_of(prefill) + 1):
            most_decodes, unused = divmod(self.devices - count * devices_of(prefill), devices_of(decode))
            if self.fill and unused >= devices_of(prefill):
                continue  # there is room for one more prefill worker
            for decodes in range(most_decodes if self.fill else 1, most_decodes + 1):
                if decodes >= 1:
                    yield MeshSpec((replace(prefill, count=count), replace(decode, count=decodes)))

    def _shapes(self, role: Role, most: int) -> Iterator[PoolSpec]:
        """Yields the worker shapes of a role; only decode workers can be rings."""
        for pp in self.pps if role.decodes else self.prefill_pps:
            schedules = self.schedules if role is Role.DECODE and pp > 1 else (Schedule.STAGES,)
            for tp, schedule in itertools.product(self.tps, schedules):
                pool = PoolSpec(role, 1, pp, tp, schedule=schedule)
                if pp * tp <= most and self._can_place(pool):
                    yield pool

    def _can_place(self, pool: PoolSpec) -> bool:
        """Returns True if a worker of this shape has a slice, or whole hosts, to itself."""
        devices = pool.pp * pool.tp
        if self.slice_devices and devices not in self.slice_devices:
            return False
        if not self.host_devices or devices <= self.host_devices:
            return True
        return devices % self.host_devices == 0 and (pool.pp == 1 or pool.role is Role.DECODE)


def devices_of(pool: PoolSpec) -> int:
    return pool.count * pool.pp * pool.tp


# Builders of candidates: from hardware constants with a port per device, or from a profile of the user's devices.


@dataclass(frozen=True, slots=True)
class CandidateBuilder:
    """Builds clusters of constants; a worker's port is as wide as those of its devices together. `device_bytes_per_s`:
    one way; 0: KV takes no time."""

    settings: Settings
    cost_of: CostOf
    device_bytes_per_s: float = 0.0
    inside_bytes_per_s: float = 0.0  # the same within a fast domain

    def build(self, candidate: PlanCandidate) -> ClusterSpec:
        """Builds a candidate. Raises ConfigError if weights or a page do not fit."""
        mesh, tokens = candidate.mesh, candidate.chunk_tokens
        settings = replace(self.settings, max_num_batched_tokens=tokens, transfer=candidate.transfer)
        if candidate.domain_devices:
            topology = topology_of(paired(mesh, candidate.domain_devices), self.device_bytes_per_s)
            inside = self._ports(self.inside_bytes_per_s)
            return replace(cluster_spec(mesh, settings, self.cost_of, inside, topology), routing=PAIRING)
        return cluster_spec(mesh, settings, self.cost_of, self._ports(self.device_bytes_per_s))

    def _ports(self, device_bytes_per_s: float) -> PortOf:
        """Returns a worker's port: that of its devices together."""
        return lambda place: device_bytes_per_s * len(place.device_ids) if device_bytes_per_s else FREE_LINK

    def half_the_link(self) -> CandidateBuilder:
        return replace(self, device_bytes_per_s=self.device_bytes_per_s / 2)


@dataclass(frozen=True, slots=True)
class ProfiledCandidateBuilder:
    """Builds workers as the profile has them, chunk sizes included; only meshes of its shapes can be built."""

    profile: Profile
    link_share: float = 1.0

    def build(self, candidate: PlanCandidate) -> ClusterSpec:
        """Builds a candidate. Raises ConfigError for shapes without measured times."""
        given = cluster_spec_of(self.profile, candidate.mesh, candidate.transfer)
        ports = {port: self.link_share * rate for port, rate in given.links.bytes_per_s.items()}
        return replace(given, links=FairLinks(ports))

    def half_the_link(self) -> ProfiledCandidateBuilder:
        return replace(self, link_share=self.link_share / 2)

    @property
    def chunk_tokens(self) -> int:
        """Returns the chunk tokens of its prefill workers."""
        return max(pool.config.prefill_buckets[-1] for pool in self.profile.pools)

    @property
    def max_model_len(self) -> int:
        return min(pool.config.max_model_len for pool in self.profile.pools)
