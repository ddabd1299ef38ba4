"""Meshes as text: `prefill:2xtp4,decode:pp2tp2` is two prefill workers of TP 4 and one decode worker of PP 2 x TP 2.

spec = pool {"," pool};  pool = role ["@" platform] ":" [count "x"] {("pp" | "ring" | "tp") number} ["@" device];
role = prefill | decode | colocated;  platform = cpu | gpu | tpu

`prefill:pp2tp4` computes a prompt's chunks by two stages of layers: the first computes the next chunk while the second
computes this one, for sites where tensor parallelism must not cross hosts. `decode:ring4tp2` has the devices and layers
of `decode:pp4tp2`, and runs all stages as one program over the whole mesh, several tokens per dispatch; only decode
workers can be rings.

`prefill@gpu:tp2,decode@cpu:tp1` has pools on unlike devices of one machine; either all pools name theirs, or none does.

Workers get consecutive devices. `@K` starts a pool at device K instead, so that pools may share devices:
`prefill:tp1@0,decode:tp1@0` puts both on one, for testing. Colocated workers may be combined with both other pools
(`prefill:tp1,decode:tp1,colocated:tp1`) and take requests that are better not shipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from jdisagg.core.errors import MeshError
from jdisagg.core.request import WorkerId

_POOL = re.compile(
    r"(?P<role>[a-z]+)(?:@(?P<platform>[a-z]+))?:(?:(?P<count>\d{1,5})x)?(?P<shape>(?:(?:pp|ring|tp)\d{1,5})+)(?:@(?P<first>\d{1,5}))?"
)
_AXIS = re.compile(r"(pp|ring|tp)(\d+)")
PLATFORMS = ("cpu", "gpu", "tpu")
GRAMMAR = (
    "prefill:[Nx][ppS][tpT][@K],decode:[Nx][ppS|ringS][tpT][@K] or colocated:[Nx][ppS][tpT][@K],"
    " K the first device's index; role@cpu, @gpu or @tpu for pools on unlike devices"
)


class Role(StrEnum):
    """The phases that a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both phases on one mesh: the handoff is a no-op

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Schedule(StrEnum):
    """The execution of a decode pipeline's stages."""

    STAGES = "stages"  # one program per stage, each on its own devices
    RING = "ring"  # one program over all stages


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of `count` equal workers of one role, each a mesh of `pp` stages by `tp` shards."""

    role: Role
    count: int = 1
    pp: int = 1
    tp: int = 1
    first_device: int | None = None  # None: the device after the pool before
    schedule: Schedule = Schedule.STAGES
    platform: str = ""  # of its devices; "": the platform of all pools

    def __str__(self) -> str:
        stages = "ring" if self.schedule is Schedule.RING else "pp"
        axes = (f"{stages}{self.pp}" if self.pp > 1 else "") + (f"tp{self.tp}" if self.tp > 1 or self.pp == 1 else "")
        at = "" if self.first_device is None else f"@{self.first_device}"
        role = f"{self.role}@{self.platform}" if self.platform else self.role.value
        return f"{role}:" + (f"{self.count}x" if self.count > 1 else "") + axes + at


@dataclass(frozen=True, slots=True)
class WorkerMesh:
    """The devices of one worker: `first_device` to `first_device + pp * tp`, stage-major."""

    worker: WorkerId
    role: Role
    pp: int
    tp: int
    first_device: int
    schedule: Schedule = Schedule.STAGES
    platform: str = ""

    @property
    def device_ids(self) -> range:
        return range(self.first_device, self.first_device + self.pp * self.tp)


@dataclass(frozen=True, slots=True)
class MeshSpec:
    pools: tuple[PoolSpec, ...]

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """Parses a mesh. Raises MeshError with the fault and the grammar."""
        spec = MeshSpec(MeshSpec.pools_of(text))
        roles = [pool.role for pool in spec.pools]
        if len(set(roles)) != len(roles):
            raise MeshError(f"mesh {text!r} names a role twice; write the count instead, as in prefill:2xtp4")
        if Role.COLOCATED not in roles and set(roles) != {Role.PREFILL, Role.DECODE}:
            missing = Role.DECODE if Role.PREFILL in roles else Role.PREFILL
            raise MeshError(f"mesh {text!r} has no {missing} pool; the grammar is {GRAMMAR}")
        if Role.COLOCATED in roles and len(roles) == 2:
            raise MeshError(f"mesh {text!r} has colocated workers beside one pool; there must be both others or none")
        if spec.is_ring and Role.COLOCATED in roles:
            raise MeshError(f"mesh {text!r}: a ring and colocated workers cut the layers differently")
        spec.check_platforms(text)
        stages = {pool.pp for pool in spec.pools if pool.role.decodes}
        if len(stages) > 1:
            raise MeshError(f"mesh {text!r}: the decode and the colocated pool must have equally many stages (pp)")
        return spec

    @staticmethod
    def pools_of(text: str) -> tuple[PoolSpec, ...]:
        """Parses pools that need not make a whole mesh. Raises MeshError."""
        return tuple(_parse_pool(part, text) for part in text.replace(" ", "").split(","))

    def __str__(self) -> str:
        return ",".join(str(pool) for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Returns the devices that the machine must have: up to the last one of any worker."""
        return max(place.device_ids.stop for place in self.workers())

    @property
    def decode_pp(self) -> int:
        """Returns the stages of the workers that decode; a prefill worker without stages runs its layers in as many
        groups."""
        return next(pool.pp for pool in self.pools if pool.role.decodes)

    @property
    def platforms(self) -> tuple[str, ...]:
        """Returns the platforms of its pools, each once, accelerators first; () if all use --platform."""
        return tuple(sorted({pool.platform for pool in self.pools if pool.platform}, key=lambda name: name == "cpu"))

    def check_platforms(self, text: str) -> None:
        """Raises MeshError unless every pool names its platform, or none does, and no device has two."""
        if self.platforms and not all(pool.platform for pool in self.pools):
            raise MeshError(f"mesh {text!r} names the platform of some pools: name each one's, or none's")
        if {"gpu", "tpu"} <= set(self.platforms):
            raise MeshError(f"mesh {text!r} names gpu and tpu, and no process has both")
        found = dict[int, str]()
        for place in self.workers():
            for device in place.device_ids:
                if found.setdefault(device, place.platform) != place.platform:
                    both = f"{found[device]} and {place.platform}"
                    raise MeshError(f"mesh {text!r}: device {device} cannot be of {both}; @K counts over all platforms")

    @property
    def is_ring(self) -> bool:
        """Returns True if the workers that decode run their stages as a ring."""
        return any(pool.schedule is Schedule.RING for pool in self.pools)

    def workers(self) -> tuple[WorkerMesh, ...]:
        """Returns every worker with its devices, in the order of the text."""
        placed, first = list[WorkerMesh](), 0
        for pool in self.pools:
            first = first if pool.first_device is None else pool.first_device
            for index in range(pool.count):
                worker = WorkerId(f"{pool.role}-{index}")
                placed.append(WorkerMesh(worker, pool.role, pool.pp, pool.tp, first, pool.schedule, pool.platform))
                first += pool.pp * pool.tp
        return tuple(placed)

    def place_of(self, *, decodes: bool) -> WorkerMesh:
        """Returns the first worker that decodes, or that computes prompts: one with only that role if there is one,
        else one of both."""
        only = Role.DECODE if decodes else Role.PREFILL
        places = self.workers()
        return next((each for each in places if each.role is only), places[0])

    def on_device(self) -> dict[int, tuple[WorkerId, ...]]:
        """Returns the workers on each used device; more than one if pools share devices."""
        places = self.workers()
        used = sorted({device for place in places for device in place.device_ids})
        return {device: tuple(p.worker for p in places if device in p.device_ids) for device in used}

    def shared(self) -> dict[tuple[WorkerId, ...], tuple[int, ...]]:
        """Returns the devices of each group of workers that share them; empty if no device is shared."""
        found: dict[tuple[WorkerId, ...], tuple[int, ...]] = {}
        for device, workers in self.on_device().items():
            if len(workers) > 1:
                found[workers] = (*found.get(workers, ()), device)
        return found


def _parse_pool(part: str, text: str) -> PoolSpec:
    match = _POOL.fullmatch(part)
    if match is None:
        raise MeshError(f"cannot read {part!r} in mesh {text!r}; the grammar is {GRAMMAR}")
    if match["role"] not in list(Role):
        raise MeshError(f"unknown role {match['role']!r} in mesh {text!r}; roles are {', '.join(Role)}")
    platform = match["platform"] or ""
    if platform not in ("", *PLATFORMS):
        raise MeshError(f"unknown platform {platform!r} in mesh {text!r}; platforms are {', '.join(PLATFORMS)}")
    axes = _AXIS.findall(match["shape"])
    sizes = {axis: int(size) for axis, size in axes}
    if len(sizes) != len(axes):
        raise MeshError(f"{part!r} in mesh {text!r} gives an axis twice")
    first = None if match["first"] is None else int(match["first"])
    if "pp" in sizes and "ring" in sizes:
        raise MeshError(f"{part!r} in mesh {text!r} says pp and ring; a ring's number is that of its stages")
    stages = sizes.get("ring", sizes.get("pp", 1))
    schedule = Schedule.RING if "ring" in sizes else Schedule.STAGES
    count, tp = int(match["count"] or 1), sizes.get("tp", 1)
    pool = PoolSpec(Role(match["role"]), count, stages, tp, first, schedule, platform)
    if min(pool.count, pool.pp, pool.tp) < 1:
        raise MeshError(f"{part!r} in mesh {text!r} has a size of 0; sizes start at 1")
    if pool.schedule is Schedule.RING and (pool.role is not Role.DECODE or pool.pp == 1):
        why = "takes 2 stages or more" if pool.role is Role.DECODE else "decodes and does nothing else"
        raise MeshError(f"{part!r} in mesh {text!r}: a ring {why}")
    return pool
