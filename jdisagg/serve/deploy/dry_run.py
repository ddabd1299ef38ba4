"""Computes each process's devices, memory, ports and command of a deployment, without loading or binding anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from jdisagg.cluster.job import as_flags
from jdisagg.cluster.membership import GroupRank
from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import Schedule, WorkerMesh
from jdisagg.core.model_config import AS_ACTIVATIONS
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role
from jdisagg.model.checkpoint import size_text
from jdisagg.serve.cluster.router_process import ALL_ROLES, FRONT_ROLE, ROUTER_ROLE, plays
from jdisagg.serve.deploy.deployment import AUTO, Deployment
from jdisagg.serve.deploy.memory import Budget

OWN_ADDRESS = "ADDRESS"  # a placeholder for the address of the host that the process runs on
HERE = "ROUTER"  # a placeholder for the host of the router


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: its roles, its workers, and its rank if it belongs to a group of `size` processes."""

    roles: tuple[str, ...]
    places: tuple[WorkerMesh, ...]
    rank: int = 0
    size: int = 1

    def devices(self, mesh_row: WorkerMesh) -> range:
        """Returns the process's share of a worker's devices: ranks get consecutive ranges of equal length."""
        share = len(mesh_row.device_ids) // self.size
        return mesh_row.device_ids[self.rank * share : (self.rank + 1) * share]


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of a deployment on devices of `platform`, printed by --dry_run."""

    deployment: Deployment
    settings: Settings
    platform: str
    group: GroupRank | None = None  # of this process; its size counts for all groups of the role

    def processes(self) -> list[ProcessPlan]:
        """Returns all processes. Raises ConfigError if a worker's devices cannot be split over its group."""
        places = self.deployment.mesh.workers()
        if self.settings.role == ALL_ROLES:
            return [ProcessPlan((ALL_ROLES,), places)]
        named = self.settings.role.split(",")
        others = [role.value for role in Role if role.value not in named and any(each.role is role for each in places)]
        own = [] if ROUTER_ROLE in named else [ROUTER_ROLE]
        found: list[ProcessPlan] = []
        for roles in ((each,) for each in own + others):
            found.append(ProcessPlan(roles, self._places(roles)))
        mine = self._places(tuple(named))
        if self.group is None:
            return sorted([*found, ProcessPlan(tuple(named), mine)], key=lambda each: ROUTER_ROLE not in each.roles)
        return [*found, *self._members(tuple(named), mine, self.group.size)]

    def _places(self, roles: tuple[str, ...]) -> tuple[WorkerMesh, ...]:
        return tuple(each for each in self.deployment.mesh.workers() if plays(each.role, frozenset(roles)))

    def _members(self, roles: tuple[str, ...], places: tuple[WorkerMesh, ...], size: int) -> Iterator[ProcessPlan]:
        for mesh_row in places:
            count = len(mesh_row.device_ids)
            if count % size:
                raise ConfigError(f"{mesh_row.worker} has {count} devices: a group of {size} cannot share them evenly")
            for rank in range(size):
                yield ProcessPlan(roles, (mesh_row,), rank, size)

    def lines(self) -> Iterator[str]:
        for process in self.processes():
            yield ""
            rank = f", rank {process.rank} of {process.size}" if process.size > 1 else ""
            yield f"process  {','.join(process.roles)}{rank}"
            for mesh_row in process.places:
                yield from self._worker(process, mesh_row)
            yield f"  ports    {', '.join(self._ports(process))}"
            yield f"  command  {self.command(process)}"

    def _worker(self, process: ProcessPlan, mesh_row: WorkerMesh) -> Iterator[str]:
        devices = process.devices(mesh_row)
        yield f"  {mesh_row.worker}: {self.platform} devices {devices.start}-{devices.stop - 1} of the mesh"
        held = self.stage_bytes(mesh_row)
        weights_bytes = kv_bytes = 0
        config = next(each for each in self.deployment.workers if each.worker == mesh_row.worker)
        for stage, (run, device_bytes, num_page_layers) in enumerate(held):
            shards = [device for device in devices if (device - mesh_row.first_device) // mesh_row.tp == stage]
            if not shards:
                continue
            first = (shards[0] - mesh_row.first_device) % mesh_row.tp
            page_bytes = num_page_layers * self._page_bytes(mesh_row)
            weights_bytes += len(shards) * device_bytes
            kv_bytes += len(shards) * config.num_pages * page_bytes
            yield (
                f"    stage {stage}: layers {run.start}-{run.stop - 1}, shards {first}-{first + len(shards) - 1} of"
                f" {mesh_row.tp}; a device: {size_text(device_bytes)} of weights,"
                f" {size_text(config.num_pages * page_bytes)} of KV"
            )
        pages = f"{config.num_pages:,} pages of {config.page_size} tokens"
        yield f"    whole: {size_text(weights_bytes)} of weights, {size_text(kv_bytes)} of KV in {pages}"

    def stage_bytes(self, mesh_row: WorkerMesh) -> list[tuple[range, int, int]]:
        """Returns each stage's layers, weight bytes per device, and layers of pages with a ring's padding.

        A weight dtype that only loading decides counts as --dtype.
        """
        whole = self.deployment
        weights = replace(whole.weights, dtype=AS_ACTIVATIONS) if whole.weights.dtype == AUTO else whole.weights
        found = Budget(whole.model, whole.layers, whole.dtype, weights, None).stages(mesh_row)
        if mesh_row.schedule is Schedule.RING:
            ((places, held),) = found
            return [(run, held, len(places)) for run in whole.layers]
        return [(run, held, len(run)) for run, held in found]

    def _page_bytes(self, mesh_row: WorkerMesh) -> int:
        return self.deployment.layout(mesh_row.role).layer_page_bytes(mesh_row.tp)

    def _ports(self, process: ProcessPlan) -> Iterator[str]:
        given, serves = self.settings, {ALL_ROLES, ROUTER_ROLE, FRONT_ROLE} & set(process.roles)
        for name, port in (("http", given.http_port), ("grpc", given.grpc_port)):
            if serves and port >= 0:
                yield f"{name} {given.host}:{_port(port)}"
        if ROUTER_ROLE in process.roles:
            yield f"control {given.host}:{_port(given.control_port)}"
        if process.places and ALL_ROLES not in process.roles:
            host, _, port = self._kv_listen().rpartition(":")
            yield f"KV {host}:{_port(int(port))}"
        if process.size > 1 and process.rank == 0 and self.group is not None:
            yield f"coordinator {self.group.coordinator}"
        if not serves and not process.places:
            yield "none"

    def _kv_listen(self) -> str:
        """Returns the KV address, with a placeholder where the router's host is one: it may be another host."""
        is_standard = not self.settings.router and self.settings.kv_listen == Settings().kv_listen
        return f"{OWN_ADDRESS}:0" if is_standard else self.settings.kv_listen

    def command(self, process: ProcessPlan) -> str:
        standard = Settings()
        flags: dict[str, Any] = {each.name: getattr(self.settings, each.name) for each in fields(Settings)}
        flags |= {"role": ",".join(process.roles), "router": "", "group_rank": -1}
        if ROUTER_ROLE not in process.roles and ALL_ROLES not in process.roles:
            found = self.settings.router or f"{HERE}:{self.settings.control_port}"
            flags["router"] = "" if self.settings.coordination else found
            flags["kv_listen"] = self._kv_listen() if process.places else self.settings.kv_listen
        if process.size > 1 and self.group is not None:
            worker = process.places[0].worker
            group = self.group.group if len(self._places(process.roles)) == 1 else worker
            flags |= {"group": group, "group_size": process.size, "group_rank": process.rank}
            flags["coordinator"] = self.group.coordinator
        else:
            flags |= {"group": "", "group_size": 0, "coordinator": ""}
        given = {name: value for name, value in flags.items() if value != getattr(standard, name)}
        return shlex.join(["python", "-m", "jdisagg.launch", *as_flags(**given)])


def _port(port: int) -> str:
    return str(port) if port else "any free one"
