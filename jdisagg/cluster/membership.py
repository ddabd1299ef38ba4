"""Which group this process is of, and which rank it has there: one table of who may say so, flags first.

A group is one worker that spans processes. Whoever starts them tells each its place: flags, `JDISAGG_*` variables
(where a flag is silent), or the variables of SLURM's steps, of Kubernetes' LeaderWorkerSet and JobSet, of TPU slices.
What two of them say of size and rank must agree. A step, set or slice of one process says nothing, and --group_size=1
means a worker by itself whatever the others say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jdisagg.cluster.slurm import expand
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings

POD_PORT = 8476  # of a coordinator in a pod: addresses are each group's own there
STEP_PORTS = range(20_000, 32_768)  # under those that systems give to outgoing connections
WORKER_ROLES = {"prefill", "decode", "colocated"}


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """One process's place: `rank` of `size` in the worker `group`; rank 0 listens at `coordinator` (HOST:PORT)."""

    group: str
    rank: int
    size: int
    coordinator: str


Said = Mapping[str, tuple[str, str]]  # of group, size, rank, host or port: (who says it, what)
Environ = Mapping[str, str]


def resolve(settings: Settings, environ: Environ) -> GroupPlace | None:
    """This process's place in a group of two or more; None: it is a worker by itself, or has the router.

    Raises ConfigError where nobody says what is needed, or two say different things.
    """
    asked = _flags(settings)
    if not set(settings.role.split(",")) <= WORKER_ROLES:
        if asked:
            raise ConfigError(
                f"{_listed(asked)}: a group is one worker, and --role={settings.role} is not workers alone"
            )
        return None
    own = {**_of_variables(environ), **asked}
    if own.get("size", ("", ""))[1] == "1":
        return None
    heard = [own, *(said for source in SCHEDULERS.values() if (said := source(environ)) and _several(said))]
    if not any(heard):
        return None
    place = _place(heard)
    if settings.tiers:
        raise ConfigError(f"{settings.tiers}: a worker of {place.size} processes (--group_size) keeps KV in HBM alone")
    return place


def _place(heard: list[Said]) -> GroupPlace:
    size_from, size = _number("size", heard, least=2)
    rank_from, rank = _number("rank", heard, least=0)
    if rank >= size:
        raise ConfigError(f"{rank_from} is {rank} and {size_from} is {size}: ranks are 0 to {size - 1}")
    host, port = _first("host", heard)[1], _first("port", heard)[1]
    return GroupPlace(_first("group", heard)[1], rank, size, f"{host}:{port}")


def _number(what: str, heard: list[Said], least: int) -> tuple[str, int]:
    """(who says it first, the number); all who say it agree."""
    found = [(who, _integer(who, text, least)) for said in heard if what in said for who, text in [said[what]]]
    if not found:
        raise ConfigError(f"nobody says the group's {what}: {_remedy(what, heard)}")
    first, number = found[0]
    for who, other in found[1:]:
        if other != number:
            raise ConfigError(f"{first} is {number} and {who} is {other}: they are the {what} of one group")
    return first, number


def _integer(who: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{who} is {text!r}, must be a number from {least} on")
    return int(text)


def _first(what: str, heard: list[Said]) -> tuple[str, str]:
    for said in heard:
        if what in said:
            return said[what]
    raise ConfigError(f"nobody says the group's {what}: {_remedy(what, heard)}")


def _remedy(what: str, heard: list[Said]) -> str:
    flag = {"group": "group=NAME", "size": "group_size=N", "rank": "group_rank=R"}.get(what, "coordinator=HOST:PORT")
    known = "; ".join(_listed(said) for said in heard if said)
    return f"give --{flag}, or start it by {', '.join(SCHEDULERS)} (heard: {known})"


def _listed(said: Said) -> str:
    return ", ".join(dict.fromkeys(f"{who}={text}" for who, text in said.values()))


def _several(said: Said) -> bool:
    """Whether a scheduler's word is of more processes than one."""
    return said.get("size", ("", "2"))[1] != "1"


# ---------------------------------------------------------------------- who says it


def _flags(settings: Settings) -> Said:
    given = {
        "group": settings.group,
        "group_size": str(settings.group_size or ""),
        "group_rank": "" if settings.group_rank < 0 else str(settings.group_rank),
        "coordinator": settings.coordinator,
    }
    return _own({name: (f"--{name}", text) for name, text in given.items() if text})


def _of_variables(environ: Environ) -> Said:
    names = {name: f"JDISAGG_{name.upper()}" for name in ("group", "group_size", "group_rank", "coordinator")}
    silent = {"group": "", "group_size": "0", "group_rank": "-1", "coordinator": ""}
    return _own({n: (who, environ[who]) for n, who in names.items() if environ.get(who, "") not in ("", silent[n])})


def _own(given: Said) -> Said:
    """Of our own four names; a coordinator of `:PORT` leaves its host to the scheduler."""
    short = {"group": "group", "group_size": "size", "group_rank": "rank"}
    found = {short[name]: value for name, value in given.items() if name in short}
    who, address = given.get("coordinator", ("", ""))
    host, _, port = address.rpartition(":")
    if address and not port.isdigit():
        raise ConfigError(f"{who} is {address!r}, must be HOST:PORT, or :PORT where a scheduler names the host")
    return {**found, **({"host": (who, host)} if host else {}), **({"port": (who, port)} if port else {})}


def _given(environ: Environ, **names: str) -> dict[str, tuple[str, str]]:
    """What these variables say, each by its name."""
    return {what: (name, environ[name]) for what, name in names.items() if environ.get(name)}


def _slurm(environ: Environ) -> Said:
    """Of a step (srun); a batch script alone is no member of anything."""
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not nodes or "SLURM_PROCID" not in environ:
        return {}
    tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    said = _given(environ, rank="SLURM_PROCID", size=tasks)
    if not _several(said):
        return said
    hosts = expand(nodes)
    step = f"{environ.get('SLURM_JOB_ID', '0')}-{environ.get('SLURM_STEP_ID', '0')}"
    said["group"] = ("SLURM_STEP_ID", f"slurm-{step}")
    said["host"] = ("SLURM_STEP_NODELIST", hosts[0] if len(hosts) > 1 else "127.0.0.1")
    said["port"] = ("SLURM_STEP_ID", str(step_port(step)))
    return {**said, **_given(environ, port="JAX_COORDINATOR_PORT")}


def step_port(step: str) -> int:
    """A coordinator's port of the job's own step: groups of one job, which may share a node, have different ones."""
    digest = hashlib.sha256(step.encode()).digest()
    return STEP_PORTS[int.from_bytes(digest[:4], "big") % len(STEP_PORTS)]


def _leader_worker_set(environ: Environ) -> Said:
    said = _given(environ, host="LWS_LEADER_ADDRESS", size="LWS_GROUP_SIZE", rank="LWS_WORKER_INDEX")
    if not {"host", "size"} <= said.keys():
        return {}
    leader = environ["LWS_LEADER_ADDRESS"].partition(".")[0]
    return {**said, "group": ("LWS_LEADER_ADDRESS", leader), "port": ("LWS_LEADER_ADDRESS", str(POD_PORT))}


def _job_set(environ: Environ) -> Said:
    """Names come from the pod's annotations, as the manifests here ask for them."""
    if not {"JOB_COMPLETION_INDEX", "JOBSET_NAME", "REPLICATED_JOB_NAME"} <= {k for k, v in environ.items() if v}:
        return {}
    name, index = environ["JOBSET_NAME"], environ.get("JOB_INDEX") or "0"
    group = f"{name}-{environ['REPLICATED_JOB_NAME']}-{index}"
    said = _given(environ, rank="JOB_COMPLETION_INDEX", size="NNODES")
    said["group"] = ("JOBSET_NAME", group)
    said["host"] = ("JOBSET_NAME", f"{group}-0.{environ.get('JOBSET_SUBDOMAIN') or name}")
    return {**said, "port": ("JOBSET_NAME", str(POD_PORT))}


def _tpu(environ: Environ) -> Said:
    """Of a slice of several hosts, as GKE and TPU VMs tell it."""
    hosts = [each.strip() for each in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if each.strip()]
    if not hosts or not environ.get("TPU_WORKER_ID"):
        return {}
    who = "TPU_WORKER_HOSTNAMES"
    group = hosts[0].partition(".")[0] if not hosts[0].replace(".", "").isdigit() else f"slice-{hosts[0]}"
    named = {"group": (who, group), "host": (who, hosts[0]), "port": (who, str(POD_PORT))}
    return {"size": (f"the number of {who}", str(len(hosts))), **_given(environ, rank="TPU_WORKER_ID"), **named}


SCHEDULERS: Mapping[str, Callable[[Environ], Said]] = {
    "SLURM (srun)": _slurm,
    "a LeaderWorkerSet": _leader_worker_set,
    "a JobSet": _job_set,
    "a TPU slice": _tpu,
}
