"""What keeps records: all give back what was put, refuse what is broken, and outlive what they are to outlive."""

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.kv.tiers.pool.open import open_pool
from jdisagg.kv.tiers.stores import DiskStore, DramStore, FileInUseError, PoolError
from tests.kv.tiers.valkey import Valkey

SIZE, PAGES = 4096 + 64, (3, 0, 5)
NAMES = [bytes([n]) * 16 for n in (1, 2, 3)]
RECORDS = np.random.default_rng(0).integers(0, 256, (3, SIZE), np.uint8)


@pytest.fixture(scope="module")
def valkey():
    with Valkey() as server:
        yield server.url


@pytest.fixture(params=["dram", "disk", "valkey", "folder"])
def store(request, tmp_path, valkey):
    match request.param:
        case "dram":
            made = DramStore(8, SIZE)
        case "disk":
            made = DiskStore(tmp_path / "a.kv", 8, SIZE, "f" * 32)
        case "valkey":
            made = open_pool(valkey, tmp_path.name, timeout_s=20.0)
        case _:
            made = open_pool(f"file://{tmp_path}/pool", "f" * 32)
    yield made
    made.close()


def test_records_come_back_as_they_were_put(store):
    assert store.put(PAGES, NAMES, RECORDS) == (True,) * 3
    found = np.zeros_like(RECORDS)
    assert store.get(PAGES[::-1], NAMES[::-1], found) == (True,) * 3
    np.testing.assert_array_equal(found, RECORDS[::-1])
    assert store.put(PAGES, NAMES, RECORDS) == (True,) * 3, "two writers of one page"


def test_a_page_that_was_never_put_is_not_there(valkey, tmp_path):
    disk = DiskStore(tmp_path / "a.kv", 8, SIZE, "f" * 32)
    for each in (disk, open_pool(valkey, "absent", timeout_s=20.0), open_pool(f"file://{tmp_path}/pool", "a")):
        assert each.get((1,), NAMES[:1], np.zeros((1, SIZE), np.uint8)) == (False,)
        each.close()


def test_a_disk_outlives_its_process_and_a_broken_record_is_not_served(tmp_path):
    disk = DiskStore(tmp_path / "a.kv", 8, SIZE, "f" * 32)
    disk.put(PAGES, NAMES, RECORDS)
    with pytest.raises(FileInUseError):
        DiskStore(tmp_path / "a.kv", 8, SIZE, "f" * 32)
    disk.close()
    with open(tmp_path / "a.kv", "r+b") as file:
        file.seek(disk._record_at(0) + 77)
        file.write(b"??")
    again = DiskStore(tmp_path / "a.kv", 8, SIZE, "f" * 32)
    assert sorted(again.found()) == sorted(zip(PAGES, NAMES, strict=True))
    assert again.get(PAGES, NAMES, np.zeros_like(RECORDS)) == (True, False, True)
    again.close()
    with pytest.raises(ConfigError, match=f"{'f' * 32}, this run's is {'e' * 32}"):
        DiskStore(tmp_path / "a.kv", 8, SIZE, "e" * 32)


def test_a_pool_that_is_not_there_says_so_and_does_not_hang():
    with pytest.raises(PoolError):
        open_pool("redis://127.0.0.1:1", "f", timeout_s=1.0).get((), NAMES, RECORDS.copy())


def test_a_pool_of_no_known_kind_is_refused():
    with pytest.raises(ConfigError, match="must begin with one of redis://"):
        open_pool("http://somewhere", "f")
