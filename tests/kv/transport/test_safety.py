"""What strangers, broken peers and forged tickets get: an error that says why, and no memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jdisagg.core.errors import (
    BadTicket,
    ConfigError,
    PeerDead,
    PeerMismatch,
    TransferCancelled,
    TransferRefused,
)
from jdisagg.kv.transport import listener as handshake
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.connection import MAX_RECORD_BYTES, Deadline, KVConnection
from jdisagg.kv.transport.endpoint import ConnectionPool, Endpoint
from jdisagg.kv.transport.listener import split_address
from jdisagg.kv.transport.shm import make_segment
from jdisagg.kv.transport.tcp import tcp
from jdisagg.kv.transport.ticket import Ticket, TransferId, issue, read_ticket, tag_of, verify
from tests.kv.transport.peer import IDENTITY, SECRET
from tests.kv.transport.peers import Peer

CONFIG = TransportConfig(SECRET, IDENTITY, control_timeout_s=30.0)
QUICK = replace(CONFIG, control_timeout_s=1.0)  # where running out of it is the subject


@pytest.fixture
def source() -> Iterator[Endpoint]:
    transport = tcp(CONFIG)
    yield transport
    transport.close()


def offered(transport: Endpoint) -> Ticket:
    array = jax.device_put(np.arange(1024, dtype=np.float32))
    return transport.offer(TransferId("h", 1), [array], time.monotonic() + 120)


def pull_by(config: TransportConfig, ticket: Ticket) -> None:
    other = tcp(config)
    try:
        other.pull(ticket, jax.devices()[:1], time.monotonic() + 60)
    finally:
        gc.collect()  # jax lets go of memory it adopted at its next call, or now
        assert other.held().pull_bytes == 0
        other.close()


def dialled(source: Endpoint) -> KVConnection:
    return KVConnection(socket.create_connection(split_address(source.address)), "the source")


def soon(what: str = "test") -> Deadline:
    return Deadline(what, time.monotonic() + 60)


@pytest.mark.parametrize(
    ("field", "value"), [("model", "model-b"), ("layout", "4x64x32"), ("dtype", "bfloat16"), ("version", "9.9.9")]
)
def test_a_peer_of_another_kind_is_refused_with_both_fingerprints(source: Endpoint, field: str, value: str):
    theirs = replace(IDENTITY, **{field: value})
    with pytest.raises(PeerMismatch) as refused:
        pull_by(TransportConfig(SECRET, theirs), offered(source))
    for said in (IDENTITY.fingerprint, theirs.fingerprint, repr(value), repr(getattr(IDENTITY, field))):
        assert said in str(refused.value)


def test_a_peer_of_another_secret_learns_nothing(source: Endpoint):
    ticket = offered(source)
    with pytest.raises(BadTicket, match="not signed by our secret"):
        pull_by(TransportConfig(b"another secret of any length", IDENTITY), ticket)
    stranger = TransportConfig(b"another secret of any length", IDENTITY)
    connection = dialled(source)
    with pytest.raises(PeerMismatch, match="does not share our secret"):
        handshake.greet(connection, stranger, soon())
    with pytest.raises(PeerDead):
        connection.receive_record(soon())
    connection.close()


def test_a_recorded_handshake_is_worth_nothing_the_next_time(source: Endpoint):
    heard, connection = [], dialled(source)
    send = connection.send_record

    def recorded(record: dict[str, Any], deadline: Deadline) -> None:
        heard.append(record)
        send(record, deadline)

    connection.send_record = recorded  # an eavesdropper
    handshake.greet(connection, CONFIG, soon())
    connection.close()
    again = dialled(source)
    again.receive_record(soon())
    again.send_record(heard[0], soon())
    assert again.receive_record(soon()) == {"refused": "secret"}
    again.close()


def test_a_source_that_only_repeats_our_proof_is_not_believed():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    mirror, connection = KVConnection(server, "a mirror"), KVConnection(client, "the source")

    def reflect() -> None:
        mirror.send_record({"jdisagg": handshake.PROTOCOL, "nonce": "0" * 64}, soon())
        mirror.send_record(mirror.receive_record(soon()), soon())

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(PeerMismatch, match="does not share our secret"):
        handshake.greet(connection, CONFIG, soon())
    thread.join()
    for each in (mirror, connection, listener):
        each.close()


NOISE = {
    "binary": b"\xff" * 64,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a record over the limit": (MAX_RECORD_BYTES + 1).to_bytes(4, "big"),
    "a record that is none": b"\0\0\0\2[]",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_at_the_listener_ends_its_connection_and_nothing_else(source: Endpoint, noise: bytes):
    ticket = offered(source)
    connection = dialled(source)
    connection.socket.sendall(noise)
    connection.receive_record(soon())  # the greeting
    with pytest.raises(PeerDead):
        connection.receive_record(soon())
    connection.close()
    pull_by(CONFIG, ticket)


def test_a_peer_that_says_nothing_is_cut_off_after_the_control_timeout():
    transport = tcp(QUICK)
    connection = dialled(transport)
    connection.receive_record(soon())
    started_s = time.monotonic()
    with pytest.raises(PeerDead):
        connection.receive_record(soon())
    assert time.monotonic() - started_s < 20.0
    connection.close()
    transport.close()


def test_a_source_that_says_nothing_is_given_up_after_the_control_timeout():
    """However long the pull itself may take; called off, it ends at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname())
    pool, whole = ConnectionPool(QUICK), Deadline("a pull", time.monotonic() + 120.0)
    started_s = time.monotonic()
    with pytest.raises(PeerDead, match="did not greet us within 1 s"):
        pool.ask(address, {}, whole)
    assert time.monotonic() - started_s < 20.0
    whole.call_off("nobody wants it any more")
    with pytest.raises(TransferCancelled, match="nobody wants it"):
        pool.ask(address, {}, whole)
    pool.close()
    listener.close()


def test_half_open_connections_do_not_keep_a_peer_out():
    transport = tcp(CONFIG)
    ticket = offered(transport)
    strangers = [socket.create_connection(split_address(transport.address)) for _ in range(300)]
    try:
        pull_by(CONFIG, ticket)
        assert transport.held().connections < 200
    finally:
        for each in strangers:
            each.close()
        transport.close()


def test_a_handshake_that_trickles_in_ends_in_its_time_by_tls_too(certificate: tuple[Path, Path]):
    key, chain = certificate
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key)
    client = ssl.create_default_context(cafile=str(chain))
    for config in (QUICK, replace(QUICK, tls_server=server, tls_client=client)):
        transport = tcp(config)
        stranger = socket.create_connection(split_address(transport.address))
        started_s = time.monotonic()
        with pytest.raises(OSError):
            for byte in b"\x16\x03\x01\x02\x00" + bytes(400):
                stranger.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - started_s < 20.0
        stranger.close()
        transport.close()


def test_a_stranger_may_not_announce_more_than_a_handshake_needs(source: Endpoint):
    connection = dialled(source)
    connection.receive_record(soon())
    connection.socket.sendall((handshake.HANDSHAKE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(PeerDead):
        connection.receive_record(soon())
    connection.close()


def test_a_listener_without_descriptors_waits_for_one_and_does_not_spin(source: Endpoint):
    connection = KVConnection(socket.socket(), "the source")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (connection.socket.fileno() + 50, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        connection.socket.connect(split_address(source.address))
        began_s = time.process_time()
        time.sleep(0.6)
        assert time.process_time() - began_s < 0.1
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    handshake.greet(connection, CONFIG, soon())
    connection.close()


def test_segments_are_their_owners_alone_and_have_no_name():
    before = set(os.listdir("/dev/shm"))
    segment = make_segment(1 << 16)
    assert os.fstat(segment.descriptor).st_mode & 0o077 == 0
    assert set(os.listdir("/dev/shm")) == before
    os.close(segment.descriptor)


def test_a_peer_that_is_killed_leaves_no_segment_and_no_socket_and_the_next_one_starts():
    before = set(os.listdir("/dev/shm"))
    for _ in range(2):
        peer = Peer(["shm"])
        name = peer.addresses["shm"].removeprefix("unix:")
        assert name in Path("/proc/net/unix").read_text()
        peer.kill()
        assert name not in Path("/proc/net/unix").read_text()
        assert set(os.listdir("/dev/shm")) <= before


def test_a_guessed_id_without_its_tag_is_unknown(source: Endpoint):
    ticket = offered(source)
    connection = dialled(source)
    handshake.greet(connection, CONFIG, soon())
    for what in ("pull", "ack", "cancel", "ask"):
        connection.send_record({"do": what, "id": ticket.id, "tag": "f" * 64}, soon())
        assert connection.receive_record(soon())["refused"] == "TransferRefused"
    connection.close()
    pull_by(CONFIG, ticket)


@pytest.mark.parametrize(
    "forge",
    [
        {"address": "10.0.0.1:1"},
        {"id": 5},
        {"transfer": {"handoff": "other", "epoch": 1, "part": 0}},
        {"transfer": {"handoff": "h", "epoch": 2, "part": 0}},
        {"arrays": [{"shape": [2048], "dtype": "float32", "nbytes": 8192}]},
        {"tag": "é"},
    ],
)
def test_a_ticket_altered_anywhere_is_refused_before_anything_is_connected_or_allocated(forge: dict[str, Any]):
    array = jax.device_put(np.arange(1024, dtype=np.float32))
    record = issue("tcp", "127.0.0.1:9", TransferId("h", 1), [array], SECRET).to_json() | forge
    with pytest.raises(BadTicket, match="not signed by our secret"):
        pull_by(CONFIG, read_ticket(json.loads(json.dumps(record))))


@pytest.mark.parametrize(
    "forge",
    [
        {"arrays": [{"shape": [1 << 30, 1 << 30], "dtype": "float32", "nbytes": 4}]},
        {"arrays": [{"shape": [4], "dtype": "object", "nbytes": 32}]},
        {"arrays": [{"shape": [4], "dtype": "float32", "nbytes": 17}]},
        {"arrays": [{"shape": [-4], "dtype": "float32", "nbytes": 16}]},
        {"arrays": [{"shape": [True], "dtype": "float32", "nbytes": 4}]},
        {"arrays": []},
        {"arrays": [{"shape": [1] * 9, "dtype": "float32", "nbytes": 4}]},
        {"id": 1 << 60},
        {"address": "x" * 1000},
        {"transfer": None},
        {"tag": 7},
    ],
)
def test_a_ticket_that_cannot_be_is_refused_as_it_is_read(forge: dict[str, Any]):
    array = jax.device_put(np.arange(4, dtype=np.float32))
    record = issue("tcp", "127.0.0.1:9", TransferId("h", 1), [array], SECRET).to_json()
    assert read_ticket(json.loads(json.dumps(record))) == read_ticket(record)
    with pytest.raises(BadTicket):
        read_ticket(record | forge)


def test_a_ticket_of_another_transport_is_refused(source: Endpoint):
    ticket = replace(offered(source), transport="shm")
    ticket = replace(ticket, tag=tag_of(ticket, SECRET))
    verify(ticket, SECRET)
    with pytest.raises(TransferRefused, match=r"'shm', this is 'tcp'"):
        pull_by(CONFIG, ticket)


def test_a_sharded_array_is_offered_by_its_shards(source: Endpoint):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    whole = jax.device_put(np.zeros(8, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp")))
    with pytest.raises(BadTicket, match="2 devices"):
        source.offer(TransferId("h", 1), [whole], time.monotonic() + 1)
    assert source.held().offers == 0


def test_short_secrets_and_half_a_tls_are_refused():
    with pytest.raises(ConfigError, match=r"5 bytes, fewer than 16"):
        TransportConfig(b"short", IDENTITY)
    with pytest.raises(ConfigError, match="TLS"):
        TransportConfig(SECRET, IDENTITY, tls_client=ssl.create_default_context())
    assert SECRET.decode() not in repr(CONFIG)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", "/CN=jdisagg"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return key, chain


def test_bytes_cross_by_tls_and_a_peer_without_it_or_with_another_root_gets_nothing(certificate: tuple[Path, Path]):
    key, chain = certificate
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key)
    client = ssl.create_default_context(cafile=str(chain))
    safe = replace(CONFIG, tls_server=server, tls_client=client)
    source, other = tcp(safe), tcp(safe)
    values = np.random.default_rng(0).normal(size=(3, 1 << 20)).astype(np.float32)
    for part in range(2):
        ticket = source.offer(TransferId("h", 1, part), [jax.device_put(values)], time.monotonic() + 120)
        (array,) = other.pull(ticket, jax.devices()[:1], time.monotonic() + 120)
        assert np.array_equal(np.asarray(array), values) and other.ack(ticket)
    ticket = source.offer(TransferId("h", 2), [jax.device_put(values)], time.monotonic() + 120)
    with pytest.raises(PeerMismatch, match="no TLS"):
        pull_by(replace(safe, tls_client=ssl.create_default_context()), ticket)
    hasty = tcp(replace(safe, control_timeout_s=1.0))  # each end waits for the other to begin, until this one tires
    ticket = hasty.offer(TransferId("h", 3), [jax.device_put(values)], time.monotonic() + 120)
    with pytest.raises((PeerDead, PeerMismatch, BadTicket)):
        pull_by(CONFIG, ticket)
    for each in (source, other, hasty):
        each.close()


def test_every_field_of_the_identity_is_in_its_fingerprint():
    prints = {Identity("a", "b", "c", "d").fingerprint, Identity("x", "b", "c", "d").fingerprint}
    prints |= {Identity("a", "x", "c", "d").fingerprint, Identity("a", "b", "x", "d").fingerprint}
    assert len(prints | {Identity("a", "b", "c", "x").fingerprint}) == 5
