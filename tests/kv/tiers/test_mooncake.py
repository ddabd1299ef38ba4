"""A Mooncake store that dies, hangs, fills up or is half written to; what all pools do alike is in `test_pool.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.kv.tiers.pool.open import HEAD, key_of, open_pool
from jdisagg.kv.tiers.stores import PageStore, PoolError
from tests.kv.tiers.mooncake_store import Mooncake, why_not
from tests.kv.tiers.test_pool import BOUND_S, FINGERPRINT, NAMES, RECORDS, SIZE, got

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def own() -> Iterator[Mooncake]:
    with Mooncake() as running:
        yield running


def comes_back(pool: PageStore) -> None:
    """Sooner or later pages are taken again, and come as they were put."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        try:
            if all(pool.put((), NAMES, RECORDS)):
                good, records = got(pool)
                assert good == (True,) * 4
                np.testing.assert_array_equal(records, RECORDS)
                return
        except PoolError:
            pass
        time.sleep(0.2)
    raise AssertionError("it takes nothing any more")


def filled(server: Mooncake, timeout_s: float = 20.0) -> PageStore:
    pool = server.open(FINGERPRINT, timeout_s)
    comes_back(pool)
    return pool


def test_a_master_that_was_killed_and_started_again_has_lost_its_pages_and_takes_them_anew(own):
    pool = filled(own, timeout_s=10.0)
    own.kill("master")
    with pytest.raises(PoolError, match="Mooncake says -900"):
        got(pool)
    own.start()
    assert got(pool)[0] == (False,) * 4
    comes_back(pool)
    pool.close()


def test_what_lay_on_a_node_that_was_killed_does_not_come_and_another_node_takes_it_anew(own):
    pool = filled(own)
    own.kill("client")
    with pytest.raises(PoolError, match="Mooncake says -800"):
        got(pool)
    own.kill("raw")
    own.start()
    comes_back(pool)
    pool.close()


def test_a_master_that_does_not_answer_costs_the_time_out_and_the_next_batch_has_a_new_client(own):
    pool = filled(own, timeout_s=0.5)
    own.freeze()
    asks = {"TimeoutError": lambda: got(pool), "no client of 127.0.0.1": lambda: pool.put((), NAMES, RECORDS)}
    for why, ask in asks.items():
        began_s = time.monotonic()
        with pytest.raises(PoolError, match=why):
            ask()
        assert time.monotonic() - began_s < BOUND_S
    own.thaw()
    comes_back(pool)
    pool.close()


def test_where_no_master_listens_a_batch_fails_with_its_address(own):
    own.kill("master")
    pool = own.open(FINGERPRINT)
    with pytest.raises(PoolError, match=r"no master at 127.0.0.1:50051"):
        got(pool)
    pool.close()


def test_a_page_that_somebody_is_still_writing_is_not_there(own):
    pool, key = own.open(FINGERPRINT), key_of(FINGERPRINT, NAMES[0])
    assert own.raw("batch_put_session_start", [key], [HEAD.size + SIZE]) == [0]
    assert got(pool, NAMES[:1])[0] == (False,)
    assert pool.put((), NAMES[1:], RECORDS[1:]) == (True,) * 3
    pool.close()


def test_a_store_short_of_memory_evicts_and_takes_what_is_new():
    with Mooncake(memory="16 MB", lease_ms=300) as own:
        many = np.random.default_rng(1).integers(0, 256, (28, 1 << 20), np.uint8)
        names, pool = [number.to_bytes(16, "little") for number in range(len(many))], own.open(FINGERPRINT)
        taken = [pool.put((), names[at : at + 4], many[at : at + 4]) for at in range(0, len(many), 4)]
        assert sum(map(sum, taken)) > 16
        records = np.zeros_like(many)
        good = np.array(pool.get((), names, records))
        assert 0 < good.sum() < len(many)
        np.testing.assert_array_equal(records[good], many[good])
        pool.close()


def test_a_store_whose_pages_are_all_being_read_is_full_and_says_so_page_by_page():
    with Mooncake(memory="16 MB", lease_ms=60_000) as own:
        many = np.random.default_rng(1).integers(0, 256, (24, 1 << 20), np.uint8)
        names, pool = [number.to_bytes(16, "little") for number in range(len(many))], own.open(FINGERPRINT)
        first = pool.put((), names[:12], many[:12])
        assert all(first) and all(pool.get((), names[:12], np.zeros_like(many[:12])))
        assert not all(pool.put((), names[12:], many[12:]))
        assert all(pool.get((), names[:12], np.zeros_like(many[:12])))
        pool.close()


@pytest.mark.parametrize("url", ["mooncake://", "mooncake://host", "mooncake://host:1?pace=quick"])
def test_an_address_that_is_none_is_refused_with_what_it_must_be(url):
    with pytest.raises(ConfigError, match=r"must be mooncake://HOST:PORT of a master, with protocol, device_name"):
        open_pool(url, FINGERPRINT)
