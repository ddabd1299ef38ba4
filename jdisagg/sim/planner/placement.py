"""Which workers stand together in fast domains (nodes, slices), so that KV keeps to fast links. Counting only.

DistServe (Zhong et al., OSDI 2024) places for two kinds of cluster. Where links between nodes are as good as any
(its algorithm 1, high node-affinity) workers stand anywhere. Where they are slow (algorithm 2, low node-affinity) each
pair keeps within a node, or each pair of equal stages does. Here both are candidates, and what they carry decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.labels import Labels
from jdisagg.core.mesh_spec import MeshSpec, WorkerMesh
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster_spec import Topology

PAIRING = Routing.PREDICTED  # what keeps requests to pairs of one domain, as long as that is quicker


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
