"""KV crosses a link that the kernel itself makes slow, between two network namespaces, where that is permitted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.shaped import Shaped, Unshapable, shaped_link
from tests.kv.transport.peer import Side
from tests.kv.transport.peers import Peer

MIB = 1 << 20
GBIT_PER_S = 1
BURST_SHARE = 0.1  # of the bytes below: the link lets a little through at once


@pytest.fixture(scope="module")
def link() -> Iterator[Shaped]:
    try:
        with shaped_link(GBIT_PER_S) as link:
            yield link
    except Unshapable as error:
        pytest.skip(f"no shaped link can be had here: {error}")


def test_tcp_crosses_between_two_namespaces_with_equal_bytes_as_fast_as_the_link(link: Shaped):
    peer, side = Peer(["tcp"], link.inside, listen={"tcp": f"{link.there}:0"}), Side(["tcp"])
    try:
        for nbytes in (MIB, 16 * MIB):
            offered = peer.ask("offer", transport="tcp", count=1, nbytes=nbytes, seed=1)
            assert offered["ticket"]["address"].startswith(f"{link.there}:")
            started_s = time.monotonic()
            assert side.pull(offered["ticket"])["digests"] == offered["digests"]
            took_s = time.monotonic() - started_s
            assert side.ack(offered["ticket"])["told"]
        wanted_s = 16 * MIB * 8 / (GBIT_PER_S * 1e9)
        assert wanted_s * (1 - BURST_SHARE) < took_s < wanted_s * 4 + 2.0, "of the larger one"
    finally:
        side.close()
        peer.kill()
