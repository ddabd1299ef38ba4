"""A job: the processes of a mesh on hosts of a given size, and the flags of each process.

Each worker of the mesh is a process, or a group of processes if it has more devices than a host. All processes get
one mesh with one worker per pool, since schedulers count workers, and add and remove them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, Schedule
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role

AUTO = "auto"
KV_PORT, HEALTH_PORT = 8101, 8102  # ports of a worker's pod: for KV pulls, and for health checks
PLATFORMS = ("cpu", "gpu", "tpu")
PLACED = {  # settings that the job sets itself, or that make no sense in a job
    *(
        "mesh",
        "role",
        "router",
        "coordination",
        "control_advertise",
        "host",
        "control_port",
        "kv_listen",
        "kv_advertise",
        "secret_file",
        "health_port",
        "platform",
        "dtype",
    ),
    *("group", "group_size", "group_rank", "coordinator", "compile_cache_dir", "cache", "api_keys_file"),
    *("prompt", "raw_prompt", "chat", "prompts", "output", "tls_cert", "tls_key", "tls_ca", "api_key"),
}


@dataclass(frozen=True, slots=True)
class RoleWorkers:
    """The workers of one role: `replicas` of them, each `size` processes with `devices` devices."""

    role: str
    replicas: int
    size: int
    devices: int

    @property
    def processes(self) -> int:
        return self.replicas * self.size


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A router and workers, in a form common to all schedulers."""

    name: str
    image: str
    platform: str
    settings: Settings  # of every process; its mesh has one worker per pool
    parts: tuple[RoleWorkers, ...]
    routers: int = 1  # if several, one leads by the lease of `coordination`
    fronts: int = 0  # processes that serve clients through the router; 0: the router does
    namespace: str = "default"  # Kubernetes namespace

    @property
    def router_name(self) -> str:
        """Returns the name of the router's Deployment, of its control Service and of its lease."""
        return f"{self.name}-router"

    @property
    def coordination(self) -> str:
        """Returns the --coordination of every process; empty with one router."""
        if self.routers == 1:
            return ""
        return self.settings.coordination or f"kubernetes:{self.namespace}/{self.router_name}"

    @property
    def where(self) -> dict[str, str]:
        """Returns the flag by which workers and fronts find the router."""
        if self.coordination:
            return {"coordination": self.coordination}
        return {"router": f"{self.router_name}:{self.settings.control_port}"}


def with_fronts(job: ClusterJob, routers: int, fronts: int) -> ClusterJob:
    """Returns the job with `routers` and `fronts`. Raises ConfigError if clients would have no server."""
    if routers < 1 or fronts < 0:
        raise ConfigError(f"--routers is {routers} and --fronts {fronts}, must be 1 or more, and 0 or more")
    if routers > 1 and not fronts:
        raise ConfigError(
            f"--routers={routers} needs --fronts=1 or more: a standby router serves no requests, and only a front's"
            " streams go on when a router is lost"
        )
    return replace(job, routers=routers, fronts=fronts)


def job_of(settings: Settings, name: str, image: str, platform: str, devices_per_host: int) -> ClusterJob:
    """Returns the job of `settings` on hosts of `devices_per_host`. Raises ConfigError if it cannot be placed."""
    if settings.mesh == AUTO:
        raise ConfigError("a job needs its mesh written out, as --mesh=prefill:tp2,decode:pp2: auto is for one process")
    if settings.tls_cert:
        raise ConfigError(f"--tls_cert={settings.tls_cert}: each process has its own, so add them to what is emitted")
    mesh = MeshSpec.parse(settings.mesh)
    single = MeshSpec(tuple(replace(pool, count=1, first_device=None) for pool in mesh.pools))
    dtype = settings.dtype if settings.dtype != AUTO else "float32" if platform == "cpu" else "bfloat16"
    parts = tuple(_part(pool, devices_per_host) for pool in mesh.pools)
    return with_rings(ClusterJob(name, image, platform, replace(settings, mesh=str(single), dtype=dtype), parts))


def with_rings(job: ClusterJob) -> ClusterJob:
    """Returns the job with decode pipelines of several processes as rings; separate stages need one process. Raises
    ConfigError if such a pipeline cannot be a ring."""
    sizes = {part.role: part.size for part in job.parts}
    pools = MeshSpec.parse(job.settings.mesh).pools
    pools_text = ",".join(str(_ring(pool) if pool.pp > 1 and sizes[pool.role.value] > 1 else pool) for pool in pools)
    return replace(job, settings=replace(job.settings, mesh=str(MeshSpec.parse(pools_text))))


def _ring(pool: PoolSpec) -> PoolSpec:
    if pool.role is not Role.DECODE:
        raise ConfigError(
            f"{pool} has workers of several hosts, whose stages would be a ring, and a ring decodes and does nothing"
            f" else: write {pool.role}:tp{pool.pp * pool.tp}, or prefill and decode apart"
        )
    return replace(pool, schedule=Schedule.RING)


def _part(pool: PoolSpec, devices_per_host: int) -> RoleWorkers:
    devices = pool.pp * pool.tp
    if devices <= devices_per_host:
        return RoleWorkers(pool.role.value, pool.count, 1, devices)
    if devices % devices_per_host:
        raise ConfigError(
            f"{pool} has workers of {devices} devices and --devices_per_host is {devices_per_host}: a worker is as many"
            " whole hosts as it needs, or a part of one"
        )
    return RoleWorkers(pool.role.value, pool.count, devices // devices_per_host, devices_per_host)


def shared_arguments(job: ClusterJob) -> list[str]:
    """Returns the flags that all processes share: each setting that is not at its default."""
    standard = Settings()
    settings = {each.name: getattr(job.settings, each.name) for each in fields(Settings) if each.name not in PLACED}
    settings = {name: value for name, value in settings.items() if value != getattr(standard, name)}
    return as_flags(mesh=job.settings.mesh, platform=job.platform, dtype=job.settings.dtype, **settings)


def as_flags(**values: Any) -> list[str]:
    """Returns --name=value for each value, in this order."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]
