"""Resolves the group and rank of this process, from flags first.

A group is one worker that spans processes. The starter of the processes gives each its rank: by flags, by
`JDISAGG_*` variables (for flags that are not given), or by the variables of SLURM's steps, of Kubernetes'
LeaderWorkerSet and JobSet, or of TPU slices. Sources must agree on size and rank. A step, set or slice of one
process counts as no source, and --group_size=1 means a worker without a group whatever the other sources have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jdisagg.cluster.slurm import expand
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings

POD_PORT = 8476  # port of a coordinator in a pod, where each group has addresses of its own
STEP_PORTS = range(20_000, 32_768)  # below the ports that systems use for outgoing connections
WORKER_ROLES = {"prefill", "decode", "colocated"}


@dataclass(frozen=True, slots=True)
class GroupRank:
    """One process's place: `rank` of `size` in the worker `group`; rank 0 listens at `coordinator` (HOST:PORT)."""

    group: str
    rank: int
    size: int
    coordinator: str


SourceValues = Mapping[str, tuple[str, str]]  # group, size, rank, host or port -> (source, value)
Environ = Mapping[str, str]


def resolve(settings: Settings, environ: Environ) -> GroupRank | None:
    """Returns this process's place in a group of two or more; None for a worker without a group, or a router. Raises
    ConfigError if a needed value has no source, or two sources differ."""
    flag_values = _flags(settings)
    if not set(settings.role.split(",")) <= WORKER_ROLES:
        if flag_values:
            raise ConfigError(
                f"{_format_values(flag_values)}: a group is one worker, and --role={settings.role} is not workers alone"
            )
        return None
    own = {**_of_variables(environ), **flag_values}
    if own.get("size", ("", ""))[1] == "1":
        return None
    sources = [own, *(values for source in SCHEDULERS.values() if (values := source(environ)) and _several(values))]
    if not any(sources):
        return None
    place = _place(sources)
    if settings.tiers:
        raise ConfigError(f"{settings.tiers}: a worker of {place.size} processes (--group_size) keeps KV in HBM alone")
    return place


def _place(sources: list[SourceValues]) -> GroupRank:
    size_from, size = _number("size", sources, least=2)
    rank_from, rank = _number("rank", sources, least=0)
    if rank >= size:
        raise ConfigError(f"{rank_from} is {rank} and {size_from} is {size}: ranks are 0 to {size - 1}")
    host, port = _first("host", sources)[1], _first("port", sources)[1]
    return GroupRank(_first("group", sources)[1], rank, size, f"{host}:{port}")


def _number(what: str, sources: list[SourceValues], least: int) -> tuple[str, int]:
    """Returns (first source, number); raises ConfigError if sources differ."""
    given = [values[what] for values in sources if what in values]
    numbers = [(origin, _integer(origin, text, least)) for origin, text in given]
    if not numbers:
        raise ConfigError(f"nobody says the group's {what}: {_remedy(what, sources)}")
    first, number = numbers[0]
    for origin, other in numbers[1:]:
        if other != number:
            raise ConfigError(f"{first} is {number} and {origin} is {other}: they are the {what} of one group")
    return first, number


def _integer(origin: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{origin} is {text!r}, must be a number from {least} on")
    return int(text)


def _first(what: str, sources: list[SourceValues]) -> tuple[str, str]:
    for values in sources:
        if what in values:
            return values[what]
    raise ConfigError(f"nobody says the group's {what}: {_remedy(what, sources)}")


def _remedy(what: str, sources: list[SourceValues]) -> str:
    flag = {"group": "group=NAME", "size": "group_size=N", "rank": "group_rank=R"}.get(what, "coordinator=HOST:PORT")
    known = "; ".join(_format_values(values) for values in sources if values)
    return f"give --{flag}, or start it by {', '.join(SCHEDULERS)} (heard: {known})"


def _format_values(values: SourceValues) -> str:
    return ", ".join(dict.fromkeys(f"{origin}={text}" for origin, text in values.values()))


def _several(values: SourceValues) -> bool:
    """Returns True if a scheduler's values are for more than one process."""
    return values.get("size", ("", "2"))[1] != "1"


# ---------------------------------------------------------------------- who says it


def _flags(settings: Settings) -> SourceValues:
    given = {
        "group": settings.group,
        "group_size": str(settings.group_size or ""),
        "group_rank": "" if settings.group_rank < 0 else str(settings.group_rank),
        "coordinator": settings.coordinator,
    }
    return _own({name: (f"--{name}", text) for name, text in given.items() if text})


def _of_variables(environ: Environ) -> SourceValues:
    names = {name: f"JDISAGG_{name.upper()}" for name in ("group", "group_size", "group_rank", "coordinator")}
    silent = {"group": "", "group_size": "0", "group_rank": "-1", "coordinator": ""}
    return _own(
        {n: (origin, environ[origin]) for n, origin in names.items() if environ.get(origin, "") not in ("", silent[n])}
    )


def _own(given: SourceValues) -> SourceValues:
    """Converts our four names; a coordinator of `:PORT` leaves its host to the scheduler."""
    short = {"group": "group", "group_size": "size", "group_rank": "rank"}
    own_values = {short[name]: value for name, value in given.items() if name in short}
    origin, address = given.get("coordinator", ("", ""))
    host, _, port = address.rpartition(":")
    if address and not port.isdigit():
        raise ConfigError(f"{origin} is {address!r}, must be HOST:PORT, or :PORT where a scheduler names the host")
    return {**own_values, **({"host": (origin, host)} if host else {}), **({"port": (origin, port)} if port else {})}


def _given(environ: Environ, **names: str) -> dict[str, tuple[str, str]]:
    """Returns the values of these variables, by what they stand for."""
    return {what: (name, environ[name]) for what, name in names.items() if environ.get(name)}


def _slurm(environ: Environ) -> SourceValues:
    """Reads a SLURM step (srun); a batch script alone is in no group."""
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not nodes or "SLURM_PROCID" not in environ:
        return {}
    tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    values = _given(environ, rank="SLURM_PROCID", size=tasks)
    if not _several(values):
        return values
    hosts = expand(nodes)
    step_name = f"{environ.get('SLURM_JOB_ID', '0')}-{environ.get('SLURM_STEP_ID', '0')}"
    values["group"] = ("SLURM_STEP_ID", f"slurm-{step_name}")
    values["host"] = ("SLURM_STEP_NODELIST", hosts[0] if len(hosts) > 1 else "127.0.0.1")
    values["port"] = ("SLURM_STEP_ID", str(step_port(step_name)))
    return {**values, **_given(environ, port="JAX_COORDINATOR_PORT")}


def step_port(step: str) -> int:
    """Returns a coordinator port for the job's step; groups of one job on one node get different ports."""
    digest = hashlib.sha256(step.encode()).digest()
    return STEP_PORTS[int.from_bytes(digest[:4], "big") % len(STEP_PORTS)]


def _leader_worker_set(environ: Environ) -> SourceValues:
    values = _given(environ, host="LWS_LEADER_ADDRESS", size="LWS_GROUP_SIZE", rank="LWS_WORKER_INDEX")
    if not {"host", "size"} <= values.keys():
        return {}
    leader = environ["LWS_LEADER_ADDRESS"].partition(".")[0]
    return {**values, "group": ("LWS_LEADER_ADDRESS", leader), "port": ("LWS_LEADER_ADDRESS", str(POD_PORT))}


def _job_set(environ: Environ) -> SourceValues:
    """Reads a JobSet's names from the pod's annotations, as our manifests pass them."""
    if not {"JOB_COMPLETION_INDEX", "JOBSET_NAME", "REPLICATED_JOB_NAME"} <= {k for k, v in environ.items() if v}:
        return {}
    name, index = environ["JOBSET_NAME"], environ.get("JOB_INDEX") or "0"
    group = f"{name}-{environ['REPLICATED_JOB_NAME']}-{index}"
    values = _given(environ, rank="JOB_COMPLETION_INDEX", size="NNODES")
    values["group"] = ("JOBSET_NAME", group)
    values["host"] = ("JOBSET_NAME", f"{group}-0.{environ.get('JOBSET_SUBDOMAIN') or name}")
    return {**values, "port": ("JOBSET_NAME", str(POD_PORT))}


def _tpu(environ: Environ) -> SourceValues:
    """Reads a slice of several hosts, as GKE and TPU VMs describe it."""
    hosts = [each.strip() for each in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if each.strip()]
    if not hosts or not environ.get("TPU_WORKER_ID"):
        return {}
    origin = "TPU_WORKER_HOSTNAMES"
    group = hosts[0].partition(".")[0] if not hosts[0].replace(".", "").isdigit() else f"slice-{hosts[0]}"
    named = {"group": (origin, group), "host": (origin, hosts[0]), "port": (origin, str(POD_PORT))}
    return {"size": (f"the number of {origin}", str(len(hosts))), **_given(environ, rank="TPU_WORKER_ID"), **named}


SCHEDULERS: Mapping[str, Callable[[Environ], SourceValues]] = {
    "SLURM (srun)": _slurm,
    "a LeaderWorkerSet": _leader_worker_set,
    "a JobSet": _job_set,
    "a TPU slice": _tpu,
}
