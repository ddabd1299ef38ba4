"""One suite for every transport between processes: whatever happens, it ends in time, and nothing is held."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jdisagg.core.errors import PeerDead, TransferCancelled, TransferFull, TransferRefused, TransferTimeout
from jdisagg.kv.transport.choose import available
from jdisagg.kv.transport.endpoint import Endpoint
from jdisagg.kv.transport.ticket import DTYPES, read_ticket
from tests.kv.transport.peer import Side
from tests.kv.transport.peers import Peer

NAMES = [name for name in available() if name != "inproc"]
MIB = 1 << 20
SLACK_S = 10.0  # of a loaded machine, on top of a deadline
NOTHING = {"offers": 0, "offer_bytes": 0, "pull_bytes": 0}


@pytest.fixture(scope="module")
def here() -> Iterator[Side]:
    side = Side(NAMES, offer_limit_bytes=1 << 30, pull_limit_bytes=1 << 30)
    yield side
    side.close()


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[Peer]:
    peer = Peer(NAMES, offer_limit_bytes=300 * MIB, pull_limit_bytes=300 * MIB)
    yield peer
    peer.kill()


@pytest.fixture
def peer(shared_peer: Peer, here: Side, name: str) -> Iterator[Peer]:
    """The long-lived one; after every test nothing is held at either end."""
    yield shared_peer
    expect_nothing_held(here, name)
    until(lambda: held_by(shared_peer, name) == NOTHING)


def until(true: Any, within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)


def expect_nothing_held(side: Side, name: str) -> None:
    until(lambda: side.held(name) == NOTHING)


def held_by(peer: Peer, name: str) -> dict[str, Any]:
    return {key: value for key, value in peer.ask("held", transport=name).items() if key != "took_s"}


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < seconds + SLACK_S


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_the_bytes_arrive_equal_on_the_devices_asked_for(name: str, dtype: str, here: Side, peer: Peer):
    assert DTYPES[dtype]
    for count, nbytes in ((1, 64), (3, 1000 * 8), (8, MIB)):
        offered = peer.ask("offer", transport=name, count=count, nbytes=nbytes, seed=count, dtype=dtype)
        assert here.pull(offered["ticket"])["digests"] == offered["digests"]
        assert here.ack(offered["ticket"]) == {"told": True}
        back = here.offer(name, count=count, nbytes=nbytes, seed=7, dtype=dtype)
        assert peer.ask("pull", ticket=back["ticket"])["digests"] == back["digests"]
        assert peer.ask("ack", ticket=back["ticket"])["told"]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_still_being_computed_are_offered_at_once_and_arrive_when_they_are_done(
    name: str, here: Side, peer: Peer
):
    known = peer.ask("offer", transport=name, count=2, nbytes=MIB, seed=5)
    offered = peer.ask("offer", transport=name, count=2, nbytes=MIB, seed=5, late=True)
    assert here.pull(offered["ticket"])["digests"] == here.pull(known["ticket"])["digests"] == known["digests"]
    assert here.ack(offered["ticket"])["told"] and here.ack(known["ticket"])["told"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pull_of_arrays_that_take_too_long_ends_at_its_deadline_and_frees_the_source(
    name: str, here: Side, peer: Peer
):
    ticket = last_of_many_late(peer, name)
    with ends_within(0.1), pytest.raises(TransferTimeout):
        here.pull(ticket, in_s=0.1)
    peer.ask("close_offers", transport=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_source_costs_no_more_than_the_deadline(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer", transport=name, count=1, nbytes=MIB, seed=1)
    peer.freeze()
    try:
        with ends_within(0.3), pytest.raises(TransferTimeout):
            here.pull(offered["ticket"], in_s=0.3)
    finally:
        peer.thaw()
    peer.ask("cancel", ticket=offered["ticket"])


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_destination_holds_the_source_no_longer_than_the_deadline(name: str, here: Side, peer: Peer):
    offered = here.offer(name, in_s=1.0, count=1, nbytes=128 * MIB, seed=1)
    peer.tell("pull", ticket=offered["ticket"], in_s=1.0)
    time.sleep(0.05)
    peer.freeze()
    try:
        until(lambda: here.held(name) == NOTHING, 1.0 + SLACK_S)
    finally:
        peer.thaw()
    assert peer.hear().get("error") in ("TransferTimeout", "TransferRefused", "PeerDead", None)


@pytest.mark.parametrize("name", NAMES)
def test_a_destination_whose_source_gave_up_in_the_middle_of_its_bytes_pulls_on(name: str, here: Side, peer: Peer):
    descriptors = len(os.listdir(f"/proc/{peer.process.pid}/fd"))
    for _ in range(4):
        offered = here.offer(name, in_s=1.0, count=1, nbytes=128 * MIB, seed=1)
        peer.tell("pull", ticket=offered["ticket"], in_s=1.0)
        time.sleep(0.05)
        peer.freeze()
        try:
            until(lambda: here.held(name) == NOTHING)
        finally:
            peer.thaw()
        peer.hear()
        kept = here.offer(name, count=2, nbytes=MIB, seed=1)
        assert peer.ask("pull", ticket=kept["ticket"], in_s=30.0).get("digests") == kept["digests"]
        assert peer.ask("ack", ticket=kept["ticket"])["told"]
    until(lambda: len(os.listdir(f"/proc/{peer.process.pid}/fd")) < descriptors + 40)


@pytest.mark.parametrize("name", NAMES)
def test_an_offer_never_pulled_ends_by_itself_and_a_late_pull_is_told_so(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer", transport=name, count=2, nbytes=MIB, seed=1, in_s=0.2)
    until(lambda: held_by(peer, name) == NOTHING)
    with ends_within(1.0), pytest.raises(TransferRefused, match=r"has ended: expired"):
        here.pull(offered["ticket"], in_s=5.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_ticket_is_good_for_one_pull(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer", transport=name, count=1, nbytes=MIB, seed=1)
    assert here.pull(offered["ticket"])["digests"] == offered["digests"]
    with pytest.raises(TransferRefused, match=r"was pulled before"):
        here.pull(offered["ticket"])
    assert here.ack(offered["ticket"])["told"]
    with pytest.raises(TransferRefused, match=r"has ended: acked"):
        here.pull(offered["ticket"])


@pytest.mark.parametrize("name", NAMES)
def test_the_destination_cancels_a_pull_that_waits(name: str, here: Side, peer: Peer):
    ticket = last_of_many_late(peer, name)
    timer = threading.Timer(0.1, here.cancel, [ticket])
    timer.start()
    with ends_within(0.2), pytest.raises(TransferCancelled):
        here.pull(ticket)
    timer.join()
    peer.ask("close_offers", transport=name)


@pytest.mark.parametrize("name", ["tcp"])
def test_the_destination_cancels_a_pull_in_the_middle_of_its_bytes(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer", transport=name, count=4, nbytes=64 * MIB, seed=1)
    canceller = threading.Thread(target=cancel_once_it_pulls, args=(here, name, offered["ticket"]))
    canceller.start()
    with ends_within(5.0), pytest.raises(TransferCancelled):
        here.pull(offered["ticket"])
    canceller.join()


def cancel_once_it_pulls(side: Side, name: str, ticket: dict[str, Any]) -> None:
    until(lambda: side.held(name)["pull_bytes"])
    time.sleep(0.01)
    side.cancel(ticket)


@pytest.mark.parametrize("name", NAMES)
def test_the_source_cancels_a_pull_in_the_middle(name: str, here: Side, peer: Peer):
    offered = [here.offer(name, count=1, nbytes=MIB, seed=1, late=True) for _ in range(8)]
    peer.tell("pull", ticket=offered[-1]["ticket"])
    until(lambda: is_granted(here, offered[-1]["ticket"]))
    for each in offered:
        here.cancel(each["ticket"])
    answer = peer.hear()
    assert answer["error"] == "TransferCancelled" and answer["took_s"] < 1.0 + SLACK_S, answer


def is_granted(side: Side, ticket: dict[str, Any]) -> bool:
    """Whether the source has heard of the pull, and is at work on it."""
    endpoint = side.transports[ticket["transport"]]
    assert isinstance(endpoint, Endpoint)
    return endpoint._offers._offers[ticket["id"]].is_pulled


@pytest.mark.parametrize("name", NAMES)
def test_an_offer_over_the_limit_is_refused_and_the_others_stand(name: str, peer: Peer):
    small = Side([name], offer_limit_bytes=3 * MIB)
    kept = small.offer(name, count=2, nbytes=MIB, seed=1)
    with pytest.raises(TransferFull, match=f"{2 * MIB} bytes to offer beside {2 * MIB} held.* {3 * MIB}"):
        small.offer(name, count=2, nbytes=MIB, seed=2)
    answer = peer.ask("pull", ticket=kept["ticket"])
    assert answer.get("digests") == kept["digests"], answer
    assert peer.ask("ack", ticket=kept["ticket"])["told"]
    again = small.offer(name, count=2, nbytes=MIB, seed=2)
    assert peer.ask("pull", ticket=again["ticket"])["digests"] == again["digests"]
    assert peer.ask("cancel", ticket=again["ticket"])["told"]
    assert small.held(name) == NOTHING
    small.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_destination_without_room_refuses_and_the_ticket_stays_good(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer", transport=name, count=1, nbytes=MIB, seed=1)
    small = Side([name], pull_limit_bytes=MIB // 2)
    with pytest.raises(TransferFull, match=str(MIB // 2)):
        small.pull(offered["ticket"])
    small.close()
    assert here.pull(offered["ticket"])["digests"] == offered["digests"]
    assert here.ack(offered["ticket"])["told"]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_deleted_after_the_offer_are_refused_and_not_sent(name: str, here: Side, peer: Peer):
    offered = peer.ask("offer_deleted", transport=name, count=2, nbytes=MIB, seed=1)
    with ends_within(2.0), pytest.raises(TransferRefused, match=r"lost"):
        here.pull(offered["ticket"])


def test_a_killed_source_fails_pulls_at_once_and_a_restarted_one_serves_the_same_destination(here: Side):
    peer = Peer(NAMES)
    kept = {name: pulled(here, peer, name) for name in NAMES}
    copies = {name: [array.copy() for array in arrays] for name, arrays in kept.items()}
    for name in NAMES:
        pulled(here, peer, name, seed=9)  # writes to the same buffers, were they free
    late = {name: last_of_many_late(peer, name) for name in NAMES}
    killer = threading.Timer(0.1, peer.kill)
    killer.start()
    with ThreadPoolExecutor(len(NAMES)) as pool, ends_within(1.0):
        waiting = [pool.submit(here.pull, ticket) for ticket in late.values()]
        assert [type(each.exception()) for each in waiting] == [PeerDead] * len(NAMES)
    killer.join()
    for name in NAMES:
        with ends_within(2.5), pytest.raises(PeerDead):
            here.pull(late[name])
        assert here.ack(late[name]) == {"told": False}
        assert all((array == copy).all() for array, copy in zip(kept[name], copies[name], strict=True))
    kept.clear()
    again = Peer(NAMES, listen={name: at for name, at in peer.addresses.items() if name != "shm"})
    for name in NAMES:
        with ends_within(2.5), pytest.raises((PeerDead, TransferRefused)):
            here.pull(late[name])
        pulled(here, again, name)
        expect_nothing_held(here, name)
    again.kill()


def pulled(side: Side, peer: Peer, name: str, seed: int = 1) -> list[jax.Array]:
    """Arrays of a whole transfer: offered by the peer, pulled, acked."""
    ticket = read_ticket(peer.ask("offer", transport=name, count=2, nbytes=MIB, seed=seed)["ticket"])
    arrays = side.transports[name].pull(ticket, jax.devices()[:2], time.monotonic() + 60)
    assert side.transports[name].ack(ticket)
    return arrays


def last_of_many_late(peer: Peer, name: str) -> dict[str, Any]:
    """A ticket to an array that will not be computed for some time."""
    return [peer.ask("offer", transport=name, count=1, nbytes=MIB, seed=1, late=True) for _ in range(4)][-1]["ticket"]


def test_a_killed_destination_frees_the_source_by_the_deadline(here: Side):
    peer = Peer(NAMES)
    for name in NAMES:
        offered = [here.offer(name, in_s=2.0, count=1, nbytes=MIB, seed=1, late=True) for _ in range(3)]
        peer.tell("pull", ticket=offered[0]["ticket"])
    time.sleep(0.05)
    peer.kill()
    for name in NAMES:
        until(lambda name=name: here.held(name) == NOTHING, 2.0 + SLACK_S)
    assert all(here.held(name) == NOTHING for name in NAMES), "at once"


def test_a_closed_transport_leaves_no_thread_no_descriptor_and_no_shared_memory():
    shared = set(os.listdir("/dev/shm"))
    peer, side = Peer(NAMES), Side(NAMES)
    for name in NAMES:
        pulled(side, peer, name)
        peer.ask("offer", transport=name, count=2, nbytes=MIB, seed=1)  # left alone
        back = side.offer(name, count=2, nbytes=MIB, seed=1)
        peer.ask("pull", ticket=back["ticket"])
    threads = [each.name for each in threading.enumerate() if each.name.startswith("kv-")]
    left, theirs = side.close(), peer.ask("close")
    sockets_of_jax = 64 if "jax_transfer" in NAMES else 0  # its server has no end but the process's
    assert left["descriptors"] <= sockets_of_jax and len(left["threads"]) < len(threads), left
    assert theirs["descriptors"] <= sockets_of_jax and theirs["threads"] == [], theirs
    assert set(os.listdir("/dev/shm")) == shared
    peer.kill()
