"""From a place in a group to a running leader or member: the meeting, the JAX world, the worker's build.

Order of a start: the roll is called, JAX's world formed at a port of the leader's choice, the leader's sizes taken
over by all, weights loaded, programs warmed together; then the members follow the leader's commands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax

import jdisagg
from jdisagg.cluster.membership import GroupPlace
from jdisagg.core.errors import ConfigError, MeshError
from jdisagg.core.mesh_spec import Schedule, WorkerMesh
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role
from jdisagg.kv.transport.listener import split_address
from jdisagg.policy.roll_call import Card
from jdisagg.serve.cluster.certificates import kv_contexts
from jdisagg.serve.cluster.processes import plays, read_secret, roles_of
from jdisagg.serve.deploy.deployment import AUTO, mesh_of, model_files, name_of
from jdisagg.serve.group.assembly import GroupUnfilled, Meeting, is_address, listener_at

SHARED_GROUPS = ("mesh", "sizes", "scheduling", "transfer")
SHARED = ("load_format", "dtype", "weight_dtype", "kv_dtype", "seed", "role", "transport", "peer_silence_s", "platform")
WARM_S = 600.0  # behind the leader, until every member is warm


def worker_of(settings: Settings) -> WorkerMesh:
    """The one worker of the mesh that the group is. Raises ConfigError."""
    if settings.weight_dtype == AUTO:
        raise ConfigError("--weight_dtype=auto measures, and processes of a group may measure otherwise: name one")
    roles = roles_of(settings)
    mine = [place for place in mesh_of(settings).workers() if plays(place.role, roles)]
    if len(mine) != 1:
        raise MeshError(
            f"--mesh={settings.mesh} has {len(mine)} workers of --role={settings.role}, and a group is one: write one,"
            " and start a group for each copy of it"
        )
    if mine[0].pp > 1 and mine[0].schedule is not Schedule.RING:
        stages, shards = mine[0].pp, f"tp{mine[0].tp}" * (mine[0].tp > 1)
        one = f"ring{stages}{shards}" if mine[0].role is Role.DECODE else f"tp{len(mine[0].device_ids)}"
        raise MeshError(
            f"--mesh={settings.mesh}: the {stages} stages of {mine[0].worker} are programs of one process, and a group"
            f" spans several: write {mine[0].role.value}:{one}"
        )
    return mine[0]


def devices_each(settings: Settings, place: GroupPlace) -> int:
    """How many of the worker's devices each process holds. Raises MeshError."""
    number = len(worker_of(settings).device_ids)
    if number % place.size:
        raise MeshError(
            f"the {number} devices of --mesh={settings.mesh} for --role={settings.role} do not split evenly over"
            f" --group_size={place.size}: change one of them"
        )
    return number // place.size


def card_of(settings: Settings, place: GroupPlace) -> Card:
    """What this process says of itself to the others of its group."""
    files = model_files(settings)
    names = [each.name for each in fields(settings) if each.metadata["group"] in SHARED_GROUPS or each.name in SHARED]
    flags = {name: str(getattr(settings, name)) for name in names} | {"tls_cert": "given" * bool(settings.tls_cert)}
    model = files.identity.described(settings.served_model_name or name_of(files.place))
    version, now_s = jdisagg.__version__, time.time()
    return Card(place.group, place.rank, place.size, version, jax.__version__, model, flags, now_s)


def meeting_of(settings: Settings, place: GroupPlace) -> Meeting:
    server, client = kv_contexts(settings)
    wait_s = settings.group_wait_s
    return Meeting(place.coordinator, read_secret(settings), time.monotonic() + wait_s, wait_s, server, client)


@dataclass(frozen=True)
class World:
    """How JAX's world is formed."""

    address: str  # of its coordinator, rank 0
    place: GroupPlace
    silence_s: float
    wait_s: float

    def form(self) -> None:
        """Raises GroupUnfilled where the others do not come."""
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                self.address,
                self.place.size,
                self.place.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, round(self.wait_s)),
                heartbeat_timeout_seconds=2 * math.ceil(self.silence_s + 2),  # JAX waits for half of it or more
                shutdown_timeout_seconds=5,
                coordinator_bind_address=self.address if is_address(split_address(self.address)[0]) else None,
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0][:300]
            raise GroupUnfilled(f"group {self.place.group!r}: JAX at {self.address}: {why}") from error


def free_port(coordinator: str) -> str:
    """HOST:PORT beside the coordinator's that nobody has just now."""
    host = split_address(coordinator)[0]
    with listener_at(host, 0) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_devices(devices: Sequence[Any], place: GroupPlace, each: int) -> list[Any]:
    """Those of the group's worker, process by process. Raises MeshError naming the member that has too few."""
    found = list[Any]()
    for rank in range(place.size):
        own = [device for device in devices if device.process_index == rank]
        if len(own) < each:
            raise MeshError(
                f"member {rank} of group {place.group!r} has {len(own)} devices, the mesh needs {each} of each of"
                f" {place.size} processes: change --mesh or --group_size"
            )
        found += own[:each]
    return found
