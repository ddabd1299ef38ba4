"""TransportConfig: what one end of a transport insists on, and how long and how much it allows. Nothing here is a
flag.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
import time
from dataclasses import asdict, dataclass, field

import jdisagg
from jdisagg.core.errors import ConfigError
from jdisagg.kv.transport.connection import Clock

# An emulated link: a token bucket that says when bytes would have arrived over a slower wire than the real one.
#
# `TokenBucket` is arithmetic over times that are given to it; a `Link` puts it on a clock, for all pulls that
# share it.


@dataclass(slots=True)
class TokenBucket:
    """Bytes leave in turn at `bytes_per_s`, after at most `burst_bytes` at once, and land `latency_s` later."""

    bytes_per_s: float
    latency_s: float = 0.0
    burst_bytes: float = 0.0
    _level: float = field(default=0.0, init=False)  # bytes promised and not yet gone, at _at_s
    _at_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0 or self.burst_bytes < 0:
            raise ConfigError(f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s cannot be")

    def send(self, now_s: float, nbytes: int) -> float:
        """When `nbytes`, put on the connection now behind all that went before, will have landed."""
        assert nbytes >= 0, nbytes
        if now_s > self._at_s:
            gone = (now_s - self._at_s) * self.bytes_per_s
            self._level, self._at_s = max(0.0, self._level - gone), now_s
        self._level += nbytes
        return self._at_s + max(0.0, self._level - self.burst_bytes) / self.bytes_per_s + self.latency_s


class Link:
    """A token bucket that many threads share. Give one to the `TransportConfig` of the destination."""

    def __init__(self, gbit_per_s: float, latency_s: float = 0.0) -> None:
        self.gbit_per_s, self.latency_s = gbit_per_s, latency_s
        self._bucket = TokenBucket(gbit_per_s * 1e9 / 8, latency_s)
        self._lock = threading.Lock()

    def send(self, now_s: float, nbytes: int) -> float:
        """When the bytes will have landed, seconds of the same clock."""
        with self._lock:
            return self._bucket.send(now_s, nbytes)


SHORTEST_SECRET = 16  # bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """What both ends must agree on before a byte of KV moves; exchanged, signed, at every handshake."""

    model: str  # fingerprint of the weights and the configuration
    layout: str  # of the pages: heads, dimension, page size, as both sides must understand them
    dtype: str  # of the KV on the connection
    version: str = jdisagg.__version__
    weights: str = "dtype"  # as --weight_dtype asks for them: KV of rounded weights is not the full model's

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that two ends compare."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """One end's settings. All deadlines are seconds of `clock`."""

    secret: bytes = field(repr=False)  # shared by all processes of a cluster
    identity: Identity
    listen: str = "127.0.0.1:0"  # HOST:PORT where offers are pulled from; port 0 picks one
    advertise: str = ""  # HOST that tickets name, where it is not the one of `listen`
    offer_limit_bytes: int = 4 << 30
    pull_limit_bytes: int = 4 << 30
    control_timeout_s: float = 2.0  # connecting, a handshake, an ack, a cancel
    idle_timeout_s: float = 300.0  # then an unused connection is closed
    max_connections: int = 256
    tls_server: ssl.SSLContext | None = field(default=None, repr=False)
    tls_client: ssl.SSLContext | None = field(default=None, repr=False)
    link: Link | None = None  # emulated: pulls take as long as they would over it
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        if len(self.secret) < SHORTEST_SECRET:
            raise ConfigError(f"the shared secret has {len(self.secret)} bytes, fewer than {SHORTEST_SECRET}")
        if (self.tls_server is None) != (self.tls_client is None):
            raise ConfigError("TLS needs a context for each direction: tls_server and tls_client")
