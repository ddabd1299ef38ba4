"""Profiles of several processes by real control links; what stands for the profiler says what each process has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from jdisagg.core.errors import SenselessWord
from jdisagg.serve.cluster import profiles
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.control_server import ControlServer
from jdisagg.serve.cluster.kv_notices import records
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.cluster.profiles import FAILED, Answer, RouterProfiles, WorkerProfiles
from jdisagg.serve.observability.tracing import Busy, Files
from tests.serve.cluster.test_control_link import CALM, KIND, SECRET, Notes
from tests.serve.cluster.test_router_node import worker

LONG = bytes(range(256)) * 8000  # of several parts


class RouterSide(Notes):
    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        return {}

    def on_joined(self, link: Link) -> None:
        self.told.put(("joined", link))

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))

    def on_lost(self, link: Link, why: str) -> None:
        self.told.put(("lose", why))


class WorkerSide(Notes):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def hello(self) -> dict[str, Any]:
        return {"workers": records([worker(self._name, process=self._name)])}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link

    def on_message(self, body: dict[str, Any]) -> None:
        self.told.put(("hear", body))

    def on_lost(self, why: str) -> None:
        self.told.put(("lose", why))


def says(files: Files) -> Callable[[float], Files]:
    return lambda seconds: files | {"seconds": str(seconds).encode()}


@contextmanager
def cluster(**takes: Callable[[float], Files]) -> Iterator[tuple[RouterProfiles, dict[str, ControlClient]]]:
    """A router's end, and a process for each of `takes`; each has joined."""
    with ExitStack() as stack:
        notes = RouterSide()
        router = RouterProfiles(notes, says({"xplane.pb": b"of the router"}))
        server = ControlServer("127.0.0.1:0", SECRET, KIND, router, CALM)
        server.start()
        stack.callback(server.stop)
        clients = {}
        for name, take in takes.items():
            side = WorkerProfiles(WorkerSide(name), take)
            clients[name] = client = ControlClient(f"127.0.0.1:{server.port}", SECRET, KIND, side, CALM, retry_s=0.05)
            client.start()
            stack.callback(client.stop)
            assert notes.next()[0] == "joined"
        yield router, clients


def test_every_process_takes_one_at_the_same_time_and_long_ones_come_whole():
    both = threading.Barrier(2, timeout=60)

    def at_once(files: Files) -> Callable[[float], Files]:
        return lambda seconds: (both.wait(), says(files)(seconds))[1]

    long, short = {"xplane.pb": LONG}, {"xplane.pb": b"b", "trace.json.gz": b"c"}
    with cluster(one=at_once(long), two=at_once(short)) as (router, _):
        found = router.take(2.0)
    more = {"seconds": b"2.0"}
    assert found == {"router": {"xplane.pb": b"of the router"} | more, "one": long | more, "two": short | more}


def test_a_process_that_cannot_says_why_and_the_others_are_there():
    def broken(seconds: float) -> Files:
        raise RuntimeError("no profiler here")

    with cluster(one=broken, two=says({})) as (router, _):
        found = router.take(1.0)
    assert found["one"] == {FAILED: b"RuntimeError: no profiler here"} and found["two"] == {"seconds": b"1.0"}


def test_a_process_that_goes_meanwhile_holds_nobody_up():
    asked, ended = threading.Event(), threading.Event()

    def waits(seconds: float) -> Files:
        asked.set()
        ended.wait(60)
        return {}

    began_s = time.monotonic()
    with ThreadPoolExecutor() as pool, cluster(one=waits) as (router, clients):
        taking = pool.submit(router.take, 1.0)
        assert asked.wait(60)
        with pytest.raises(Busy):
            router.take(1.0)
        clients["one"].stop()
        assert b"the process is gone" in taking.result(60)["one"][FAILED]
        ended.set()
        assert router.take(1.0).keys() == {"router"}
    assert time.monotonic() - began_s < profiles.LATE_S


def test_one_that_never_answers_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiles, "LATE_S", 0.2)
    ended = threading.Event()
    with cluster(one=lambda seconds: {"late": bytes(ended.wait(60))}) as (router, _):
        assert router.take(1.0)["one"] == {FAILED: b"nothing came within 0.2 s"}
        ended.set()


@pytest.mark.parametrize(
    "said",
    [
        {"file": "../x", "data": ""},
        {"file": ".x", "data": ""},
        {"file": 7, "data": ""},
        {"file": "x", "data": "***"},
        {"file": "x", "data": None},
        {},
    ],
)
def test_a_part_that_makes_no_sense_is_the_peers_fault(said: dict[str, Any]):
    with pytest.raises(SenselessWord, match="a part of a profile"):
        Answer("one").note(said)


def test_a_profile_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiles, "MOST_BYTES", 10)
    answer = Answer("one")
    answer.note({"file": "x", "data": "AAAAAAAA"})
    with pytest.raises(SenselessWord, match="over 10 bytes"):
        answer.note({"file": "y", "data": "AAAAAAAA"})


@pytest.mark.parametrize(
    "asked", [None, {}, {"number": 1, "seconds": 0}, {"number": 1, "seconds": 1e9}, {"seconds": 1}]
)
def test_a_router_that_asks_for_nonsense_is_told_so(asked: Any):
    with pytest.raises(SenselessWord, match="cannot be taken"):
        WorkerProfiles(WorkerSide("one")).on_message({"profile": asked})
