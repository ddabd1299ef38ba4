"""What a job is made of: the processes that a mesh comes to on hosts of so many devices, and what each is told.

A worker of the mesh is a process of its own here, or a group of them where it has more devices than a host. All are
told one mesh, of one worker a pool: the schedulers count workers, and add and take some away.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, Schedule
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role

AUTO = "auto"
KV_PORT, HEALTH_PORT = 8101, 8102  # of a worker's pod: where its KV is pulled, and where it is asked for its health
PLATFORMS = ("cpu", "gpu", "tpu")
PLACED = {  # what each kind of job says itself, or what is of no use to one
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
class Part:
    """The workers of one role: `replicas` of them, each `size` processes with `devices` devices."""

    role: str
    replicas: int
    size: int
    devices: int

    @property
    def processes(self) -> int:
        return self.replicas * self.size


@dataclass(frozen=True, slots=True)
class Job:
    """A router and workers, as every kind of scheduler is told of them."""

    name: str
    image: str
    platform: str
    settings: Settings  # of every process; its mesh has one worker a pool
    parts: tuple[Part, ...]
    routers: int = 1  # of several one leads, by the lease of `coordination`
    fronts: int = 0  # processes that serve clients by way of the router; 0: the router does
    namespace: str = "default"  # of Kubernetes

    @property
    def router_name(self) -> str:
        """The name of the router's Deployment, of its control Service and of its lease."""
        return f"{self.name}-router"

    @property
    def coordination(self) -> str:
        """The --coordination of every process; empty where there is one router."""
        if self.routers == 1:
            return ""
        return self.settings.coordination or f"kubernetes:{self.namespace}/{self.router_name}"

    @property
    def where(self) -> dict[str, str]:
        """The flag by which workers and fronts find the router."""
        if self.coordination:
            return {"coordination": self.coordination}
        return {"router": f"{self.router_name}:{self.settings.control_port}"}


def with_fronts(job: Job, routers: int, fronts: int) -> Job:
    """Returns the job with so many routers and fronts. Raises ConfigError where clients would find no server."""
    if routers < 1 or fronts < 0:
        raise ConfigError(f"--routers is {routers} and --fronts {fronts}, must be 1 or more, and 0 or more")
    if routers > 1 and not fronts:
        raise ConfigError(
            f"--routers={routers} needs --fronts=1 or more: a standby router serves no requests, and only a front's"
            " streams go on when a router is lost"
        )
    return replace(job, routers=routers, fronts=fronts)


def job_of(settings: Settings, name: str, image: str, platform: str, devices_per_host: int) -> Job:
    """The job of `settings` on hosts of so many devices. Raises ConfigError for what cannot be placed."""
    if settings.mesh == AUTO:
        raise ConfigError("a job needs its mesh written out, as --mesh=prefill:tp2,decode:pp2: auto is for one process")
    if settings.tls_cert:
        raise ConfigError(f"--tls_cert={settings.tls_cert}: each process has its own, so add them to what is emitted")
    mesh = MeshSpec.parse(settings.mesh)
    single = MeshSpec(tuple(replace(pool, count=1, first_device=None) for pool in mesh.pools))
    dtype = settings.dtype if settings.dtype != AUTO else "float32" if platform == "cpu" else "bfloat16"
    parts = tuple(_part(pool, devices_per_host) for pool in mesh.pools)
    return with_rings(Job(name, image, platform, replace(settings, mesh=str(single), dtype=dtype), parts))


def with_rings(job: Job) -> Job:
    """The job with decode pipelines of several processes as rings: `stages` are programs of one process.

    Raises ConfigError where a pipeline of several processes cannot be one.
    """
    sizes = {part.role: part.size for part in job.parts}
    pools = MeshSpec.parse(job.settings.mesh).pools
    found = ",".join(str(_ring(pool) if pool.pp > 1 and sizes[pool.role.value] > 1 else pool) for pool in pools)
    return replace(job, settings=replace(job.settings, mesh=str(MeshSpec.parse(found))))


def _ring(pool: PoolSpec) -> PoolSpec:
    if pool.role is not Role.DECODE:
        raise ConfigError(
            f"{pool} has workers of several hosts, whose stages would be a ring, and a ring decodes and does nothing"
            f" else: write {pool.role}:tp{pool.pp * pool.tp}, or prefill and decode apart"
        )
    return replace(pool, schedule=Schedule.RING)


def _part(pool: PoolSpec, devices_per_host: int) -> Part:
    devices = pool.pp * pool.tp
    if devices <= devices_per_host:
        return Part(pool.role.value, pool.count, 1, devices)
    if devices % devices_per_host:
        raise ConfigError(
            f"{pool} has workers of {devices} devices and --devices_per_host is {devices_per_host}: a worker is as many"
            " whole hosts as it needs, or a part of one"
        )
    return Part(pool.role.value, pool.count, devices // devices_per_host, devices_per_host)


def shared_arguments(job: Job) -> list[str]:
    """What every process is told, but for its place: a flag a setting that is not the default."""
    standard = Settings()
    told = {each.name: getattr(job.settings, each.name) for each in fields(Settings) if each.name not in PLACED}
    told = {name: value for name, value in told.items() if value != getattr(standard, name)}
    return as_flags(mesh=job.settings.mesh, platform=job.platform, dtype=job.settings.dtype, **told)


def as_flags(**values: Any) -> list[str]:
    """--name=value of each, in this order."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]
