"""Opens the shared pool that a URL names, and frames its records."""

from __future__ import annotations

import hashlib
import struct
from importlib import import_module

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.kv.tiers.records import DIGEST_BYTES, digest_of
from jdisagg.kv.tiers.stores import PageStore

BACKENDS = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "s3": "objects",
    "gs": "objects",
    "file": "objects",
    "mooncake": "mooncake",
}
EXTRAS = {"mooncake": "mooncake"}  # scheme -> extra that installs the backend's package
TTL_S = 24 * 3600.0  # time to live of a page after its last use
TIMEOUT_S = 2.0  # per batch; a longer wait rarely pays


def open_pool(url: str, fingerprint: str, *, ttl_s: float = TTL_S, timeout_s: float = TIMEOUT_S) -> PageStore:
    """Opens the pool of `url`. Raises ConfigError if there is no such backend or its package is missing."""
    scheme = url.partition("://")[0]
    backend = BACKENDS.get(scheme)
    if backend is None or "://" not in url:
        known = ", ".join(f"{each}://" for each in BACKENDS)
        raise ConfigError(f"--pool={url!r} must begin with one of {known}")
    try:
        module = import_module(f"jdisagg.kv.tiers.pool.{backend}")
    except ImportError as error:
        raise ConfigError(
            f"--pool={url}: {error.name} is not installed; pip install -e '.[{EXTRAS.get(scheme, 'pool')}]'"
        ) from error
    try:
        return module.open_pool(url, fingerprint, ttl_s=ttl_s, timeout_s=timeout_s)
    except Exception as error:
        raise ConfigError(f"--pool={url}: {type(error).__name__}: {str(error)[:200]}") from error


# A record as a shared pool stores it, so that a truncated or foreign record is noticed:
#
#     magic, version | bytes of the record | digest | record
#
# A pool stores a frame whole or not at all (a SET, a PUT of an object), so a partly written one is never read. The
# digest is for faults outside the protocol: corrupted memory, a torn file, a server that speaks another protocol.

HEAD = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
MAGIC = b"jdiskv1\n"


def framed(key: str, record: np.ndarray) -> bytes:
    """Returns the frame of a record u8[n]."""
    return b"".join((HEAD.pack(MAGIC, len(record), _digest(key, record)), record.data))


def frame_into(key: str, record: np.ndarray, frame: np.ndarray) -> None:
    """Writes the frame of a record u8[n] into u8[HEAD.size + n]."""
    HEAD.pack_into(frame.data, 0, MAGIC, len(record), _digest(key, record))
    frame[HEAD.size :] = record


def unframe(key: str, frame: bytes | memoryview, record: np.ndarray) -> bool:
    """Fills u8[n] from a frame; False unless the frame is that of this key's record, complete and intact."""
    if len(frame) != HEAD.size + len(record):
        return False
    magic, size, digest = HEAD.unpack_from(frame)
    if magic != MAGIC or size != len(record):
        return False
    record[:] = np.frombuffer(frame, np.uint8, offset=HEAD.size)
    return _digest(key, record) == digest


def _digest(key: str, record: np.ndarray) -> bytes:
    """Returns the digest of the record and its key, so that a record under another key is refused."""
    return hashlib.blake2b(key.encode() + digest_of(record), digest_size=DIGEST_BYTES).digest()


def key_of(fingerprint: str, name: bytes) -> str:
    """Returns the key of a page; records of another fingerprint have other keys even for the same tokens."""
    return f"jdisagg/{fingerprint}/{name.hex()}"
