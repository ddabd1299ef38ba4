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

from jdisagg.core.errors import ConfigError, TransportError
from jdisagg.core.settings import Settings
from jdisagg.core.wire import MAX_RECORD_BYTES, Seal
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.tcp import tcp
from jdisagg.kv.transport.ticket import Parcel
from jdisagg.serve.cluster.assemble import identity_of
from jdisagg.serve.cluster.certificates import channel_credentials, kv_contexts, server_credentials
from jdisagg.serve.cluster.link import BEAT, LAST, METHOD, PROTOCOL, Link, Pulse, cut, new_nonce
from jdisagg.serve.cluster.reception import Reception
from jdisagg.serve.cluster.visit import Visit
from jdisagg.serve.deployment import resolve_deployment
from tests.serve.cluster.processes import private

SECRET, OTHER_SECRET = b"sixteen bytes or more", b"another sixteen bytes"
KIND = Identity("model-a", "layout", "float32")
QUICK = Pulse(beat_s=0.05, silence_s=0.5)


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
        return self.told.get(timeout=10)


class HostNotes(Notes):
    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        self._link = link
        self.told.put(("admit", hello["role"]))
        return {"number": 7}

    def welcomed(self, link: Link) -> None:
        assert link is self._link

    def hear(self, link: Link, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))
        if "crash" in body:
            raise KeyError("crash")

    def lose(self, link: Link, why: str) -> None:
        self.told.put(("lose", why))


class GuestNotes(Notes):
    def hello(self) -> dict[str, Any]:
        return {"role": "decode"}

    def joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        self.told.put(("joined", welcome["number"]))

    def hear(self, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))
        if "crash" in body:
            raise KeyError("crash")

    def lose(self, why: str) -> None:
        self.told.put(("lose", why))


@pytest.fixture
def open_reception() -> Iterator[Callable[..., tuple[Reception, HostNotes]]]:
    opened: list[Reception] = []

    def make(port: int = 0, pulse: Pulse = QUICK, kind: Identity = KIND, **more: Any) -> tuple[Reception, HostNotes]:
        notes = HostNotes()
        reception = Reception(f"127.0.0.1:{port}", SECRET, kind, notes, pulse, **more)
        reception.start()
        opened.append(reception)
        return reception, notes

    yield make
    for reception in opened:
        reception.stop()


@pytest.fixture
def visit() -> Iterator[Callable[..., tuple[Visit, GuestNotes]]]:
    started: list[Visit] = []

    def make(
        port: int, secret: bytes = SECRET, kind: Identity = KIND, pulse: Pulse = QUICK, **more: Any
    ) -> tuple[Visit, GuestNotes]:
        notes = GuestNotes()
        one = Visit(f"127.0.0.1:{port}", secret, kind, notes, pulse, again_s=0.05, **more)
        one.start()
        started.append(one)
        return one, notes

    yield make
    for one in started:
        one.stop()


def test_words_go_both_ways_in_order(open_reception, visit):
    reception, host = open_reception()
    _, guest = visit(reception.port)
    assert host.next() == ("admit", "decode") and guest.next() == ("joined", 7)
    for number in range(200):
        guest.link.send({"n": number})
        host.link.send({"n": -number})
    assert [host.next() for _ in range(200)] == [("hear", {"n": number}) for number in range(200)]
    assert [guest.next() for _ in range(200)] == [("hear", {"n": -number}) for number in range(200)]


def test_a_quiet_link_stays(open_reception, visit):
    reception, host = open_reception()
    _, guest = visit(reception.port)
    assert host.next() and guest.next()
    time.sleep(3 * QUICK.silence_s)
    assert host.told.empty() and guest.told.empty(), "beats are no words, and nobody was missed"


def test_a_guest_that_leaves_is_missed_at_once(open_reception, visit):
    reception, host = open_reception()
    one, _ = visit(reception.port)
    host.next()
    one.stop()
    assert host.next()[0] == "lose"


def test_a_guest_that_goes_silent_is_missed(open_reception):
    reception, host = open_reception()
    silent = Visit(f"127.0.0.1:{reception.port}", SECRET, KIND, GuestNotes(), Pulse(beat_s=60, silence_s=60))
    silent.start()
    assert host.next() == ("admit", "decode")
    what, why = host.next()
    assert what == "lose" and "nothing heard" in why
    silent.stop()


def test_a_guest_joins_again_after_the_router_came_back(open_reception, visit):
    reception, host = open_reception()
    _, guest = visit(reception.port)
    assert host.next() and guest.next()
    reception.stop()
    assert guest.next()[0] == "lose"
    _, host = open_reception(reception.port)
    assert host.next() == ("admit", "decode") and guest.next() == ("joined", 7)


def test_another_secret_is_refused_at_both_ends(open_reception, visit):
    reception, host = open_reception()
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    visit(reception.port, secret=OTHER_SECRET, refused=why.put)
    assert "does not share our secret" in why.get(timeout=10)
    assert host.told.empty()


def test_another_model_is_refused_with_both_fingerprints(open_reception, visit):
    reception, host = open_reception()
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    other = Identity("model-b", "layout", "float32")
    visit(reception.port, kind=other, refused=why.put)
    told = why.get(timeout=10)
    assert KIND.fingerprint in told and other.fingerprint in told and "model-b" in told
    assert host.told.empty()


def test_a_worker_that_cuts_its_pages_otherwise_is_refused_with_both_fingerprints(open_reception, visit):
    here = Settings(mesh="prefill:tp2,decode:pp2", page_size=16, prefill_page_size=32)
    there = replace(here, page_size=32)
    kinds = [identity_of(resolve_deployment(each, "cpu", None), each) for each in (here, there)]
    reception, _ = open_reception(kind=kinds[0])
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    visit(reception.port, kind=kinds[1], refused=why.put)
    told = why.get(timeout=10)
    assert all(kind.fingerprint in told for kind in kinds) and kinds[0].fingerprint != kinds[1].fingerprint
    assert "in 32 to 16 of" in told and "in 32 to 32 of" in told


def test_a_stranger_who_proves_nothing_is_sent_away(open_reception):
    reception, host = open_reception()
    with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel:
        records = iter([b'{"jdisagg": 2, "nonce": "' + b"0" * 32 + b'"}', b"\0" + b"x" * 100])
        call: Any = channel.stream_stream(METHOD)(records)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() is grpc.StatusCode.PERMISSION_DENIED
    assert host.told.empty()


def test_an_address_in_use_is_refused_by_name(open_reception):
    reception, _ = open_reception()
    with pytest.raises(ConfigError, match=str(reception.port)):
        Reception(f"127.0.0.1:{reception.port}", SECRET, KIND, HostNotes())


def test_a_stranger_who_says_nothing_keeps_no_thread_for_long(open_reception):
    reception, host = open_reception(handshake_s=0.3)
    silence: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel:
        call: Any = channel.stream_stream(METHOD)(iter(silence.get, b""))
        with pytest.raises(grpc.RpcError):
            list(call)
        silence.put(b"")
    assert host.told.empty()


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
def test_junk_is_sent_away_and_others_are_served(open_reception, visit, junk: bytes):
    reception, host = open_reception()
    with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream(METHOD)(iter([junk, junk])))
    assert host.told.empty()
    visit(reception.port)
    assert host.next() == ("admit", "decode")


def test_a_record_over_the_limit_ends_the_stranger_and_not_the_router(open_reception, visit):
    reception, host = open_reception()
    with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel:
        call: Any = channel.stream_stream(METHOD)(iter([b"x" * (MAX_RECORD_BYTES + 1)]))
        with pytest.raises(grpc.RpcError):
            list(call)
    visit(reception.port)
    assert host.next() == ("admit", "decode")


def test_a_word_over_the_limit_is_not_sent_and_the_link_stays(open_reception, visit):
    patient = Pulse(beat_s=0.05, silence_s=60)  # to weigh the long word takes a while
    reception, host = open_reception(pulse=patient)
    _, guest = visit(reception.port, pulse=patient)
    assert host.next() and guest.next()
    guest.link.send({"long": "x" * MAX_RECORD_BYTES})
    guest.link.send({"short": "x"})
    assert host.next() == ("hear", {"short": "x"})


def test_a_word_that_cannot_be_followed_ends_the_link_and_the_guest_joins_again(open_reception, visit):
    reception, host = open_reception()
    _, guest = visit(reception.port)
    assert host.next() and guest.next()
    guest.link.send({"crash": 1})
    assert [host.next()[0] for _ in range(3)] == ["hear", "lose", "admit"]
    assert [guest.next()[0] for _ in range(2)] == ["lose", "joined"]
    host.link.send({"crash": 1})
    assert [guest.next()[0] for _ in range(3)] == ["hear", "lose", "joined"]


class RawGuest:
    """A peer that has the secret and does only what it is told."""

    def __init__(self, port: int, secret: bytes = SECRET) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self._out: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.call: Any = self.channel.stream_stream(METHOD)(iter(self._out.get, b""))
        nonce = new_nonce()
        self.say(json.dumps({"jdisagg": PROTOCOL, "nonce": nonce}).encode())
        session = nonce + json.loads(next(self.call))["nonce"]
        self._seal, self.heard = Seal(secret, session, "worker"), Seal(secret, session, "router")

    def say(self, record: bytes) -> None:
        self._out.put(record)

    def sealed(self, body: dict[str, Any]) -> bytes:
        return self._seal.close(body)

    def join(self) -> bytes:
        """The record that it joined by."""
        record = self.sealed({"role": "decode", "identity": asdict(KIND)})
        for piece in cut(record):
            self.say(piece)
        return record

    def close(self) -> None:
        self.say(b"")
        self.channel.close()


def test_a_recorded_handshake_is_worth_nothing_the_next_time(open_reception):
    reception, host = open_reception()
    heard = RawGuest(reception.port)
    record = heard.join()
    assert host.next() == ("admit", "decode")
    heard.close()
    assert host.next()[0] == "lose"
    replayed = RawGuest(reception.port)
    for piece in cut(record):
        replayed.say(piece)
    with pytest.raises(grpc.RpcError):
        next(replayed.call)
    assert replayed.call.code() is grpc.StatusCode.PERMISSION_DENIED and host.told.empty()
    replayed.close()


def test_words_out_of_step_cut_short_or_in_wrong_pieces_end_the_peer_that_says_them(open_reception, visit):
    reception, host = open_reception()
    for spoil in (lambda word: word[:-1], lambda word: b"x" + word[1:], lambda word: LAST + word[:9]):
        guest = RawGuest(reception.port)
        guest.join()
        assert host.next() == ("admit", "decode")
        guest.sealed({"lost": "on the way"})
        guest.say(spoil(next(cut(guest.sealed({"n": 1})))))
        assert host.next()[0] == "lose"
        guest.close()
    visit(reception.port)
    assert host.next() == ("admit", "decode")


def test_half_open_streams_do_not_delay_one_who_joins(open_reception, visit):
    reception, host = open_reception(handshake_s=30.0)
    strangers, calls, silence = [], [], threading.Event()
    for _ in range(40):
        channel = grpc.insecure_channel(f"127.0.0.1:{reception.port}", [("grpc.use_local_subchannel_pool", 1)])
        first = b'{"jdisagg": 2, "nonce": "' + b"0" * 32 + b'"}'
        strangers += [channel]
        for number in range(8):
            words = chain([first] if number % 2 else [], (b"" for _ in iter(silence.wait, None)))
            calls.append(channel.stream_stream(METHOD)(words))
    try:
        time.sleep(1.0)
        began_s = time.monotonic()
        visit(reception.port)
        assert host.next() == ("admit", "decode")
        assert time.monotonic() - began_s < 3.0
    finally:
        silence.set()
        for channel in strangers:
            channel.close()


def test_a_stranger_cannot_write_lines_of_the_log(open_reception, caplog):
    reception, _ = open_reception()
    for junk in (b'{"jdisagg":"\\nWARNING forged"}', b'{"jdisagg":2,"nonce":"\\nWARNING forged"}'):
        with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(METHOD)(iter([junk])))
    told = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(told) == 2 and not [each for each in told if "\n" in each]


def test_a_peer_that_is_stopped_is_missed_though_words_for_it_wait(open_reception):
    reception, host = open_reception()
    guest = RawGuest(reception.port)
    guest.join()
    assert host.next() == ("admit", "decode")
    for _ in range(20):
        host.link.send({"long": "x" * (1 << 20)})  # more than all buffers on the way
    told_s = time.monotonic()
    assert host.next()[0] == "lose"
    assert time.monotonic() - told_s < 5 * QUICK.silence_s
    guest.close()


def test_a_router_that_is_stopped_is_missed_though_words_for_it_wait(open_reception, visit):
    reception, host = open_reception(pulse=Pulse(beat_s=60, silence_s=60))
    host.hear = lambda link, body: time.sleep(60)  # takes one word, and no more
    _, guest = visit(reception.port)
    assert guest.next() == ("joined", 7)
    for _ in range(20):
        guest.link.send({"long": "x" * (1 << 20)})
    what, why = guest.next()
    assert what == "lose" and "nothing heard" in why


def test_a_peer_that_speaks_and_never_listens_is_ended_when_too_much_waits_for_it(open_reception, monkeypatch):
    monkeypatch.setattr("jdisagg.serve.cluster.link.MOST_WAITING", 1000)
    reception, host = open_reception()
    guest = RawGuest(reception.port)
    guest.join()
    assert host.next() == ("admit", "decode")
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            guest.say(next(cut(guest.sealed(BEAT))))

    threading.Thread(target=beat, daemon=True).start()
    for _ in range(2000):
        host.link.send({"long": "x" * 10_000})
    what, why = host.next()
    over.set()
    assert what == "lose" and "1000 words unread" in why
    guest.close()


@pytest.mark.parametrize("answer", [b"", b"[" * 5000, b"\xff" * 100, b"{}", b"x" * (8 << 20)])
def test_a_router_that_lies_is_asked_again_and_nothing_else_happens(visit, caplog, answer: bytes):
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
    _, guest = visit(port)
    for _ in range(3):
        asked.get(timeout=10)
    assert guest.told.empty()
    assert not [record for record in caplog.records if record.exc_info]
    server.stop(grace=0).wait()


def test_a_guest_waits_for_a_router_behind_a_port_that_never_answers(open_reception, visit):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        one, _ = visit(mute.getsockname()[1], handshake_s=0.3)
        time.sleep(1.0)
        began_s = time.monotonic()
        one.stop()
        assert time.monotonic() - began_s < 3


@pytest.fixture
def certified(certificate: tuple[str, str]) -> Settings:
    key, cert = certificate
    return Settings(tls_cert=cert, tls_key=key, tls_ca=cert)


def test_by_tls_a_guest_joins_and_one_without_a_certificate_does_not(open_reception, visit, certified: Settings):
    reception, host = open_reception(credentials=server_credentials(certified))
    visit(reception.port)  # in the clear
    visit(reception.port, credentials=grpc.ssl_channel_credentials(Path(certified.tls_ca).read_bytes()))
    time.sleep(0.5)
    assert host.told.empty()
    _, guest = visit(reception.port, credentials=channel_credentials(certified))
    assert host.next() == ("admit", "decode") and guest.next() == ("joined", 7)


def test_kv_crosses_by_the_same_certificates(certified: Settings):
    server, client = kv_contexts(certified)
    source = tcp(TransportConfig(SECRET, KIND, tls_server=server, tls_client=client))
    sink, plain = tcp(source.terms), tcp(TransportConfig(SECRET, KIND))
    try:
        array = jnp.arange(1000.0)
        ticket = source.offer(Parcel("r", 1, 0), [array], time.monotonic() + 20)
        with pytest.raises(TransportError):
            plain.pull(ticket, jax.devices()[:1], time.monotonic() + 3)
        (pulled,) = sink.pull(ticket, jax.devices()[:1], time.monotonic() + 20)
        assert (pulled == array).all()
    finally:
        for each in (source, sink, plain):
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
