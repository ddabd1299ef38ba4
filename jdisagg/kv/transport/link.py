"""An emulated link: a token bucket that says when bytes would have arrived over a slower wire than the real one.

`TokenBucket` is arithmetic over times that are given to it; a `Link` puts it on a clock, for all pulls that share it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from jdisagg.core.errors import ConfigError


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
