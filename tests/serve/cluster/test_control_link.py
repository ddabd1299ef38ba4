"""Worker processes are let in by their secret and kind, heard in order, missed when silent, and let in again."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.kv.transport.terms import Identity
from jdisagg.serve.cluster.link import METHOD, Link, Pulse
from jdisagg.serve.cluster.reception import Reception
from jdisagg.serve.cluster.visit import Visit

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

    def lose(self, why: str) -> None:
        self.told.put(("lose", why))


@pytest.fixture
def open_reception() -> Iterator[Callable[..., tuple[Reception, HostNotes]]]:
    opened: list[Reception] = []

    def make(port: int = 0) -> tuple[Reception, HostNotes]:
        notes = HostNotes()
        reception = Reception(f"127.0.0.1:{port}", SECRET, KIND, notes, QUICK)
        reception.start()
        opened.append(reception)
        return reception, notes

    yield make
    for reception in opened:
        reception.stop()


@pytest.fixture
def visit() -> Iterator[Callable[..., tuple[Visit, GuestNotes]]]:
    started: list[Visit] = []

    def make(port: int, secret: bytes = SECRET, kind: Identity = KIND, **more: Any) -> tuple[Visit, GuestNotes]:
        notes = GuestNotes()
        one = Visit(f"127.0.0.1:{port}", secret, kind, notes, QUICK, again_s=0.05, **more)
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


def test_a_stranger_who_proves_nothing_is_sent_away(open_reception):
    reception, host = open_reception()
    with grpc.insecure_channel(f"127.0.0.1:{reception.port}") as channel:
        records = iter([b'{"jdisagg": 1, "nonce": "' + b"0" * 32 + b'"}', b"x" * 100])
        call: Any = channel.stream_stream(METHOD)(records)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() is grpc.StatusCode.PERMISSION_DENIED
    assert host.told.empty()


def test_an_address_in_use_is_refused_by_name(open_reception):
    reception, _ = open_reception()
    with pytest.raises(ConfigError, match=str(reception.port)):
        Reception(f"127.0.0.1:{reception.port}", SECRET, KIND, HostNotes())
