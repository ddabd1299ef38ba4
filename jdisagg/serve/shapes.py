"""What a worker can be on its own devices: every role, and every way to cut them, worked out before anybody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from jdisagg.core.errors import ConfigError, MeshError
from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, WorkerMesh
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.stages import split_layers
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.reshape import Shape
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.memory import Budget, num_pages, own_layers
from jdisagg.serve.worker_sizes import shipping_of, worker_config


class Sized(Protocol):
    """What a worker can be: its sizes, and of a machine of this process how it is cut (`engine.reshape.Shape`)."""

    @property
    def config(self) -> WorkerConfig: ...


@dataclass(frozen=True, slots=True)
class WorkerShapes:
    """One worker's, by the text of its mesh, as "decode:pp2". `impossible`: why it can not be some of them."""

    num_devices: int
    able: Mapping[str, Sized]
    impossible: Mapping[str, str]
    usual: Mapping[Role, str]  # of a role where nobody says more
    fixed: str = ""  # why it is nothing but what it is, where that is so

    def find(self, role: str, mesh: str) -> Sized:
        """What it is to be: mesh as "pp2tp1", "" for the usual one. Raises ConfigError, MeshError."""
        if role not in list(Role):
            raise ConfigError(f"role is {role[:20]!r}, must be one of {', '.join(Role)}")
        if not mesh:
            return self._named(self.usual.get(Role(role), role))
        (pool, *others) = MeshSpec.pools_of(f"{role}:{mesh}")
        if others or pool.count != 1 or pool.first_device is not None:
            raise MeshError(f"mesh is {mesh[:40]!r}, must be one worker's, as pp2tp2, and stays on its devices")
        if pool.pp * pool.tp != self.num_devices:
            raise MeshError(
                f"mesh {mesh} is of {pool.pp * pool.tp} devices, and the worker stands on {self.num_devices}"
            )
        return self._named(str(pool))

    def _named(self, name: str) -> Sized:
        if name in self.able:
            return self.able[name]
        raise MeshError(
            self.impossible.get(name) or self.fixed or f"{name} is none of what it can be: {', '.join(self.able)}"
        )


def shapes_of(deployment: Deployment, settings: Settings, place: WorkerMesh, name: WorkerId) -> WorkerShapes:
    """Of the worker at `place`, which is called `name`."""
    able, impossible, usual = dict[str, Shape](), dict[str, str](), dict[Role, str]()
    for pool in _cuts(len(place.device_ids)):
        text = str(pool)
        try:
            at = replace(place, role=pool.role, pp=pool.pp, tp=pool.tp)
            able[text] = _shape(deployment, settings, at, name, deployment.layout(place.role))
        except ConfigError as error:
            impossible[text] = str(error)
        started_so = any(
            (each.role, each.pp, each.tp) == (pool.role, pool.pp, pool.tp) for each in deployment.mesh.pools
        )
        if started_so or pool.role not in usual:
            usual[pool.role] = text
    return WorkerShapes(len(place.device_ids), able, impossible, usual)


def _cuts(devices: int) -> Iterator[PoolSpec]:
    """Every role on so many devices; the most stages first, of prefill the fewest."""
    tps = [tp for tp in range(1, devices + 1) if devices % tp == 0]
    for role in Role:
        for tp in reversed(tps) if role is Role.PREFILL else tps:
            yield PoolSpec(role, pp=devices // tp, tp=tp)


def _shape(deployment: Deployment, settings: Settings, place: WorkerMesh, name: WorkerId, own: KVLayout) -> Shape:
    """own: of the pages it starts with. Raises ConfigError, MeshError where it cannot be."""
    model, layout = deployment.model, deployment.layout(place.role)
    if settings.tiers and layout != own:
        raise ConfigError(f"{place.role}: pages would be {layout}, those that {settings.tiers} keep are {own}")
    stages = split_layers(model, place.pp) if place.role.decodes else deployment.layers
    layers = own_layers(model, stages, place)
    kept, draft = deployment.draft_pages, deployment.draft[1] if deployment.draft else None
    held = deployment.weights, deployment.device_bytes, draft
    budget = Budget(model, stages, deployment.dtype_of(place.role), *held, draft_kept=kept is not None)
    longest = deployment.max_model_len
    pages = num_pages(
        settings, deployment.sizes.max_num_seqs, place, layout, longest, budget.of(place, deployment.mesh)
    )
    config = worker_config(settings, deployment.sizes, place, layout.page_size, longest, pages)
    config = replace(config, worker=name, **shipping_of(settings, layers, deployment.kv, kept))
    return Shape(config, layout, layers)
