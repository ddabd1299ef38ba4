"""A shared pool in Redis or Valkey: pages are values with a time to live, batches are pipelines.

The server limits its memory (`maxmemory`, `allkeys-lru`). It has `timeout_s` for a batch: a slow batch costs that
much and no more, and its caller then does not use the pool for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jdisagg.kv.tiers.pool.open import framed, key_of, unframe
from jdisagg.kv.tiers.stores import Good, PoolError

BATCH_BYTES = 8 << 20  # per pipeline, so that its replies never fill the memory of both ends


class RedisPool:
    """Implements `PageStore` by names in Redis."""

    def __init__(self, url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> None:
        """Sets the client up; it connects at its first request, so the pool may start later."""
        self._fingerprint, self._ttl_s = fingerprint, max(1, round(ttl_s))
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))  # for a server that was restarted
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, decode_responses=False, retry=retry
        )

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Puts the pages; renews the time to live of those already there instead of sending them again."""
        keys = [key_of(self._fingerprint, name) for name in names]
        renewed = self._ask([("EXPIRE", key, self._ttl_s) for key in keys])
        good = [reply == 1 for reply in renewed]
        missing = [at for at, reply in enumerate(good) if not reply]
        for batch in batches(missing, records.shape[1]):
            replies = self._ask([("SET", keys[at], framed(keys[at], records[at]), "EX", self._ttl_s) for at in batch])
            for at, reply in zip(batch, replies, strict=True):
                good[at] = reply in (True, b"OK")
        return tuple(good)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Gets the pages; removes broken ones, since a later put would otherwise find them there."""
        keys = [key_of(self._fingerprint, name) for name in names]
        good, broken = [False] * len(names), list[str]()
        for batch in batches(range(len(names)), records.shape[1]):
            for at, reply in zip(batch, self._ask([("GET", keys[at]) for at in batch]), strict=True):
                good[at] = isinstance(reply, bytes) and unframe(keys[at], reply, records[at])
                if reply is not None and not good[at]:
                    broken.append(keys[at])
        if broken:
            self._ask([("UNLINK", *broken)])
        return tuple(good)

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the replies in order; a command that the server refuses (full) gives its error. Raises PoolError."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError) as error:
            raise PoolError(f"the pool: {type(error).__name__}: {str(error)[:200]}") from error

    def close(self) -> None:
        self._client.close()


def batches(items: Sequence[int], record_bytes: int) -> list[Sequence[int]]:
    """Splits the items into batches of at most `BATCH_BYTES` or one item each."""
    size = max(1, BATCH_BYTES // record_bytes)
    return [items[start : start + size] for start in range(0, len(items), size)]


def open_pool(url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> RedisPool:
    return RedisPool(url, fingerprint, ttl_s=ttl_s, timeout_s=timeout_s)
