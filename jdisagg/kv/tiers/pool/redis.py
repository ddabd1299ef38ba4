"""A pool in Redis or Valkey: pages as values with a time to live, batches as pipelines.

The server says how much it holds (`maxmemory`, `allkeys-lru`). It is given no longer than `timeout_s` for a batch: one
that is slow costs that much and no more, and its caller leaves it alone for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jdisagg.kv.tiers.pool.open import framed, key_of, unframe
from jdisagg.kv.tiers.stores import Good, PoolFailed

BATCH_BYTES = 8 << 20  # of one pipeline, that its replies never fill the memory of both ends


class RedisPool:
    """Implements `Store` by names."""

    def __init__(self, url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> None:
        """Connects when it is first asked: a pool that is not there yet may come."""
        self._fingerprint, self._ttl_s = fingerprint, max(1, round(ttl_s))
        once_more = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))  # the server was started again
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, decode_responses=False, retry=once_more
        )

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Those that are there already live longer, and are not sent again."""
        keys = [key_of(self._fingerprint, name) for name in names]
        there = self._ask([("EXPIRE", key, self._ttl_s) for key in keys])
        good = [reply == 1 for reply in there]
        lacking = [at for at, reply in enumerate(good) if not reply]
        for batch in batches(lacking, records.shape[1]):
            replies = self._ask([("SET", keys[at], framed(keys[at], records[at]), "EX", self._ttl_s) for at in batch])
            for at, reply in zip(batch, replies, strict=True):
                good[at] = reply in (True, b"OK")
        return tuple(good)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """What is broken is taken away: else whoever puts it would find it there."""
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
        """Replies in order; one that the server refuses (it is full) is its error. Raises PoolFailed."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError) as error:
            raise PoolFailed(f"the pool: {type(error).__name__}: {str(error)[:200]}") from error

    def close(self) -> None:
        self._client.close()


def batches(items: Sequence[int], record_bytes: int) -> list[Sequence[int]]:
    """Of so many bytes at most, or one."""
    size = max(1, BATCH_BYTES // record_bytes)
    return [items[start : start + size] for start in range(0, len(items), size)]


def open_pool(url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> RedisPool:
    return RedisPool(url, fingerprint, ttl_s=ttl_s, timeout_s=timeout_s)
