"""Profile of a run's own programs on its own devices: the times that a simulation uses, as one JSON file.

Seconds are medians of interleaved repeats. A pool stands for all workers of its role, tp and pp.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from jdisagg.core.codec import decode, encode
from jdisagg.core.errors import ConfigError, DecodeError
from jdisagg.core.worker_config import WorkerConfig

VERSION = 2
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The time of a chunk of `tokens` tokens behind `context` cached tokens of the same prompt."""

    bucket_tokens: int
    tokens: int
    context: int
    seconds: float  # until its sampled token is on the host


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """The time of a step of one microbatch with `batch` active slots of `context` tokens each; for a ring, of a
    dispatch."""

    table_pages: int
    batch: int
    context: int
    seconds: float  # from one step to the next, with steps dispatched ahead as in the run
    stages: tuple[
        float, ...
    ]  # of each stage alone, without sampling (see `Pool`); empty for a ring, which is one program
    turns: int = 1  # tokens per slot


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The time of one KV chunk to a decode worker in this process: all layers of `pages` pages, or one layer
    group's."""

    mode: str  # "chunk": all layers at once; "layer": one group
    wire: str
    pages: int
    size_bytes: int
    ship_s: float  # to pack and to land on the destination's devices
    insert_s: float  # to check and to write into pages

    @property
    def seconds(self) -> float:
        return self.ship_s + self.insert_s


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """The time of one declared program over null pages and idle slots, independent of the load."""

    kind: str
    stage: int
    size: int  # tokens of a chunk, pages of a table, rows of a sampling program
    seconds: float


@dataclass(frozen=True, slots=True)
class Pool:
    """The times of one kind of worker; a prefill worker has no decode times, and vice versa."""

    config: WorkerConfig  # of the first worker
    tp: int
    pp: int
    prefill: tuple[PrefillTime, ...] = ()
    decode: tuple[DecodeTime, ...] = ()
    first_draw_s: float = 0.0  # sampling from a chunk's logits
    draw_s: float = 0.0  # sampling from a step's logits
    admit_s: float = 0.0  # additional time of a step that admits sequences
    programs: tuple[ProgramTime, ...] = ()  # all programs of its steps


@dataclass(frozen=True, slots=True)
class Host:
    """The host time that actors, driver and threads add to the executors' own times, for a lone request."""

    prefill_s: float = 0.0  # per prefill plan
    decode_s: float = 0.0  # per decode step
    message_s: float = 0.0  # per message between actors


@dataclass(frozen=True, slots=True)
class Checked:
    """The deviation of a simulation with this profile from a live run, when last compared. Shares, not percent."""

    when: str
    workload: str
    errors: dict[str, float]  # errors of the means, by name: (simulated - live) / live
    mape: float  # mean of the errors' absolute values


@dataclass(frozen=True, slots=True)
class Profile:
    """The contents of a profile file. `slowdown[a][b]` is how much longer phase a takes while another device of the
    machine is busy with b. 0: the devices are independent. Meshes of virtual CPU devices share cores and memory, and
    are not independent."""

    machine: str
    platform: str
    date: str
    mesh: str
    model: str
    dtype: str
    page_size: int
    num_layers: int
    kv_bytes_per_token: int
    repeats: int
    pools: tuple[Pool, ...]
    transfers: tuple[TransferTime, ...] = ()
    host: Host = Host()
    slowdown: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    checked: Checked | None = None

    def to_json(self) -> str:
        record = asdict(self)
        for pool, written in zip(self.pools, record["pools"], strict=True):
            written["config"] = encode(pool.config)
        return json.dumps({"version": VERSION, **record}, indent=1) + "\n"

    def save(self, path: Path | str) -> None:
        """Writes the file. Raises ConfigError if it cannot be written."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"profile {path}: {error.strerror}") from error

    def with_check(self, checked: Checked) -> Profile:
        return replace(self, checked=checked)


def read_profile(path: Path | str) -> Profile:
    """Reads a file that `save` wrote. Raises ConfigError, in one line, for any other."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"profile {path} is not JSON: {error}") from error
    found = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    version = found.pop("version", None)
    if version != VERSION:
        raise ConfigError(f"profile {path} is of version {version}, this program reads {VERSION}")
    try:
        return _profile(found)
    except (KeyError, TypeError, ValueError, DecodeError) as error:
        raise ConfigError(f"profile {path} cannot be read: {type(error).__name__}: {error}") from error


def _profile(record: dict[str, Any]) -> Profile:
    read: dict[str, Any] = {
        "pools": tuple(_pool(each) for each in record["pools"]),
        "transfers": tuple(TransferTime(**each) for each in record["transfers"]),
        "host": Host(**record["host"]),
        "checked": Checked(**record["checked"]) if record["checked"] else None,
    }
    return Profile(**{**record, **read})


def _pool(record: dict[str, Any]) -> Pool:
    read: dict[str, Any] = {
        "config": decode(record["config"]),
        "prefill": tuple(PrefillTime(**each) for each in record["prefill"]),
        "decode": tuple(_decode_time(each) for each in record["decode"]),
        "programs": tuple(ProgramTime(**each) for each in record.get("programs", ())),
    }
    return Pool(**{**record, **read})


def _decode_time(record: dict[str, Any]) -> DecodeTime:
    stages: dict[str, Any] = {"stages": tuple(record["stages"])}
    return DecodeTime(**{**record, **stages})
