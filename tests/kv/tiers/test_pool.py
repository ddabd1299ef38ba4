"""One suite over every backend of the pool: whatever it does, a page comes as it was put, or does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from jdisagg.kv.tiers.pool.open import HEAD, key_of, open_pool
from jdisagg.kv.tiers.stores import PageStore, PoolError
from tests.kv.tiers.mooncake_store import Mooncake, why_not
from tests.kv.tiers.valkey import Valkey

SIZE, FINGERPRINT = 4096 + 64, "f" * 32
NAMES = [bytes([n]) * 16 for n in range(1, 5)]
RECORDS = np.random.default_rng(0).integers(0, 256, (4, SIZE), np.uint8)
BOUND_S = 30.0  # far over what a pool is given, far under for ever


class Backend(Protocol):
    """A pool, and what a test can do to it behind its back. Keys are those of `entries`."""

    def open(self, fingerprint: str = FINGERPRINT) -> PageStore: ...
    def entries(self) -> dict[str, bytes]: ...
    def write(self, key: str, value: bytes) -> None: ...
    def remove(self, key: str) -> None: ...


class ValkeyBackend:
    def __init__(self, server: Valkey) -> None:
        self._url, self._client = server.url, server.client()

    def open(self, fingerprint: str = FINGERPRINT) -> PageStore:
        return opened(self._url, fingerprint)

    def entries(self) -> dict[str, bytes]:
        return {key.decode(): self._client.get(key) for key in self._client.keys("*")}

    def write(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def remove(self, key: str) -> None:
        self._client.delete(key)


class FolderBackend:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, fingerprint: str = FINGERPRINT) -> PageStore:
        return opened(f"file://{self._folder}", fingerprint)

    def entries(self) -> dict[str, bytes]:
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self._folder)): path.read_bytes() for path in files}

    def write(self, key: str, value: bytes) -> None:
        (self._folder / key).write_bytes(value)

    def remove(self, key: str) -> None:
        (self._folder / key).unlink()


class MooncakeBackend:
    """It has no list of its keys: those of `NAMES` are looked for."""

    def __init__(self, server: Mooncake) -> None:
        self._server, self._keys = server, [key_of(FINGERPRINT, name) for name in NAMES]
        self._opened = list[PageStore]()

    def open(self, fingerprint: str = FINGERPRINT) -> PageStore:
        self._opened.append(pool := self._server.open(fingerprint))
        return pool

    def entries(self) -> dict[str, bytes]:
        return {key: self._server.raw("get", key) for key in self._keys}

    def write(self, key: str, value: bytes) -> None:
        self.remove(key)
        assert self._server.raw("put", key, value or b"?") == 0  # it takes no empty value

    def remove(self, key: str) -> None:
        assert self._server.raw("remove", key, True) == 0

    def close(self) -> None:
        for pool in self._opened:
            pool.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Mooncake]:
    if reason := why_not():
        pytest.skip(reason)
    with Mooncake() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


@pytest.fixture(params=["valkey", "folder", "mooncake"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "folder":
        return FolderBackend(tmp_path / "pool")
    if request.param == "mooncake":
        store = request.getfixturevalue("store")
        store.raw("remove_all", True)
        found = MooncakeBackend(store)
        request.addfinalizer(found.close)
        return found
    server = request.getfixturevalue("server")
    server.client().flushall()
    return ValkeyBackend(server)


def opened(url: str, fingerprint: str = FINGERPRINT, timeout_s: float = 20.0) -> PageStore:
    return open_pool(url, fingerprint, timeout_s=timeout_s)


def got(pool: PageStore, names: list[bytes] = NAMES) -> tuple[tuple[bool, ...], np.ndarray]:
    records = np.zeros((len(names), SIZE), np.uint8)
    return pool.get((), names, records), records


def filled(backend: Backend) -> PageStore:
    pool = backend.open()
    assert pool.put((), NAMES, RECORDS) == (True,) * 4
    return pool


def test_another_process_finds_what_one_has_put(backend):
    filled(backend)
    good, records = got(backend.open(), NAMES[::-1])
    assert good == (True,) * 4
    np.testing.assert_array_equal(records, RECORDS[::-1])


def test_what_was_never_put_is_absent_and_so_are_pages_of_another_fingerprint(backend):
    filled(backend)
    assert got(backend.open(), [b"?" * 16, NAMES[0]])[0] == (False, True)
    assert got(backend.open("e" * 32))[0] == (False,) * 4


def test_an_evicted_page_is_absent_and_can_be_put_again(backend):
    pool = filled(backend)
    backend.remove(sorted(backend.entries())[1])
    assert got(pool)[0] == (True, False, True, True)
    assert pool.put((), NAMES, RECORDS) == (True,) * 4 and got(pool)[0] == (True,) * 4


def broken(kind: str, key: str, entries: dict[str, bytes]) -> bytes:
    """What the pool holds instead of what was put."""
    whole = entries[key]
    match kind:
        case "half written":
            return whole[: len(whole) // 2]
        case "torn":
            return whole[: HEAD.size + 100] + bytes(len(whole) - HEAD.size - 100)
        case "a flipped bit":
            return whole[:-1] + bytes([whole[-1] ^ 1])
        case "another page's":
            return next(value for other, value in entries.items() if other != key)
        case "too long":
            return whole + b"?"
        case _:
            return b""


@pytest.mark.parametrize("kind", ["half written", "torn", "a flipped bit", "another page's", "too long", "empty"])
def test_a_pool_that_lies_is_found_out_and_the_page_can_be_put_again(backend, kind):
    pool, entries = filled(backend), backend.entries()
    key = sorted(entries)[2]
    backend.write(key, broken(kind, key, entries))
    good, records = got(pool)
    assert good == (True, True, False, True)
    np.testing.assert_array_equal(records[[0, 1, 3]], RECORDS[[0, 1, 3]])
    assert pool.put((), NAMES, RECORDS) == (True,) * 4
    good, records = got(pool)
    assert good == (True,) * 4
    np.testing.assert_array_equal(records, RECORDS)


def test_two_writers_of_one_page_leave_it_whole_and_no_reader_meets_half_of_it(backend):
    pools = [backend.open() for _ in range(3)]
    failed, stop = list[Any](), threading.Event()

    def read() -> None:
        while not stop.is_set():
            good, records = got(pools[2], NAMES[:1])
            if good[0] and (records[0] != RECORDS[0]).any():
                failed.append("read what nobody wrote")

    def write(pool: PageStore) -> None:
        for _ in range(30):
            failed.extend(["refused"] * (pool.put((), NAMES[:1], RECORDS[:1]) != (True,)))

    reader, writers = threading.Thread(target=read), [threading.Thread(target=write, args=(p,)) for p in pools[:2]]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(BOUND_S)
    stop.set()
    reader.join(BOUND_S)
    assert not failed and got(pools[2], NAMES[:1])[0] == (True,)


# ------------------------------------------------------------------ a server of its own


def test_a_server_that_was_killed_and_started_again_has_lost_its_pages_and_takes_them_anew():
    with Valkey() as own:
        pool = opened(own.url, timeout_s=5.0)
        pool.put((), NAMES, RECORDS)
        own.kill()
        with pytest.raises(PoolError):
            got(pool)
        own.start()
        assert got(pool)[0] == (False,) * 4
        assert pool.put((), NAMES, RECORDS) == (True,) * 4 and got(pool)[0] == (True,) * 4


def test_a_server_that_does_not_answer_costs_its_time_out_and_is_there_again_afterwards():
    with Valkey() as own:
        pool = opened(own.url, timeout_s=0.5)
        pool.put((), NAMES, RECORDS)
        own.freeze()
        try:
            for ask in (lambda: got(pool), lambda: pool.put((), NAMES, RECORDS)):
                began_s = time.monotonic()
                with pytest.raises(PoolError):
                    ask()
                assert time.monotonic() - began_s < BOUND_S
        finally:
            own.thaw()
        assert got(opened(own.url))[0] == (True,) * 4


def test_a_server_that_is_full_refuses_and_gives_what_it_has():
    with Valkey(memory="4mb", policy="noeviction") as own:
        pool, many = opened(own.url), np.repeat(RECORDS, 400, axis=0)
        names = [number.to_bytes(16, "little") for number in range(len(many))]
        good = pool.put((), names, many)
        assert any(good) and not all(good)
        kept = [name for name, fine in zip(names, good, strict=True) if fine]
        assert all(got(pool, kept)[0])


def test_a_server_short_of_memory_evicts_and_takes_what_is_new():
    with Valkey(memory="6mb") as own:
        pool, many = opened(own.url), np.repeat(RECORDS, 800, axis=0)
        names = [number.to_bytes(16, "little") for number in range(len(many))]
        assert all(pool.put((), names, many))
        good = list[bool]()
        for start in range(len(names) - 100, -1, -100):  # a reply of all would itself take the server's memory
            found, records = got(pool, names[start : start + 100])
            good[:0] = found
            np.testing.assert_array_equal(records[np.array(found)], many[start : start + 100][np.array(found)])
        assert sum(good[-100:]) > sum(good[:100])  # which one goes is drawn by lot among some of the oldest


def test_a_folder_that_takes_nothing_fails_and_does_not_hang(tmp_path):
    pool = opened(f"file://{tmp_path}/pool")
    pool.put((), NAMES[:1], RECORDS[:1])
    folder = next(path.parent for path in (tmp_path / "pool").rglob("*") if path.is_file())
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_bytes(b"a file where the folder was")
    with pytest.raises(PoolError):
        pool.put((), NAMES, RECORDS)
