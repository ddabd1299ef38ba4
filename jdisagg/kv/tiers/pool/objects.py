"""A shared pool in an object store or a folder: one object per page, which is written whole or not at all.

This module deletes only broken objects: expiry is the task of the bucket's lifecycle rules, or of the folder's
owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from jdisagg.kv.tiers.pool.open import framed, key_of, unframe
from jdisagg.kv.tiers.stores import Good, PoolError

THREADS = 8


class ObjectPool:
    """Implements `PageStore` by names in an object store."""

    def __init__(self, store: Any, fingerprint: str) -> None:
        self._store, self._fingerprint = store, fingerprint
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        return self._each(self._put, names, records)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        return self._each(self._get, names, records)

    def _each(self, one: Callable[[bytes, np.ndarray], bool], names: Sequence[bytes], records: np.ndarray) -> Good:
        try:
            return tuple(self._threads.map(one, names, records))
        except (BaseError, OSError) as error:
            raise PoolError(f"the pool: {type(error).__name__}: {str(error)[:200]}") from error

    def _put(self, name: bytes, record: np.ndarray) -> bool:
        key = key_of(self._fingerprint, name)
        if not self._is_stored(key, len(record)):
            obstore.put(self._store, key, framed(key, record), use_multipart=False)
        return True

    def _is_stored(self, key: str, record_bytes: int) -> bool:
        try:
            return obstore.head(self._store, key)["size"] >= record_bytes
        except FileNotFoundError:
            return False

    def _get(self, name: bytes, record: np.ndarray) -> bool:
        key = key_of(self._fingerprint, name)
        try:
            content = obstore.get(self._store, key).bytes()
        except FileNotFoundError:
            return False
        good = unframe(key, memoryview(content), record)
        if not good:
            obstore.delete(self._store, key)  # otherwise a later put would find it there
        return good

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def open_pool(url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> ObjectPool:
    """Opens the object store or folder of `url`. Credentials come from the environment, as for other clients of that
    cloud."""
    options: dict[str, Any] = {}
    if url.startswith("file:"):
        options["mkdir"] = True
    else:
        options["client_options"] = {"timeout": f"{timeout_s:g}s", "connect_timeout": f"{timeout_s:g}s"}
        options["retry_config"] = {"max_retries": 0}
    return ObjectPool(from_url(url, **options), fingerprint)
