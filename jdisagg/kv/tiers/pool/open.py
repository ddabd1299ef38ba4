"""The pool that a URL names."""

from __future__ import annotations

import hashlib
import struct
from importlib import import_module

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.kv.tiers.records import DIGEST_BYTES, digest_of
from jdisagg.kv.tiers.stores import Store

BACKENDS = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "s3": "objects",
    "gs": "objects",
    "file": "objects",
    "mooncake": "mooncake",
}
EXTRAS = {"mooncake": "mooncake"}  # that bring a backend's package
TTL_S = 24 * 3600.0  # that nobody asked for a page
TIMEOUT_S = 2.0  # for one batch: longer than that it is rarely worth waiting for


def open_pool(url: str, fingerprint: str, *, ttl_s: float = TTL_S, timeout_s: float = TIMEOUT_S) -> Store:
    """Raises ConfigError where there is no such backend, or its package is missing."""
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


# A record as it lies in a pool: whoever reads half of one, or of something else, finds it out.
#
#     magic, version | bytes of the record | digest | record
#
# A pool takes a frame whole or not at all (a SET, a PUT of an object), so that nobody reads one that is being
# written; the digest is for what no protocol promises: memory that lied, a disk that tore a file, a server that
# is none.

HEAD = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
MAGIC = b"jdiskv1\n"


def framed(key: str, record: np.ndarray) -> bytes:
    """Of u8[n]."""
    return b"".join((HEAD.pack(MAGIC, len(record), _digest(key, record)), record.data))


def frame_into(key: str, record: np.ndarray, place: np.ndarray) -> None:
    """Fills u8[HEAD.size + n], of u8[n]."""
    HEAD.pack_into(place.data, 0, MAGIC, len(record), _digest(key, record))
    place[HEAD.size :] = record


def unframe(key: str, frame: bytes | memoryview, record: np.ndarray) -> bool:
    """Fills u8[n]; False where the frame is not that of this key's record, whole."""
    if len(frame) != HEAD.size + len(record):
        return False
    magic, size, digest = HEAD.unpack_from(frame)
    if magic != MAGIC or size != len(record):
        return False
    record[:] = np.frombuffer(frame, np.uint8, offset=HEAD.size)
    return _digest(key, record) == digest


def _digest(key: str, record: np.ndarray) -> bytes:
    """Of the key as well: a record that was put under another is another's."""
    return hashlib.blake2b(key.encode() + digest_of(record), digest_size=DIGEST_BYTES).digest()


def key_of(fingerprint: str, name: bytes) -> str:
    """Records that mean something else have other keys, though their tokens be the same."""
    return f"jdisagg/{fingerprint}/{name.hex()}"
