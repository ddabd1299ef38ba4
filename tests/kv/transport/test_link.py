"""The emulated link: right by arithmetic at any speed, and right on a clock through a real transport."""

from __future__ import annotations

import math
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import ConfigError, TransferCancelled, TransferTimeout
from jdisagg.kv.transport.choose import open_transport
from jdisagg.kv.transport.config import EmulatedLink, TokenBucket, TransportConfig
from jdisagg.kv.transport.ticket import TransferId
from tests.kv.transport.peer import IDENTITY, SECRET

MB = 1_000_000


@pytest.mark.parametrize("gbit_per_s", [1, 10, 25, 100, 200])
def test_bytes_take_their_share_of_a_second_and_then_the_latency(gbit_per_s: float):
    bucket = TokenBucket(gbit_per_s * 1e9 / 8, latency_s=0.001)
    assert bucket.send(5.0, 125 * MB) == pytest.approx(5.0 + 1 / gbit_per_s + 0.001)


def test_transfers_that_share_a_link_wait_for_each_other_and_an_idle_link_owes_nothing():
    bucket = TokenBucket(100.0, latency_s=1.0)
    assert [bucket.send(0.0, 100), bucket.send(0.0, 100), bucket.send(0.5, 100)] == [2.0, 3.0, 4.0]
    assert bucket.send(100.0, 100) == 102.0


def test_a_burst_goes_at_once():
    assert TokenBucket(100.0, burst_bytes=50.0).send(0.0, 100) == 0.5


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**9)), min_size=1), st.floats(1e6, 1e11))
def test_no_link_ever_carries_more_than_its_speed(gaps: list[tuple[float, int]], bytes_per_s: float):
    bucket, now_s, sent, landed_s = TokenBucket(bytes_per_s), 0.0, 0, 0.0
    for gap_s, nbytes in gaps:
        now_s += gap_s
        sent += nbytes
        before_s, landed_s = landed_s, bucket.send(now_s, nbytes)
        assert landed_s >= max(before_s, now_s) - 1e-6
        assert landed_s * bytes_per_s >= sent * (1 - 1e-6) - 1


@pytest.mark.parametrize("speed", [0.0, -1.0])
def test_a_link_without_speed_is_refused(speed: float):
    with pytest.raises(ConfigError, match=str(speed)):
        TokenBucket(speed)


@pytest.mark.parametrize("name", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("gbit_per_s", [0.2, 1])
def test_a_transport_over_an_emulated_link_takes_as_long_as_the_link_within_a_tenth(name: str, gbit_per_s: float):
    transport = open_transport(name, TransportConfig(SECRET, IDENTITY, link=EmulatedLink(gbit_per_s, latency_s=0.05)))
    array = jax.device_put(np.zeros(5 * MB, np.int8))
    wanted_s = 0.05 + 5 * MB * 8 / (gbit_per_s * 1e9)
    quickest_s = math.inf
    for part in range(20):  # other users of the machine make any one of them late
        ticket = transport.offer(TransferId("h", 1, part), [array], time.monotonic() + 60)
        started_s = time.monotonic()
        transport.pull(ticket, jax.devices()[:1], time.monotonic() + 60)
        took_s = time.monotonic() - started_s
        transport.ack(ticket)
        assert wanted_s <= took_s
        quickest_s = min(quickest_s, took_s)
        if quickest_s <= wanted_s * 1.1 + 0.05:
            break
    transport.close()
    assert quickest_s <= wanted_s * 1.1 + 0.05


@pytest.mark.parametrize("name", ["inproc", "tcp"])
def test_a_slow_link_gives_way_to_the_deadline_and_to_a_cancel(name: str):
    transport = open_transport(name, TransportConfig(SECRET, IDENTITY, link=EmulatedLink(0.0001)))
    array = jax.device_put(np.zeros(MB, np.int8))
    first, second = (transport.offer(TransferId("h", 1, part), [array], time.monotonic() + 120) for part in (0, 1))
    started_s = time.monotonic()
    with pytest.raises(TransferTimeout):
        transport.pull(first, jax.devices()[:1], time.monotonic() + 0.1)
    threading.Timer(0.1, transport.cancel, [second]).start()
    with pytest.raises(TransferCancelled):
        transport.pull(second, jax.devices()[:1], time.monotonic() + 120)
    assert time.monotonic() - started_s < 20.0
    transport.close()
