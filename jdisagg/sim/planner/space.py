"""What may be built of so many devices: meshes, chunk sizes and transfer modes that are worth a look. Counting only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, Schedule
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.sim.planner.placement import paired


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
    within such domains are tried so, too.
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
                if pp * tp <= most:
                    yield PoolSpec(role, 1, pp, tp, schedule=schedule)


def devices_of(pool: PoolSpec) -> int:
    return pool.count * pool.pp * pool.tp
