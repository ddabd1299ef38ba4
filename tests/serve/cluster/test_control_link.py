"""Worker processes are let in by their secret and kind, heard in order, missed when silent, and let in again."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES, AuthenticatedChannel
from jdisagg.core.errors import ConfigError, TransportError
from jdisagg.core.settings import Settings
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.tcp import tcp
from jdisagg.kv.transport.ticket import TransferId
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.control_server import ControlServer
from jdisagg.serve.cluster.link import (
    HEARTBEAT,
    LAST,
    METHOD,
    PROTOCOL,
    Heartbeat,
    Link,
    channel_credentials,
    kv_contexts,
    new_nonce,
    server_credentials,
    split_record,
)
from jdisagg.serve.cluster.router_process import identity_of
from jdisagg.serve.deploy.deployment import resolve_deployment
from tests.serve.cluster.processes import private

SECRET, OTHER_SECRET = b"sixteen bytes or more", b"another sixteen bytes"
KIND = Identity("model-a", "layout", "float32")
CALM = Heartbeat(interval_s=0.1, silence_s=90.0)  # nobody is missed because the machine is busy
QUICK = Heartbeat(interval_s=0.05, silence_s=1.5)  # where being missed is the subject


class Notes:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._link: Link | None = None

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    def next(self) -> tuple[str, Any]:
        return self.told.get(timeout=60)


class RouterNotes(Notes):
    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        self._link = link
        self.told.put(("admit", hello["role"]))
        return {"number": 7}

    def on_joined(self, link: Link) -> None:
        assert link is self._link

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))
        if "crash" in body:
            raise KeyError("crash")

    def on_lost(self, link: Link, why: str) -> None:
        self.told.put(("lose", why))


class WorkerNotes(Notes):
    def hello(self) -> dict[str, Any]:
        return {"role": "decode"}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        self.told.put(("joined", welcome["number"]))

    def on_message(self, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))
        if "crash" in body:
            raise KeyError("crash")

    def on_lost(self, why: str) -> None:
        self.told.put(("lose", why))


@pytest.fixture
def open_server() -> Iterator[Callable[..., tuple[ControlServer, RouterNotes]]]:
    opened: list[ControlServer] = []

    def make(
        port: int = 0, heartbeat: Heartbeat = CALM, kind: Identity = KIND, **more: Any
    ) -> tuple[ControlServer, RouterNotes]:
        notes = RouterNotes()
        control_server = ControlServer(f"127.0.0.1:{port}", SECRET, kind, notes, heartbeat, **more)
        control_server.start()
        opened.append(control_server)
        return control_server, notes

    yield make
    for control_server in opened:
        control_server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[ControlClient, WorkerNotes]]]:
    started: list[ControlClient] = []

    def make(
        port: int, secret: bytes = SECRET, kind: Identity = KIND, heartbeat: Heartbeat = CALM, **more: Any
    ) -> tuple[ControlClient, WorkerNotes]:
        notes = WorkerNotes()
        one = ControlClient(f"127.0.0.1:{port}", secret, kind, notes, heartbeat, retry_s=0.05, **more)
        one.start()
        started.append(one)
        return one, notes

    yield make
    for one in started:
        one.stop()


def test_messages_go_both_ways_in_order(open_server, connect):
    control_server, router = open_server()
    _, worker = connect(control_server.port)
    assert router.next() == ("admit", "decode") and worker.next() == ("joined", 7)
    for number in range(200):
        worker.link.send({"n": number})
        router.link.send({"n": -number})
    assert [router.next() for _ in range(200)] == [("hear", {"n": number}) for number in range(200)]
    assert [worker.next() for _ in range(200)] == [("hear", {"n": -number}) for number in range(200)]


def test_a_quiet_link_stays(open_server, connect):
    control_server, router = open_server(heartbeat=QUICK)
    _, worker = connect(control_server.port, heartbeat=QUICK)
    assert router.next() and worker.next()
    time.sleep(2 * QUICK.silence_s)
    assert router.told.empty() and worker.told.empty(), "heartbeats are no messages, and nobody was missed"


def test_a_worker_that_leaves_is_missed_at_once(open_server, connect):
    control_server, router = open_server()
    one, _ = connect(control_server.port)
    router.next()
    one.stop()
    assert router.next()[0] == "lose"


def test_a_worker_that_goes_silent_is_missed(open_server):
    control_server, router = open_server(heartbeat=QUICK)
    silent = ControlClient(
        f"127.0.0.1:{control_server.port}", SECRET, KIND, WorkerNotes(), Heartbeat(interval_s=60, silence_s=60)
    )
    silent.start()
    assert router.next() == ("admit", "decode")
    what, why = router.next()
    assert what == "lose" and "nothing heard" in why
    silent.stop()


def test_a_worker_joins_again_after_the_router_came_back(open_server, connect):
    control_server, router = open_server()
    _, worker = connect(control_server.port)
    assert router.next() and worker.next()
    control_server.stop()
    assert worker.next()[0] == "lose"
    _, router = open_server(control_server.port)
    assert router.next() == ("admit", "decode") and worker.next() == ("joined", 7)


def test_another_secret_is_refused_at_the_workers_end(open_server, connect):
    control_server, router = open_server()
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    connect(control_server.port, secret=OTHER_SECRET, refused=why.put)
    assert "does not share our secret" in why.get(timeout=60)
    assert router.told.empty()


def test_another_model_is_refused_with_both_fingerprints(open_server, connect):
    control_server, router = open_server()
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    other = Identity("model-b", "layout", "float32")
    connect(control_server.port, kind=other, refused=why.put)
    told = why.get(timeout=60)
    assert KIND.fingerprint in told and other.fingerprint in told and "model-b" in told
    assert router.told.empty()


def test_a_worker_that_cuts_its_pages_otherwise_is_refused_with_both_fingerprints(open_server, connect):
    here = Settings(mesh="prefill:tp2,decode:pp2", page_size=16, prefill_page_size=32)
    there = replace(here, page_size=32)
    kinds = [identity_of(resolve_deployment(each, "cpu", None), each) for each in (here, there)]
    control_server, _ = open_server(kind=kinds[0])
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    connect(control_server.port, kind=kinds[1], refused=why.put)
    told = why.get(timeout=60)
    assert all(kind.fingerprint in told for kind in kinds) and kinds[0].fingerprint != kinds[1].fingerprint
    assert "in 32 to 16 of" in told and "in 32 to 32 of" in told


def test_a_stranger_who_proves_nothing_is_sent_away(open_server):
    control_server, router = open_server()
    with grpc.insecure_channel(f"127.0.0.1:{control_server.port}") as channel:
        records = iter([b'{"jdisagg": 2, "nonce": "' + b"0" * 32 + b'"}', b"\0" + b"x" * 100])
        call: Any = channel.stream_stream(METHOD)(records)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() is grpc.StatusCode.PERMISSION_DENIED
    assert router.told.empty()


def test_an_address_in_use_is_refused_by_name(open_server):
    control_server, _ = open_server()
    with pytest.raises(ConfigError, match=str(control_server.port)):
        ControlServer(f"127.0.0.1:{control_server.port}", SECRET, KIND, RouterNotes())


def test_a_stranger_who_says_nothing_keeps_no_thread_for_long(open_server):
    control_server, router = open_server(handshake_s=0.3)
    silence: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{control_server.port}") as channel:
        call: Any = channel.stream_stream(METHOD)(iter(silence.get, b""))
        with pytest.raises(grpc.RpcError):
            list(call)
        silence.put(b"")
    assert router.told.empty()


JUNK = [
    b"",
    b"\x00" * 2000,
    b"[]",
    b"[" * 2000,
    b'{"jdisagg": 99, "nonce": "0"}',
    b'{"jdisagg": 2}',
    b'{"jdisagg": 2, "nonce": "' + rb"\ud800" * 32 + b'"}',
    b'{"jdisagg": 2, "nonce": "' + b"0" * 32 + b'"}',
]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_sent_away_and_others_are_served(open_server, connect, junk: bytes):
    control_server, router = open_server()
    with grpc.insecure_channel(f"127.0.0.1:{control_server.port}") as channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream(METHOD)(iter([junk, junk])))
    assert router.told.empty()
    connect(control_server.port)
    assert router.next() == ("admit", "decode")


def test_a_record_over_the_limit_ends_the_stranger_and_not_the_router(open_server, connect):
    control_server, router = open_server()
    with grpc.insecure_channel(f"127.0.0.1:{control_server.port}") as channel:
        call: Any = channel.stream_stream(METHOD)(iter([b"x" * (MAX_RECORD_BYTES + 1)]))
        with pytest.raises(grpc.RpcError):
            list(call)
    connect(control_server.port)
    assert router.next() == ("admit", "decode")


def test_a_message_over_the_limit_is_not_sent_and_the_link_stays(open_server, connect):
    control_server, router = open_server()
    _, worker = connect(control_server.port)
    assert router.next() and worker.next()
    worker.link.send({"long": "x" * MAX_RECORD_BYTES})
    worker.link.send({"short": "x"})
    assert router.next() == ("hear", {"short": "x"})


def test_a_message_that_cannot_be_followed_ends_the_link_and_the_worker_joins_again(open_server, connect):
    control_server, router = open_server()
    _, worker = connect(control_server.port)
    assert router.next() and worker.next()
    worker.link.send({"crash": 1})
    assert [router.next()[0] for _ in range(3)] == ["hear", "lose", "admit"]
    assert [worker.next()[0] for _ in range(2)] == ["lose", "joined"]
    router.link.send({"crash": 1})
    assert [worker.next()[0] for _ in range(3)] == ["hear", "lose", "joined"]


class RawWorker:
    """A peer that has the secret and does only what it is told."""

    def __init__(self, port: int, secret: bytes = SECRET) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self._out: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.call: Any = self.channel.stream_stream(METHOD)(iter(self._out.get, b""))
        nonce = new_nonce()
        self.say(json.dumps({"jdisagg": PROTOCOL, "nonce": nonce}).encode())
        session = nonce + json.loads(next(self.call))["nonce"]
        self._outgoing, self.heard = (
            AuthenticatedChannel(secret, session, "worker"),
            AuthenticatedChannel(secret, session, "router"),
        )

    def say(self, record: bytes) -> None:
        self._out.put(record)

    def signed(self, body: dict[str, Any]) -> bytes:
        return self._outgoing.sign(body)

    def join(self) -> bytes:
        """The record that it joined by."""
        record = self.signed({"role": "decode", "identity": asdict(KIND)})
        for piece in split_record(record):
            self.say(piece)
        return record

    def close(self) -> None:
        self.say(b"")
        self.channel.close()


def test_a_recorded_handshake_is_worth_nothing_the_next_time(open_server):
    control_server, router = open_server()
    heard = RawWorker(control_server.port)
    record = heard.join()
    assert router.next() == ("admit", "decode")
    heard.close()
    assert router.next()[0] == "lose"
    replayed = RawWorker(control_server.port)
    for piece in split_record(record):
        replayed.say(piece)
    with pytest.raises(grpc.RpcError):
        next(replayed.call)
    assert replayed.call.code() is grpc.StatusCode.PERMISSION_DENIED and router.told.empty()
    replayed.close()


def test_messages_out_of_step_cut_short_or_in_wrong_pieces_end_the_peer_that_says_them(open_server, connect):
    control_server, router = open_server()
    for spoil in (lambda piece: piece[:-1], lambda piece: b"x" + piece[1:], lambda piece: LAST + piece[:9]):
        worker = RawWorker(control_server.port)
        worker.join()
        assert router.next() == ("admit", "decode")
        worker.signed({"lost": "on the way"})
        worker.say(spoil(next(split_record(worker.signed({"n": 1})))))
        assert router.next()[0] == "lose"
        worker.close()
    connect(control_server.port)
    assert router.next() == ("admit", "decode")


def test_half_open_streams_do_not_delay_one_who_joins(open_server, connect):
    control_server, router = open_server(handshake_s=30.0)
    strangers, calls, silence = [], [], threading.Event()
    for _ in range(40):
        channel = grpc.insecure_channel(f"127.0.0.1:{control_server.port}", [("grpc.use_local_subchannel_pool", 1)])
        first = b'{"jdisagg": 2, "nonce": "' + b"0" * 32 + b'"}'
        strangers += [channel]
        for number in range(8):
            stream = chain([first] if number % 2 else [], (b"" for _ in iter(silence.wait, None)))
            calls.append(channel.stream_stream(METHOD)(stream))
    try:
        time.sleep(1.0)
        began_s = time.monotonic()
        connect(control_server.port)
        assert router.next() == ("admit", "decode")
        assert time.monotonic() - began_s < 6.0
    finally:
        silence.set()
        for channel in strangers:
            channel.close()


def test_a_stranger_cannot_write_lines_of_the_log(open_server, caplog):
    control_server, _ = open_server()
    for junk in (b'{"jdisagg":"\\nWARNING forged"}', b'{"jdisagg":%d,"nonce":"\\nWARNING forged"}' % PROTOCOL):
        with grpc.insecure_channel(f"127.0.0.1:{control_server.port}") as channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(METHOD)(iter([junk])))
    told = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(told) == 2 and not [each for each in told if "\n" in each]


def test_a_peer_that_is_stopped_is_missed_though_messages_for_it_wait(open_server):
    control_server, router = open_server(heartbeat=QUICK)
    worker = RawWorker(control_server.port)
    worker.join()
    assert router.next() == ("admit", "decode")
    for _ in range(20):
        router.link.send({"long": "x" * (1 << 20)})  # more than all buffers on the way
    assert router.next()[0] == "lose"
    worker.close()


def test_a_router_that_is_stopped_is_missed_though_messages_for_it_wait(open_server, connect):
    control_server, router = open_server(heartbeat=Heartbeat(interval_s=60, silence_s=60))
    router.on_message = lambda link, body: time.sleep(60)  # takes one message, and no more
    _, worker = connect(control_server.port, heartbeat=QUICK)
    assert worker.next() == ("joined", 7)
    for _ in range(20):
        worker.link.send({"long": "x" * (1 << 20)})
    what, why = worker.next()
    assert what == "lose" and "nothing heard" in why


def test_a_peer_that_speaks_and_never_listens_is_ended_when_too_much_waits_for_it(open_server, monkeypatch):
    monkeypatch.setattr("jdisagg.serve.cluster.link.MOST_WAITING", 1000)
    control_server, router = open_server(heartbeat=replace(QUICK, silence_s=5.0))
    worker = RawWorker(control_server.port)
    worker.join()
    assert router.next() == ("admit", "decode")
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            worker.say(next(split_record(worker.signed(HEARTBEAT))))

    threading.Thread(target=beat, daemon=True).start()
    for _ in range(2000):
        router.link.send({"long": "x" * 10_000})
    what, why = router.next()
    over.set()
    assert what == "lose" and "1000 messages unread" in why
    worker.close()


@pytest.mark.parametrize("answer", [b"", b"[" * 5000, b"\xff" * 100, b"{}", b"x" * (8 << 20)])
def test_a_router_that_lies_is_asked_again_and_nothing_else_happens(connect, caplog, answer: bytes):
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def lie(records: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        asked.put(next(records))
        yield answer

    server = grpc.server(ThreadPoolExecutor(4))
    service, method = METHOD.strip("/").split("/")
    lies = {method: grpc.stream_stream_rpc_method_handler(lie)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, lies)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _, worker = connect(port)
    for _ in range(3):
        asked.get(timeout=60)
    assert worker.told.empty()
    assert not [record for record in caplog.records if record.exc_info]
    server.stop(grace=0).wait()


def test_a_worker_waits_for_a_router_behind_a_port_that_never_answers(open_server, connect):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        one, _ = connect(mute.getsockname()[1], handshake_s=0.3)
        time.sleep(1.0)
        began_s = time.monotonic()
        one.stop()
        assert time.monotonic() - began_s < 10


@pytest.fixture
def certified(certificate: tuple[str, str]) -> Settings:
    key, cert = certificate
    return Settings(tls_cert=cert, tls_key=key, tls_ca=cert)


def test_by_tls_a_worker_joins_and_one_without_a_certificate_does_not(open_server, connect, certified: Settings):
    control_server, router = open_server(credentials=server_credentials(certified))
    connect(control_server.port)  # in the clear
    connect(control_server.port, credentials=grpc.ssl_channel_credentials(Path(certified.tls_ca).read_bytes()))
    time.sleep(0.5)
    assert router.told.empty()
    _, worker = connect(control_server.port, credentials=channel_credentials(certified))
    assert router.next() == ("admit", "decode") and worker.next() == ("joined", 7)


def test_kv_crosses_by_the_same_certificates(certified: Settings):
    server, connect = kv_contexts(certified)
    source = tcp(TransportConfig(SECRET, KIND, tls_server=server, tls_client=connect))
    sink, unencrypted = tcp(source.config), tcp(TransportConfig(SECRET, KIND))
    try:
        array = jnp.arange(1000.0)
        ticket = source.offer(TransferId("r", 1, 0), [array], time.monotonic() + 20)
        with pytest.raises(TransportError):
            unencrypted.pull(ticket, jax.devices()[:1], time.monotonic() + 3)
        (pulled,) = sink.pull(ticket, jax.devices()[:1], time.monotonic() + 20)
        assert (pulled == array).all()
    finally:
        for each in (source, sink, unencrypted):
            each.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings(tls_cert="c.pem"), "give both or neither"),
        (Settings(tls_ca="a.pem"), "needs --tls_cert"),
        (Settings(tls_cert="/nowhere.pem", tls_key="/nowhere.pem"), "/nowhere.pem: No such file"),
    ],
)
def test_half_a_tls_is_refused(settings: Settings, says: str):
    with pytest.raises(ConfigError, match=says):
        server_credentials(settings)


def test_a_certificate_that_is_none_is_refused_by_its_flag(tmp_path: Path):
    path = private(tmp_path / "junk.pem", "junk")
    with pytest.raises(ConfigError, match=r"--tls_cert=.*junk\.pem"):
        kv_contexts(Settings(tls_cert=str(path), tls_key=str(path)))
