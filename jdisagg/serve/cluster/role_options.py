"""What a worker of one process can become for those of others: told when it joins, and held to when it changes.

Every process has compiled what KV of the mesh's workers needs; another cut would have all of them compile while they
serve. So across processes a worker becomes one of the mesh's, or a colocated one, whose KV stays with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jdisagg.core.codec import decode_as, shown
from jdisagg.core.errors import ConfigError, DecodeError, SenselessWord
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig
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


def options_json(options: WorkerShapes) -> dict[str, Any]:
    return {
        "devices": options.num_devices,
        "able": {text: each.config for text, each in options.able.items()},
        "impossible": dict(options.impossible),
        "usual": {role.value: text for role, text in options.usual.items()},
        "fixed": options.fixed,
    }


def read_all_options(record: Any, joining: Iterable[PeerRecord]) -> dict[WorkerId, WorkerShapes]:
    """Of those that join, who say it. Raises SenselessWord."""
    try:
        return {
            each.worker: read_options(record[each.worker], each.worker) for each in joining if each.worker in record
        }
    except (KeyError, TypeError, ValueError, DecodeError, ConfigError) as error:
        raise SenselessWord(f"what a peer can become cannot be read: {type(error).__name__}: {shown(error)}") from error


def read_options(record: Any, worker: WorkerId) -> WorkerShapes:
    """Raises SenselessWord, or what a record of other types raises: KeyError, TypeError, ValueError, DecodeError."""
    devices, fixed = record["devices"], record["fixed"]
    configs = {text: decode_as(WorkerConfig, each) for text, each in _entries(record["able"]).items()}
    impossible = {text: str(why)[:LONGEST_TEXT] for text, why in _entries(record["impossible"]).items()}
    usual = {Role(role): text for role, text in _entries(record["usual"]).items()}
    for config in configs.values():
        config.check()
    if type(devices) is not int or devices < 1 or not isinstance(fixed, str) or len(fixed) > LONGEST_TEXT:
        raise SenselessWord(f"{worker} can be something on {str(devices)[:20]} devices")
    if not {each.worker for each in configs.values()} <= {worker} or not set(usual.values()) <= set(configs):
        raise SenselessWord(f"{worker} says what others can be, or what it cannot be itself")
    return WorkerShapes(devices, {text: Option(each) for text, each in configs.items()}, impossible, usual, fixed)


def _entries(record: Any) -> dict[str, Any]:
    found = cast(dict[Any, Any], record)
    if not isinstance(record, dict) or len(found) > MOST_OPTIONS or not all(isinstance(each, str) for each in found):
        raise SenselessWord(f"{str(record)[:80]} are no options")
    return {str(text): each for text, each in found.items()}
