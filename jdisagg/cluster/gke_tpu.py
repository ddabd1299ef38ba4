"""Slices of TPUs on GKE: which topology holds a worker, on how many hosts, and how a pod asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jdisagg.cluster.job import Job, Part, with_rings
from jdisagg.cluster.kubernetes import leader_worker_sets, router
from jdisagg.cluster.pods import Document
from jdisagg.core.errors import ConfigError

WHOLE = 1 << 20  # devices of a host without bounds: a worker is not cut, its slice says over how many hosts it lies
POOL = "cloud.google.com/gke-nodepool"  # a slice of several hosts is a pool of nodes of its own


@dataclass(frozen=True, slots=True)
class Slices:
    """What GKE sells of one chip. `one_host`: chips that a single machine may have; else each has `per_host`."""

    accelerator: str
    topologies: Mapping[int, str]  # chips -> topology
    one_host: tuple[int, ...]
    per_host: int = 4

    def topology(self, chips: int) -> tuple[int, str]:
        """(chips, topology) of the smallest slice that holds so many. Raises ConfigError where none does."""
        for count, topology in self.topologies.items():
            if count >= chips:
                return count, topology
        raise ConfigError(
            f"a worker of {chips} chips is over the largest slice of {self.accelerator}: {max(self.topologies)}"
        )

    def hosts(self, chips: int) -> int:
        return 1 if chips in self.one_host else chips // self.per_host


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
SLICES = {  # by the names of `core.targets`
    "v5e": Slices("tpu-v5-lite-podslice", _FLAT, (1, 4, 8)),
    "v5p": Slices("tpu-v5p-slice", _CUBES, (4,)),
    "v6e": Slices("tpu-v6e-slice", _FLAT, (1, 4, 8)),
}


def slice_of(part: Part, chip: str) -> tuple[Part, str]:
    """The worker's processes on a slice, a host each, and the slice's topology. Raises ConfigError.

    A worker that fills no slice has one to itself all the same, and leaves the other chips idle.
    """
    wanted = part.size * part.devices
    chips, topology = SLICES[chip].topology(wanted)
    hosts = SLICES[chip].hosts(chips)
    if hosts > 1 and chips != wanted:
        raise ConfigError(
            f"{part.role} workers have {wanted} chips, and {chip} slices of several hosts {chips}: {topology}"
        )
    return replace(part, size=hosts, devices=chips // hosts), topology


def manifests(job: Job, chip: str) -> dict[str, list[Document]]:
    """File -> documents: the router on any node, each worker on a slice of its own. Raises ConfigError."""
    placed = {part.role: slice_of(part, chip) for part in job.parts}
    slices = with_rings(replace(job, platform="tpu", parts=tuple(part for part, _ in placed.values())))

    def selector(part: Part) -> Mapping[str, str]:
        topology = placed[part.role][1]
        names = {"accelerator": SLICES[chip].accelerator, "topology": topology}
        return {f"cloud.google.com/gke-tpu-{name}": value for name, value in names.items()}

    return {"router.yaml": router(slices), "lws.yaml": leader_worker_sets(slices, selector, POOL)}
