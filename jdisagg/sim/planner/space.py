"""What may be built of so many devices: meshes, chunk sizes and transfer modes that are worth a look. Counting only."""

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

# Which workers stand together in fast domains (nodes, slices), so that KV keeps to fast links. Counting only.
#
# DistServe (Zhong et al., OSDI 2024) places for two kinds of cluster. Where links between nodes are as good as
# any (its algorithm 1, high node-affinity) workers stand anywhere. Where they are slow (algorithm 2, low node-
# affinity) each pair keeps within a node, or each pair of equal stages does. Here both are candidates, and what
# they carry decides.

PAIRING = Routing.CACHE_AWARE  # what keeps requests to pairs of one domain, as long as that is quicker


@dataclass(frozen=True, slots=True)
class Unit:
    """Workers that share a domain, or, stage by stage, as many domains as they have stages."""

    name: str
    workers: tuple[WorkerId, ...]
    devices: int
    domains: int = 1

    def __str__(self) -> str:
        where = "one domain" if self.domains == 1 else f"{self.domains} domains, equal stages together"
        return f"{', '.join(self.workers)} in {where}"


def paired(mesh: MeshSpec, domain_devices: int) -> tuple[Unit, ...]:
    """Prefill and decode workers dealt to as few units as fit their domains; () where no unit of one of each fits."""
    prefills = [place for place in mesh.workers() if place.role is Role.PREFILL]
    decodes = [place for place in mesh.workers() if place.role is Role.DECODE]
    for count in range(1, min(len(prefills), len(decodes)) + 1):
        dealt = [(*prefills[unit::count], *decodes[unit::count]) for unit in range(count)]
        units = [_unit(f"domain-{number}", places, domain_devices) for number, places in enumerate(dealt)]
        found = tuple(unit for unit in units if unit is not None)
        if len(found) == count:
            return found
    return ()


def _unit(name: str, places: Sequence[WorkerMesh], domain_devices: int) -> Unit | None:
    workers, devices = tuple(place.worker for place in places), sum(len(place.device_ids) for place in places)
    if devices <= domain_devices:
        return Unit(name, workers, devices)
    stages = {place.pp for place in places}
    if len(stages) == 1 and sum(place.tp for place in places) <= domain_devices:
        return Unit(name, workers, devices, stages.pop())
    return None


def topology_of(units: Sequence[Unit], device_bytes_per_s: float) -> Topology:
    """A unit is a place of its own, whose way out is as wide as its devices' ways; 0: no limit."""
    labels = {worker: Labels(host=unit.name) for unit in units for worker in unit.workers}
    uplinks = {unit.name: device_bytes_per_s * unit.devices for unit in units if device_bytes_per_s}
    return Topology(labels, uplinks)


class Kind(StrEnum):
    """Architectures."""

    SINGLE = "single"  # one worker of both roles
    REPLICATED = "replicated"  # several of them, chunks of prefill between decode steps
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration."""

    mesh: MeshSpec
    chunk_tokens: int
    transfer: TransferMode = TransferMode.CHUNK
    domain_devices: int = 0  # pairs stand within fast domains of so many; 0: anywhere

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

    def part(self, least_devices: int = 0) -> tuple[Candidate, int]:
        """A cluster with the same proportions and at least so many devices, and how many of it make this one.

        The smaller the part, the less it evens out bursts over its workers: it does a little worse than its share.
        """
        copies = math.gcd(*(pool.count for pool in self.mesh.pools))
        parts = next(
            parts
            for parts in range(copies, 0, -1)
            if copies % parts == 0 and (parts == 1 or self.devices // parts >= least_devices)
        )
        pools = tuple(replace(pool, count=pool.count // parts) for pool in self.mesh.pools)
        return replace(self, mesh=MeshSpec(pools)), parts


@dataclass(frozen=True, slots=True)
class Space:
    """`fill`: candidates take as many of the devices as their shapes can; else any number of them up to all.

    `domain_devices`: of a fast domain (a node, a slice), 0 where there are none: pools whose pairs may stand
    within such domains are tried so, too. `slice_devices`: the numbers of devices that a worker may have, none: any.
    `host_devices`: of a host, 0: no limit; a larger worker has whole hosts, and only decode pipelines span them.
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

    def __iter__(self) -> Iterator[Candidate]:
        """With the first of the transfer modes: the others are tried on those that lead (`neighbours`)."""
        for mesh in [*self._colocated(), *self._disaggregated()]:
            for chunk in self.chunks:
                yield Candidate(mesh, chunk, self.transfers[0])
                if self._pairs(mesh):
                    yield Candidate(mesh, chunk, self.transfers[0], self.domain_devices)

    def _pairs(self, mesh: MeshSpec) -> bool:
        """Whether its pairs fit into the domains that there are."""
        units = paired(mesh, self.domain_devices) if self.domain_devices and len(mesh.pools) > 1 else ()
        return 0 < sum(unit.domains for unit in units) <= -(-self.devices // self.domain_devices)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same mesh in the other transfer modes and with chunks a step smaller or larger."""
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
            most, left = divmod(self.devices - count * devices_of(prefill), devices_of(decode))
            if self.fill and left >= devices_of(prefill):
                continue  # one more prefill worker has room
            for other in range(most if self.fill else 1, most + 1):
                if other >= 1:
                    yield MeshSpec((replace(prefill, count=count), replace(decode, count=other)))

    def _shapes(self, role: Role, most: int) -> Iterator[PoolSpec]:
        """Rings decode and do nothing else."""
        for pp in self.pps if role.decodes else self.prefill_pps:
            schedules = self.schedules if role is Role.DECODE and pp > 1 else (Schedule.STAGES,)
            for tp, schedule in itertools.product(self.tps, schedules):
                pool = PoolSpec(role, 1, pp, tp, schedule=schedule)
                if pp * tp <= most and self._can_place(pool):
                    yield pool

    def _can_place(self, pool: PoolSpec) -> bool:
        """Returns whether a worker of this shape has a slice, or whole hosts, to itself."""
        devices = pool.pp * pool.tp
        if self.slice_devices and devices not in self.slice_devices:
            return False
        if not self.host_devices or devices <= self.host_devices:
            return True
        return devices % self.host_devices == 0 and (pool.pp == 1 or pool.role is Role.DECODE)


def devices_of(pool: PoolSpec) -> int:
    return pool.count * pool.pp * pool.tp


# Where candidates are built: of constants, with a port for each device, or of a profile of the user's own
# devices.


@dataclass(frozen=True, slots=True)
class CandidateBuilder:
    """A worker's port is as wide as its devices' together. device_bytes_per_s: one way; 0: KV takes no time."""

    settings: Settings
    cost_of: CostOf
    device_bytes_per_s: float = 0.0
    inside_bytes_per_s: float = 0.0  # so, within a fast domain

    def build(self, candidate: Candidate) -> ClusterSpec:
        """Raises ConfigError where weights or a page have no room."""
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
