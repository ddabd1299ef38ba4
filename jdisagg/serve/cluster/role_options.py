"""What a worker of one process can become for those of others: told when it joins, and held to when it changes.

Every process has compiled what KV of the mesh's workers needs; another cut would have all of them compile while they
serve. So across processes a worker becomes one of the mesh's, or a colocated one, whose KV stays with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from jdisagg.core.codec import convert, shown
from jdisagg.core.errors import ConfigError, DecodeError, SenselessWord
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import MOST, Role, WorkerConfig
from jdisagg.serve.cluster.kv_notices import PeerRecord
from jdisagg.serve.deploy.deployment import Deployment, WorkerShapes, shapes_of

MOST_OPTIONS, LONGEST_TEXT = 64, 1000


@dataclass(frozen=True, slots=True)
class Option:
    """One of another process's: how the machine is cut is that process's affair."""

    config: WorkerConfig


def options_of(
    deployment: Deployment, settings: Settings, own: Mapping[WorkerId, WorkerConfig], num_processes: int = 1
) -> dict[WorkerId, WorkerShapes]:
    """Of workers of this process, by the names they have here; `own` has them by their names in the mesh."""
    return {config.worker: _options(deployment, settings, name, config, num_processes) for name, config in own.items()}


def _options(
    deployment: Deployment, settings: Settings, name: WorkerId, config: WorkerConfig, num_processes: int
) -> WorkerShapes:
    place, mesh = deployment.place(name), deployment.mesh
    if mesh.is_ring or num_processes > 1:
        beside = "stands beside a ring" if mesh.is_ring else f"is a group of {num_processes} processes"
        text = str(PoolSpec(place.role, 1, place.pp, place.tp, schedule=place.schedule))
        why = f"{config.worker} {beside}: its role changes by starting it again with another --role"
        return WorkerShapes(len(place.device_ids), {text: Option(config)}, {}, {place.role: text}, why)
    found = shapes_of(deployment, settings, place, config.worker)
    able = {text: each for text, each in found.able.items() if _is_warm(text, mesh)}
    others = {text: f"{text} is none of --mesh={mesh}, for which the other processes are warm" for text in found.able}
    others = {text: why for text, why in others.items() if text not in able}
    usual = {role: text for role, text in found.usual.items() if text in able}
    for text, each in able.items():
        usual.setdefault(each.config.role, text)
    return WorkerShapes(found.num_devices, able, {**found.impossible, **others}, usual)


def _is_warm(text: str, mesh: MeshSpec) -> bool:
    (pool,) = MeshSpec.pools_of(text)
    known = [(each.role, each.pp, each.tp) for each in mesh.pools]
    return pool.role is Role.COLOCATED or (pool.role, pool.pp, pool.tp) in known


class WorkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker can become, as its process tells the router."""

    devices: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    able: Annotated[dict[str, WorkerConfig], msgspec.Meta(max_length=MOST_OPTIONS)]
    impossible: Annotated[dict[str, str], msgspec.Meta(max_length=MOST_OPTIONS)]
    usual: dict[Role, str]
    fixed: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]


def options_json(options: WorkerShapes) -> dict[str, Any]:
    return {
        "devices": options.num_devices,
        "able": {text: each.config for text, each in options.able.items()},
        "impossible": {text: why[:LONGEST_TEXT] for text, why in options.impossible.items()},
        "usual": {role.value: text for role, text in options.usual.items()},
        "fixed": options.fixed,
    }


def read_all_options(record: Any, joining: Iterable[PeerRecord]) -> dict[WorkerId, WorkerShapes]:
    """Of those that join, who say it. Raises SenselessWord."""
    try:
        return {
            each.worker: read_options(record[each.worker], each.worker) for each in joining if each.worker in record
        }
    except (TypeError, DecodeError, ConfigError) as error:
        raise SenselessWord(f"what a peer can become cannot be read: {type(error).__name__}: {shown(error)}") from error


def read_options(record: Any, worker: WorkerId) -> WorkerShapes:
    """Returns what a worker of another process can become. Raises SenselessWord, DecodeError, ConfigError."""
    found = convert(WorkerOptions, record)
    for config in found.able.values():
        config.check()
    if not {each.worker for each in found.able.values()} <= {worker} or not {*found.usual.values()} <= {*found.able}:
        raise SenselessWord(f"{worker} says what others can be, or what it cannot be itself")
    impossible = {text: why[:LONGEST_TEXT] for text, why in found.impossible.items()}
    able = {text: Option(each) for text, each in found.able.items()}
    return WorkerShapes(found.devices, able, impossible, found.usual, found.fixed)
