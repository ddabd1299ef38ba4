"""TransportConfig: what one end of a transport insists on, and how long and how much it allows. Nothing here is a
flag.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import time
from dataclasses import asdict, dataclass, field

import jdisagg
from jdisagg.core.errors import ConfigError
from jdisagg.kv.transport.deadline import Clock
from jdisagg.kv.transport.link import Link

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
