"""A peer that has the secret and says what makes no sense, over a real connection: it loses its own session by a named
error, and nothing else happens."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jdisagg.core.codec import encode
from jdisagg.core.events import ROUTER
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import (
    Ack,
    Commit,
    Drawn,
    Ended,
    Message,
    Preempted,
    Progress,
    Renew,
    Reserved,
    StartPrefill,
    TokenDelta,
    View,
)
from jdisagg.core.request import Attempt, FinishReason, RequestId, Sampled, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role
from jdisagg.engine.toy import ToyExecutor
from jdisagg.kv.transport.choose import capability
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.policy.router.request_state import reserve_for
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.control_server import ControlServer
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV, records
from jdisagg.serve.cluster.link import Heartbeat, Link
from jdisagg.serve.cluster.nodes import WorkerNode
from jdisagg.serve.driver.driver import LiveDriver
from tests.serve.cluster.test_control_link import KIND, SECRET
from tests.serve.cluster.test_router_node import RouterFixture, worker
from tests.serve.live_http import eventually
from tests.sim.cases import request

A1 = Attempt(RequestId("a"), 1)
CALM = Heartbeat(interval_s=0.1, silence_s=60.0)
LIAR, VICTIM = "prefill-liar", "decode-0"
A = RequestId("a")


@dataclass
class Speaker:
    """A worker's process that says whatever it is told to; it joins once."""

    described: list[Any]
    heard: list[dict[str, Any]] = field(default_factory=list)
    sessions: int = 0
    link: Link | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def hello(self) -> dict[str, Any]:
        return {"workers": self.described, "now_s": 1.0}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self.link, self.sessions = link, self.sessions + 1

    def on_message(self, body: dict[str, Any]) -> None:
        self.heard.append(body)

    def on_lost(self, why: str) -> None:
        self.link = None
        self.over.set()

    def say(self, body: dict[str, Any]) -> None:
        assert self.link is not None
        self.link.send(body)


class ListeningRouter(RouterFixture):
    """A router's process with a port."""

    def __init__(self) -> None:
        super().__init__()
        self.control_server = ControlServer("127.0.0.1:0", SECRET, KIND, self.node, CALM)
        self.control_server.start()
        self.clients: list[ControlClient] = []
        self.victim = self.joined_by(worker(VICTIM))
        eventually(lambda: self.knows(VICTIM) and self.victim.link is not None)

    def joined_by(self, *peers: PeerRecord | dict[str, Any], retry_s: float = 60.0) -> Speaker:
        described = [peer if isinstance(peer, dict) else records([peer])[0] for peer in peers]
        worker_end = Speaker(described)
        self.clients.append(
            ControlClient(f"127.0.0.1:{self.control_server.port}", SECRET, KIND, worker_end, CALM, retry_s=retry_s)
        )
        self.clients[-1].start()
        return worker_end

    def liar(self) -> Speaker:
        worker_end = self.joined_by(worker(LIAR, Role.PREFILL, "another"))
        eventually(lambda: self.knows(VICTIM, LIAR) and worker_end.link is not None)
        return worker_end


@pytest.fixture
def listening() -> Iterator[ListeningRouter]:
    listening = ListeningRouter()
    yield listening
    for client in listening.clients:
        client.stop()
    listening.control_server.stop()
    alive = listening.node.driver.alive
    listening.node.driver.stop()
    listening.node.close()
    assert alive, "nothing that a peer says may end the driver"


def from_liar(to: str, message: Message, **changed: Any) -> dict[str, Any]:
    return {"from": LIAR, "to": to, "message": encode(message) | changed}


VIEW, COMMIT = View(1, 1, 0, 0), Commit(A1, Sampled(3), 6, 1)
PART = KVTransfer(A1, WorkerId(LIAR), WorkerId(VICTIM), (1,), (1,), 4)
START = StartPrefill(A1, request("a"), 0, WorkerId("x"), (1,), 1.0, 1.0)
RESERVE = reserve_for(A1, request("a"), 0, WorkerId(LIAR), 1.0)
UNSURE = TokenDelta(A1, 0, (Sampled(1, 0.0, ((2, math.nan),)),))
REACHED = Progress(A1, Mark.COMMITTED, 0.0)
LIES = {
    "a Commit to the router": (from_liar(ROUTER, COMMIT), "Commit: is not for"),
    "an order of the router to a worker": (from_liar(VICTIM, START), "StartPrefill: is not for"),
    "a Reserve to the router": (from_liar(ROUTER, RESERVE), "Reserve: is not for"),
    "an Ack the wrong way": (from_liar(VICTIM, Ack(A1)), "Ack: is not for"),
    "a View to a worker": (from_liar(VICTIM, VIEW), "View: is not for"),
    "text for a number": (from_liar(ROUTER, VIEW, free_pages="many"), "got `str` - at `$.free_pages`"),
    "lists for a number": (from_liar(ROUTER, VIEW, free_slots=[[[1]]]), "at `$.free_slots`"),
    "fewer pages than none": (from_liar(ROUTER, View(-1, 1, 0, 0)), "free_pages is -1"),
    "more pages than there are": (from_liar(ROUTER, View(65, 1, 0, 0)), "free_pages is 65 of 64"),
    "a time that is no number": (from_liar(ROUTER, REACHED, at_s=math.nan), "at_s is nan"),
    "a time without end": (from_liar(ROUTER, Ended(A1, FinishReason.STOP, math.inf, 1)), "at_s is inf"),
    "a reservation of pages that are not": (from_liar(ROUTER, Reserved(A1, (0, 65))), "2 pages that are not"),
    "a reservation of foreign pages": (from_liar(ROUTER, Reserved(A1, (1,), page_size=7)), "page_size 7"),
    "a token that is none": (from_liar(ROUTER, Drawn((TokenDelta(A1, 0, (Sampled(-1),)),))), "-1 is no token"),
    "output that is none": (from_liar(ROUTER, Preempted(A1, (1 << 40,), "")), "is no token"),
    "a Commit of a million parts": (from_liar(VICTIM, replace(COMMIT, num_parts=10**6)), "1000000 parts of 6 tokens"),
    "a message that is a list": ({"from": LIAR, "to": ROUTER, "message": [1]}, "names no record"),
    "no message at all": ({"from": LIAR, "to": ROUTER}, "names no record"),
    "KV to the router": ({"from": LIAR, "to": ROUTER, "kv": {}}, "the router is none"),
    "KV of nothing": ({"from": LIAR, "to": VICTIM, "kv": {"transfer": encode(PART)}}, "a notice that cannot be read"),
    "a number of 64 bits": (from_liar(ROUTER, VIEW, running=10**19), "Expected `int` <= 9223372036854775807"),
    "a log-probability that is none": (from_liar(ROUTER, Drawn((UNSURE,))), "of token 1 is no number"),
    "another's voice": ({"from": VICTIM, "to": ROUTER, "message": encode(VIEW)}, "speaks for 'decode-0'"),
    "a status of nothing": ({"status": 7}, "a clock that cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_session_of_the_liar_by_its_name_and_nobody_elses(
    listening: ListeningRouter, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, says = LIES[lie]
    caplog.set_level(logging.WARNING, logger="jdisagg.cluster")
    liar = listening.liar()
    liar.say(body)
    assert liar.over.wait(60), "the liar's session goes on"
    eventually(lambda: listening.knows(VICTIM))
    (gone,) = [record.message for record in caplog.records if record.message.startswith(f"{LIAR} is gone")]
    assert says in gone and len(gone) < 700
    assert "Traceback" not in caplog.text
    assert listening.victim.link is not None and listening.victim.sessions == 1
    assert not [one for one in listening.victim.heard if "message" in one or "kv" in one], "it was relayed"
    listening.victim.say({"from": VICTIM, "to": ROUTER, "message": encode(View(7, 2, 0, 0))})
    eventually(lambda: listening.router.peers[WorkerId(VICTIM)].view.free_pages == 7)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"page_size": "x"}, "Expected `int`, got `str` - at `$.page_size`"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": -5}, "num_pages is -5"),
        ({"num_slots": 10**18}, "num_slots is 1000000000000000000"),
        ({"table_buckets": []}, "table_buckets"),
        ({"role": "king"}, "Invalid enum value 'king' - at `$.role`"),
        ({"worker": 5}, "Expected `str`, got `int` - at `$.worker`"),
        ({"crown": 5}, "WorkerConfig: Object contains unknown field `crown`"),
    ],
)
def test_a_worker_of_sizes_that_cannot_be_is_sent_away_at_the_door(
    listening: ListeningRouter, changed: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = worker(LIAR, Role.PREFILL, "another").to_json()
    record["config"] = encode(record["config"]) | changed
    liar = listening.joined_by(record)
    eventually(lambda: "was sent away" in caplog.text)
    assert says in caplog.text and "Traceback" not in caplog.text
    assert liar.sessions == 0 and listening.knows(VICTIM) and listening.victim.link is not None


# ------------------------------------------------------------------ a worker's end


class Fake:
    """What answers at the router's port: it welcomes, and says what it is told to."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.lost: list[str] = []

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        return {}

    def on_joined(self, link: Link) -> None:
        self.links.append(link)

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        """It does not listen."""

    def on_lost(self, link: Link, why: str) -> None:
        self.lost.append(why)


@dataclass
class Workplace:
    fake: Fake
    driver: LiveDriver
    ended: list[str]


@pytest.fixture
def workplace() -> Iterator[Workplace]:
    peer, ended, fake = worker(VICTIM), [], Fake()
    machines: Any = {peer.worker: ToyExecutor(peer.config)}
    node = WorkerNode(RemoteKV(TransportConfig(SECRET, KIND), capability("cpu")), machines, [peer], ended.append)
    node.driver = LiveDriver(
        None, {peer.worker: Worker(peer.config)}, machines,
        deliver=lambda told: None, died=lambda error: ended.append(repr(error)), observers=(node.observe,), remote=node,
    )  # fmt: skip
    node.driver.start()
    control_server = ControlServer("127.0.0.1:0", SECRET, KIND, fake, CALM)
    control_server.start()
    client = ControlClient(f"127.0.0.1:{control_server.port}", SECRET, KIND, node, CALM, retry_s=0.05)
    client.start()
    eventually(lambda: len(fake.links) == 1)
    yield Workplace(fake, node.driver, ended)
    client.stop()
    control_server.stop()
    node.driver.stop()
    node.close()


def to_victim(message: Message, sender: str = ROUTER, **changed: Any) -> dict[str, Any]:
    return {"from": sender, "to": VICTIM, "message": encode(message) | changed}


@pytest.mark.parametrize(
    "body",
    [
        to_victim(VIEW),
        to_victim(COMMIT),
        to_victim(
            reserve_for(A1, request("a"), 0, WorkerId("p"), 1.0),
            attempt={"is": "Attempt", "request_id": "a", "epoch": "x"},
        ),
        to_victim(reserve_for(A1, request("a"), 0, WorkerId("p"), -1.0)),
        to_victim(reserve_for(A1, request("a", 10**4), 0, WorkerId("p"), 1.0)),
        {"to": "nobody"},
        {"peers": 7},
        {"gone": 7},
        {"peers": [{}]},
    ],
    ids=range(9),
)
def test_a_router_that_talks_nonsense_loses_the_worker_which_joins_anew(
    workplace: Workplace, body: dict[str, Any]
) -> None:
    workplace.fake.links[0].send(body)
    eventually(lambda: len(workplace.fake.links) == 2)
    assert workplace.driver.alive and not workplace.ended


def test_words_of_a_worker_that_is_gone_are_dropped_and_the_session_goes_on(workplace: Workplace) -> None:
    workplace.fake.links[0].send(to_victim(Renew(A1), sender="prefill-9"))
    workplace.fake.links[0].send(to_victim(Renew(A1), sender="prefill-9"))
    workplace.fake.links[0].send({"peers": []})
    assert not workplace.fake.lost and workplace.driver.alive and len(workplace.fake.links) == 1


def test_whatever_an_actor_makes_of_a_peers_word_it_does_not_end_the_driver(
    listening: ListeningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that was forgotten: the actor itself fails, and it is the speaker who goes."""
    liar = listening.liar()
    on_message: Callable[..., None] = listening.router._hear

    def fails(sender: WorkerId, message: Message, now_s: float) -> None:
        assert sender != LIAR, "an invariant does not hold"
        on_message(sender, message, now_s)

    monkeypatch.setattr(listening.router, "_hear", fails)
    liar.say(from_liar(ROUTER, VIEW))
    assert liar.over.wait(60)
    eventually(lambda: listening.knows(VICTIM))
    assert listening.node.driver.alive and listening.victim.link is not None
