"""Which transport two processes use, a pure function of what each says of itself, and opening one by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import jdisagg
from jdisagg.core.codec import convert
from jdisagg.core.errors import ConfigError, DecodeError, PeerMismatch, TransferRefused
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.inproc import InprocTransport
from jdisagg.kv.transport.jax_transfer import jax_transfer
from jdisagg.kv.transport.shm import shm
from jdisagg.kv.transport.tcp import tcp
from jdisagg.kv.transport.ticket import Transport

PROCESS = secrets.token_hex(8)  # of this process, for as long as it lives
NAMES = ("inproc", "shm", "jax_transfer", "tcp", "nixl")


@dataclass(frozen=True, slots=True)
class Capability:
    """What a process says of itself to whoever might share KV with it; JSON-safe by `asdict`."""

    host: str  # equal where memory can be shared and local sockets reached
    process: str
    platform: str  # of its devices: cpu, cuda, tpu
    version: str
    jax_version: str
    transports: tuple[str, ...]  # that it can open

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_capability(record: Any) -> Capability:
    """Returns the capability of a peer's record. Raises PeerMismatch."""
    try:
        return convert(Capability, record)
    except DecodeError as error:
        raise PeerMismatch(f"a peer's capability cannot be read: {error}") from error


def capability(platform: str) -> Capability:
    """Of this process."""
    return Capability(host_id(), PROCESS, platform, jdisagg.__version__, jax.__version__, available())


def host_id() -> str:
    """The running kernel and, in a container, its network: abstract sockets are of one network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if not boot.exists() or not network.is_symlink():
        return PROCESS
    return f"{boot.read_text().strip()} {network.readlink()} {os.getuid()}"


def available() -> tuple[str, ...]:
    """Transports that this process can open."""
    there = {
        "shm": sys.platform == "linux",
        "nixl": importlib.util.find_spec("nixl_cu12") is not None,
        "jax_transfer": sys.platform == "linux",
    }
    return tuple(name for name in NAMES if there.get(name, True))


def fits(name: str, mine: Capability, theirs: Capability) -> bool:
    """Whether both ends can use it with each other."""
    if mine.version != theirs.version or name not in mine.transports or name not in theirs.transports:
        return False
    accelerated = mine.platform == theirs.platform != "cpu"
    rules = {
        "inproc": mine.process == theirs.process,
        "shm": mine.host == theirs.host,
        "jax_transfer": accelerated and mine.jax_version == theirs.jax_version,
    }
    return rules.get(name, True)


def choose(mine: Capability, theirs: Capability, wanted: str = "auto") -> str:
    """The fastest transport that both ends share: inproc, shm, jax_transfer between accelerators, else tcp.

    `wanted` names one instead; nixl is only used so. Raises PeerMismatch with both versions, or TransferRefused with
    both lists.
    """
    if mine.version != theirs.version:
        raise PeerMismatch(f"the peer runs jdisagg {theirs.version!r}, we run {mine.version!r}")
    order = ("inproc", "shm", "jax_transfer", "tcp") if wanted == "auto" else (wanted,)
    # one that was asked for need not be the fastest: jax_transfer runs between CPUs as well
    able = [name for name in order if fits(name, mine, theirs) or (name == wanted and _shared(name, mine, theirs))]
    if not able:
        raise TransferRefused(f"no transport {wanted!r} for us {mine} and the peer {theirs}")
    return able[0]


def _shared(name: str, mine: Capability, theirs: Capability) -> bool:
    anywhere = name in ("jax_transfer", "nixl", "tcp")
    return anywhere and name in mine.transports and name in theirs.transports


def open_transport(name: str, config: TransportConfig) -> Transport:
    """A new transport of that name. Raises ConfigError where there is none."""
    makers: dict[str, Callable[[TransportConfig], Transport]] = {
        "inproc": InprocTransport,
        "shm": shm,
        "jax_transfer": jax_transfer,
        "tcp": tcp,
    }
    if name not in NAMES:
        raise ConfigError(f"{name!r} is no transport; there are {', '.join(NAMES)}")
    if name not in available():
        raise ConfigError(f"transport {name!r} is not to be had here: there are {', '.join(available())}")
    if name == "nixl":  # an extra: its module is only there to import where the wheel is
        return importlib.import_module("jdisagg.kv.transport.nixl").nixl(config)
    return makers[name](config)
