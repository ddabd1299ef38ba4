"""A shared pool in a Mooncake store: pages are objects in the memory of its nodes, found through its master.

Mooncake's client runs in a process of its own because it can block its caller: it waits up to 90 s, with all threads
of its process, for a master that does not answer. Frames are in memory shared with that process, and requests go
through a pipe. A client that has not answered within `timeout_s` is killed, and the next batch starts a new one.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from jdisagg.kv.tiers.pool.open import HEAD, frame_into, key_of, unframe
from jdisagg.kv.tiers.stores import Good, PoolError

if find_spec("mooncake") is None:
    raise ModuleNotFoundError("No module named 'mooncake'", name="mooncake")

BATCH_BYTES = 32 << 20  # of frames per batch in the shared memory
START_S = 20.0  # time limit for the start of a client
PAUSE_S, PAUSES = 0.05, 4  # between tries to put pages that had no room; the store evicts only on request
ABSENT = {-703: "is being written", -704: "is not there", -707: "was given up while it was read"}
FULL = {-200: "no room"}
BROKEN = {-600: "is longer than a page"}
OPTIONS = {"protocol": "tcp", "device_name": "", "local_hostname": ""}


class MooncakePool:
    """Implements `PageStore` by names. One batch runs at a time; a second one waits within its own timeout."""

    def __init__(
        self, master: str, fingerprint: str, *, timeout_s: float, enter: Sequence[str] = (), **how: str
    ) -> None:
        """Starts the client; requests fail until it is ready. `enter` is a command prefix that starts the client
        elsewhere, as in another network namespace. `how` takes `OPTIONS`."""
        self._fingerprint, self._timeout_s, self._enter = fingerprint, timeout_s, tuple(enter)
        self._how = {**OPTIONS, **how, "master": master}
        self._batch_lock = threading.Lock()
        self._client: _Client | None = _Client(self._how, BATCH_BYTES, self._enter)

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Puts the pages; one that is already there is left unchanged."""
        keys = [key_of(self._fingerprint, name) for name in names]
        codes = self._write(keys, records)
        for _ in range(PAUSES):
            full = [at for at, code in enumerate(codes) if code in FULL]
            if full:
                time.sleep(PAUSE_S)
                for at, code in zip(full, self._write([keys[at] for at in full], records[full]), strict=True):
                    codes[at] = code
        return _good_pages("put", codes, [code == 0 for code in codes])

    def _write(self, keys: Sequence[str], records: np.ndarray) -> list[int]:
        def frames(client: _Client, batch: Sequence[int]) -> None:
            for index, at in enumerate(batch):
                frame_into(keys[at], records[at], client.frame(index, records.shape[1]))

        return self._each("put", keys, records.shape[1], before=frames)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Gets the pages; removes broken ones, since a later put would otherwise find them there."""
        keys, good = [key_of(self._fingerprint, name) for name in names], [False] * len(names)
        size, broken = records.shape[1], list[str]()

        def read(client: _Client, batch: Sequence[int], codes: Sequence[int]) -> None:
            for index, (at, code) in enumerate(zip(batch, codes, strict=True)):
                if code > 0:
                    good[at] = unframe(keys[at], client.frame(index, size)[:code].data, records[at])
                if (code > 0 and not good[at]) or code in BROKEN:
                    broken.append(keys[at])

        codes = self._each("get", keys, size, after=read)
        if broken:
            self._each("remove", broken, 0)
        return _good_pages("get", codes, good)

    def _each(
        self, what: str, keys: Sequence[str], record_bytes: int, before: Any = None, after: Any = None
    ) -> list[int]:
        """Returns the client's code for each key. Raises PoolError if it does not answer in time."""
        until_s, codes = time.monotonic() + self._timeout_s, list[int]()
        if not self._batch_lock.acquire(timeout=self._timeout_s):
            raise PoolError(f"the pool: no turn for {what} within {self._timeout_s:g} s")
        try:
            client = self._started(until_s, HEAD.size + record_bytes)
            size = max(1, client.staging_bytes // (HEAD.size + record_bytes))
            for start in range(0, len(keys), size):
                batch = range(start, min(start + size, len(keys)))
                if before is not None:
                    before(client, batch)
                frame_bytes = HEAD.size + record_bytes if record_bytes else 0
                answered = client.ask((what, [keys[at] for at in batch], frame_bytes), until_s)
                if after is not None:
                    after(client, batch, answered)
                codes += answered
            return codes
        except (OSError, EOFError) as error:
            self._end()
            raise PoolError(f"the pool: {what}: {type(error).__name__}: {str(error)[:200]}") from error
        finally:
            self._batch_lock.release()

    def _started(self, until_s: float, frame_bytes: int) -> _Client:
        """Returns the client. One that is still starting continues to start and is checked again at the next batch."""
        if self._client is not None and self._client.staging_bytes < frame_bytes:
            self._end()
        if self._client is None:
            self._client = _Client(self._how, max(BATCH_BYTES, frame_bytes), self._enter)
        if not self._client.is_started(until_s):
            raise PoolError(f"the pool: no client of {self._how['master']} yet")
        return self._client

    def _end(self) -> None:
        if self._client is not None:
            self._client.end()
            self._client = None

    def close(self) -> None:
        self._end()


def _good_pages(what: str, codes: Sequence[int], good: list[bool]) -> Good:
    """Returns which pages succeeded. Raises PoolError if none did for another reason than absence or a full pool."""
    strange = sorted({code for code in codes if code < 0} - {*ABSENT, *FULL, *BROKEN})
    if strange and not any(good):
        raise PoolError(f"the pool: {what}: Mooncake says {', '.join(map(str, strange))}")
    return tuple(good)


class _Client:
    """The client process, the pipe to it and the memory of the frames."""

    def __init__(self, how: dict[str, str], staging_bytes: int, enter: Sequence[str]) -> None:
        self.staging_bytes = staging_bytes
        ours, theirs = socket.socketpair()
        shared = os.memfd_create("jdisagg-pool")
        os.ftruncate(shared, staging_bytes)
        self._memory = np.frombuffer(mmap.mmap(shared, staging_bytes), np.uint8)
        code = (
            "from jdisagg.kv.tiers.pool.mooncake_client import serve;"
            f"serve({theirs.fileno()}, {shared}, {staging_bytes}, {how!r})"
        )
        fds = theirs.fileno(), shared
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        os.close(shared)
        self._pipe = Connection(ours.detach())
        self._pipe.send(("setup", [], 0))
        self._starting, self._began_s = True, time.monotonic()

    def is_started(self, until_s: float) -> bool:
        """Returns whether the client has started by `until_s`. Raises OSError if it cannot, or took too long."""
        if self._starting and not self._pipe.poll(max(0.0, until_s - time.monotonic())):
            if time.monotonic() - self._began_s > START_S:
                raise TimeoutError(f"it did not start within {START_S:g} s")
            return False
        if self._starting:
            self._answer()
            self._starting = False
        return True

    def frame(self, index: int, record_bytes: int) -> np.ndarray:
        """Returns the memory u8[bytes of a frame] of frame number `index`."""
        size = HEAD.size + record_bytes
        return self._memory[index * size : (index + 1) * size]

    def ask(self, request: tuple[str, list[str], int], until_s: float) -> list[int]:
        """Sends a request and returns the codes. Raises TimeoutError, or another OSError if the client has ended."""
        self._pipe.send(request)
        if not self._pipe.poll(max(0.0, until_s - time.monotonic())):
            raise TimeoutError(f"no answer to {request[0]} in time")
        return self._answer()

    def _answer(self) -> list[int]:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise ConnectionError(answer)
        return answer

    def end(self) -> None:
        """Kills the client at once; it holds nothing that is not in the pool."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def open_pool(url: str, fingerprint: str, *, ttl_s: float, timeout_s: float) -> MooncakePool:
    """Opens mooncake://HOST:PORT of a master; `OPTIONS` follow as ?protocol=rdma&device_name=mlx5_0. The master decides
    how long pages are kept, so `ttl_s` is unused."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not parts.hostname or not parts.port or not options.keys() <= OPTIONS.keys():
        raise ValueError(f"must be mooncake://HOST:PORT of a master, with {', '.join(OPTIONS)} at most")
    return MooncakePool(f"{parts.hostname}:{parts.port}", fingerprint, timeout_s=timeout_s, **options)
