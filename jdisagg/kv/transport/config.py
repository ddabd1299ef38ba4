"""TransportConfig: what one end of a transport requires, and its time and size limits. None of them is a flag."""

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

# An emulated link: a token bucket that computes when bytes would have arrived over a slower network.
#
# `TokenBucket` computes on given times; a `EmulatedLink` adds a clock and is shared by all pulls over it.


@dataclass(slots=True)
class TokenBucket:
    """Bytes are sent in order at `bytes_per_s` after a burst of at most `burst_bytes`, and arrive `latency_s` later."""

    bytes_per_s: float
    latency_s: float = 0.0
    burst_bytes: float = 0.0
    _level: float = field(default=0.0, init=False)  # bytes queued and not yet sent, at _at_s
    _at_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0 or self.burst_bytes < 0:
            raise ConfigError(f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s cannot be")

    def send(self, now_s: float, nbytes: int) -> float:
        """Returns the time at which `nbytes`, queued now behind all earlier bytes, will have arrived."""
        assert nbytes >= 0, nbytes
        if now_s > self._at_s:
            sent = (now_s - self._at_s) * self.bytes_per_s
            self._level, self._at_s = max(0.0, self._level - sent), now_s
        self._level += nbytes
        return self._at_s + max(0.0, self._level - self.burst_bytes) / self.bytes_per_s + self.latency_s


class EmulatedLink:
    """A token bucket shared by several threads. Set it in the `TransportConfig` of the destination."""

    def __init__(self, gbit_per_s: float, latency_s: float = 0.0) -> None:
        self.gbit_per_s, self.latency_s = gbit_per_s, latency_s
        self._bucket = TokenBucket(gbit_per_s * 1e9 / 8, latency_s)
        self._lock = threading.Lock()

    def send(self, now_s: float, nbytes: int) -> float:
        """Returns the arrival time of the bytes, in seconds of the same clock."""
        with self._lock:
            return self._bucket.send(now_s, nbytes)


SHORTEST_SECRET = 16  # bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that both ends must share before any KV is sent; exchanged, signed, at every handshake."""

    model: str  # fingerprint of the weights and the configuration
    layout: str  # layout of the pages: heads, dimension, page size
    dtype: str  # dtype of the KV on the connection
    version: str = jdisagg.__version__
    weights: str = "dtype"  # value of --weight_dtype: KV of rounded weights differs from the full model's

    @property
    def fingerprint(self) -> str:
        """Returns twelve hex digits that the two ends compare."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """The settings of one end. All deadlines are seconds of `clock`."""

    secret: bytes = field(repr=False)  # shared by all processes of a cluster
    identity: Identity
    listen: str = "127.0.0.1:0"  # HOST:PORT where offers are pulled from; port 0 picks a free one
    advertise: str = ""  # HOST in tickets, if it differs from the one of `listen`
    offer_limit_bytes: int = 4 << 30
    pull_limit_bytes: int = 4 << 30
    control_timeout_s: float = 2.0  # for connecting, a handshake, an ack and a cancel
    idle_timeout_s: float = 300.0  # an unused connection is closed after this time
    max_connections: int = 256
    tls_server: ssl.SSLContext | None = field(default=None, repr=False)
    tls_client: ssl.SSLContext | None = field(default=None, repr=False)
    link: EmulatedLink | None = None  # emulated link: pulls take as long as they would over it
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        if len(self.secret) < SHORTEST_SECRET:
            raise ConfigError(f"the shared secret has {len(self.secret)} bytes, fewer than {SHORTEST_SECRET}")
        if (self.tls_server is None) != (self.tls_client is None):
            raise ConfigError("TLS needs a context for each direction: tls_server and tls_client")
