"""How a group comes together, and who may not be of it: refused in one line, within a deadline, whatever it says."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jdisagg.core.errors import ConfigError, PeerDead, PeerMismatch
from jdisagg.kv.transport.listener import split_address
from jdisagg.serve.cluster.group.assembly import Assembly, GroupUnfilled, join_leader
from tests.serve.group.meetings import WAIT_S, Door, card, meeting


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_members_that_come_before_their_leader_and_after_it_make_a_group(pool):
    at = meeting()
    early = pool.submit(join_leader, at, card(1, size=3))
    time.sleep(0.1)
    gathered = pool.submit(Door(at, card(size=3)).assembly.gather)
    late = pool.submit(join_leader, at, card(2, size=3))
    streams = gathered.result(WAIT_S)
    assert sorted(streams) == [1, 2]
    for rank, member in ((1, early.result(WAIT_S)), (2, late.result(WAIT_S))):
        streams[rank].send({"rank": rank})
        assert member.receive(at.deadline_s) == {"rank": rank}
        member.send({"heard": rank})
        assert streams[rank].receive(at.deadline_s) == {"heard": rank}


def test_a_group_that_does_not_fill_ends_at_its_deadline_for_all(pool):
    at = meeting(wait_s=1.5)
    gathered = pool.submit(Door(at, card(size=3)).assembly.gather)
    member = pool.submit(join_leader, at, card(1, size=3)).result(WAIT_S)
    with pytest.raises(GroupUnfilled, match=r"2 of 3 processes came within 1.5 s, rank 2 did not"):
        gathered.result(WAIT_S)
    assert "rank 2 did not" in member.receive(time.monotonic() + WAIT_S)["refused"]


def test_a_member_without_a_leader_gives_up_at_its_deadline():
    with pytest.raises(GroupUnfilled, match=r"no leader at 127.0.0.1:\d+ within 1 s .*start rank 0"):
        join_leader(meeting(wait_s=1.0), card(1))


REFUSED = {
    "another group": (card(1, group="p1"), "group 'p1', and 'p0' meets here"),
    "another size": (card(1, size=4), "--group_size=4"),
    "another version": (card(1, version="2"), "jdisagg 2, the leader 1"),
    "another flag": (card(1, flags={"mesh": "prefill:tp4"}), "--mesh=prefill:tp4, the leader prefill:tp2"),
    "another model": (card(1, model="bbbb"), "the model bbbb, the leader aaaa"),
    "a clock that is off": (card(1, clock_s=0.0), "its clock says 0 s"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_who_does_not_fit_is_refused_and_named_on_the_leader_which_waits_on(case: str, pool):
    theirs, said = REFUSED[case]
    at = meeting()
    door = Door(at)
    gathered = pool.submit(door.assembly.gather)
    with pytest.raises(PeerMismatch) as refusal:
        join_leader(at, theirs)
    assert said in str(refusal.value) and said in door.said[-1] and "member 1" in door.said[-1]
    joined = join_leader(at, card(1))  # whose stream is open as long as it is held
    assert sorted(gathered.result(WAIT_S)) == [1]
    joined.frames.close()


def test_a_rank_that_comes_twice_is_refused_though_the_group_is_full(pool):
    at = meeting()
    door = Door(at)
    gathered = pool.submit(door.assembly.gather)
    first = join_leader(at, card(1))
    streams = gathered.result(WAIT_S)
    with pytest.raises(PeerMismatch, match="comes second"):
        join_leader(at, card(1))
    assert len(door.said) == 1 and "--group_rank" in door.said[0]
    streams[1].send({"still": "here"})
    assert first.receive(at.deadline_s) == {"still": "here"}
    door.assembly.close()


def test_a_member_that_left_again_before_the_group_was_full_may_come_back(pool):
    at = meeting()
    gathered = pool.submit(Door(at, card(size=3)).assembly.gather)
    join_leader(at, card(1, size=3)).frames.close()
    again = pool.submit(_join_patiently, at, card(1, size=3))
    again.result(WAIT_S)
    joined = join_leader(at, card(2, size=3))
    assert sorted(gathered.result(WAIT_S)) == [1, 2]
    joined.frames.close()


def _join_patiently(at, own):
    """It is refused as the second until the leader has seen that the first is gone."""
    while time.monotonic() < at.deadline_s:
        try:
            return join_leader(at, own)
        except PeerMismatch as error:
            assert "comes second" in str(error)
    raise AssertionError("never taken in")


def test_another_secret_is_told_at_both_ends_and_the_leader_waits_on(pool):
    at = meeting()
    door = Door(at)
    gathered = pool.submit(door.assembly.gather)
    with pytest.raises(PeerMismatch, match=r"does not share our secret: .*--secret_file"):
        join_leader(replace(at, secret=b"another secret of sixteen bytes"), card(1))
    joined = join_leader(at, card(1))  # whose stream is open as long as it is held
    assert sorted(gathered.result(WAIT_S)) == [1]
    joined.frames.close()
    assert "does not share our secret" in door.said[0]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{}"])
def test_strangers_who_say_nothing_or_nonsense_keep_nobody_out(said: bytes, pool):
    at = meeting()
    gathered = pool.submit(Door(at).assembly.gather)
    strangers = [socket.create_connection(split_address(at.address)) for _ in range(4)]
    try:
        for each in strangers:
            each.sendall(said)
        join_leader(at, card(1))
        assert sorted(gathered.result(WAIT_S)) == [1]
    finally:
        for each in strangers:
            each.close()


def test_a_port_in_use_is_said_before_anything_is_waited_for():
    at = meeting()
    with socket.create_server(split_address(at.address)), pytest.raises(ConfigError, match="cannot listen there"):
        Assembly(at, card())


def test_a_group_meets_over_tls_and_nobody_without_it(certificate: tuple[str, str], pool):
    key, cert = certificate
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=cert)
    server.load_cert_chain(cert, key)
    at = meeting(tls_server=server, tls_client=client)
    gathered = pool.submit(Door(at).assembly.gather)
    with pytest.raises((GroupUnfilled, PeerDead)):
        join_leader(replace(at, tls_client=None, deadline_s=time.monotonic() + 1.0), card(1))
    member = join_leader(at, card(1))
    leader = gathered.result(WAIT_S)[1]
    answer = pool.submit(lambda: [member.receive(at.deadline_s) for _ in range(200)])
    heard = pool.submit(lambda: [leader.receive(at.deadline_s) for _ in range(200)])
    for number in range(200):  # both directions at once
        leader.send({"n": number, "text": "x" * 5000})
        member.send({"n": number, "text": "y" * 5000})
    assert (
        [each["n"] for each in answer.result(WAIT_S)] == [each["n"] for each in heard.result(WAIT_S)] == [*range(200)]
    )
