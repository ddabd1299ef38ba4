"""The router's process trusts no message: names, senders, clocks and counts are checked, and nobody stays."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from jdisagg.core.authenticated_channel import AuthenticatedChannel
from jdisagg.core.codec import encode
from jdisagg.core.errors import BadTicket, SenselessWord, TransferRefused
from jdisagg.core.events import ROUTER
from jdisagg.core.messages import Ack, Drawn, Joined, View
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.kv.transport.choose import capability
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV, records
from jdisagg.serve.cluster.link import Heartbeat, Link
from jdisagg.serve.cluster.role_options import Option, options_json
from jdisagg.serve.cluster.router_node import RouterNode
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.role_change import ReshapeTimes
from jdisagg.serve.driver.service import Draining, Update
from jdisagg.serve.observability.metrics import Metrics
from tests.serve.live_http import eventually
from tests.serve.scripted import FIXTURE

SECRET = b"sixteen bytes or more"


class RecordingLink(Link):
    """A link that keeps what is sent instead of sending it."""

    def __init__(self) -> None:
        super().__init__(
            AuthenticatedChannel(SECRET, "s", "router"), AuthenticatedChannel(SECRET, "s", "worker"), Heartbeat()
        )
        self.sent: list[dict[str, Any]] = []

    def send(self, body: dict[str, Any], num_messages: int = 1) -> None:
        self.sent.append(body)


class RouterFixture:
    """A router's process without workers of its own."""

    def __init__(self) -> None:
        here = capability("cpu")
        remote_kv = RemoteKV(TransportConfig(SECRET, Identity("model", "layout", "float32")), here)
        self.node = RouterNode(remote_kv, {}, [])
        self.router = Router(RouterConfig(workers_return=True), [])
        self.metrics = Metrics("model")
        self.node.merged = self.metrics.merged
        self.node.driver = LiveDriver(
            self.router, {}, {}, deliver=lambda told: None, died=lambda error: None,
            observers=(self.metrics.observe, self.node.observe), remote=self.node,
        )  # fmt: skip
        self.node.driver.start()

    def join(self, *peers: PeerRecord, **more: Any) -> RecordingLink:
        link = RecordingLink()
        self.node.admit(link, {"workers": records(peers), "now_s": time.monotonic(), **more})
        self.node.on_joined(link)
        return link

    def leaving(self, name: str) -> bool | None:
        """Whether the router takes it for one that leaves; None where it knows no such worker."""
        peer = self.router.peers.get(WorkerId(name))
        return None if peer is None else peer.leaving

    def knows(self, *names: str) -> bool:
        return set(self.router.peers) == set(names) == set(self.node.peers)


@pytest.fixture
def fixture() -> Iterator[RouterFixture]:
    fixture = RouterFixture()
    yield fixture
    assert fixture.node.driver.alive, "nothing that a peer says may end the driver"
    fixture.node.driver.stop()
    fixture.node.close()


def worker(name: str, role: Role = Role.DECODE, process: str = "one", **more: Any) -> PeerRecord:
    config = WorkerConfig(WorkerId(name), role, 64, 16, 256, num_slots=4)
    return PeerRecord(config, (), (replace(capability("cpu"), process=process, **more),), ())


def said(sender: str, to: str, message: Any) -> dict[str, Any]:
    return {"from": sender, "to": to, "message": encode(message)}


def test_workers_come_and_go_and_the_others_are_told(fixture: RouterFixture):
    first = fixture.join(worker("decode-0"))
    second = fixture.join(worker("prefill-0", Role.PREFILL, "two"))
    assert fixture.node.able
    eventually(lambda: fixture.knows("decode-0", "prefill-0"))
    assert [one["config"].worker for one in first.sent[-1]["peers"]] == ["prefill-0"]
    fixture.node.on_lost(second, "it left")
    eventually(lambda: fixture.knows("decode-0"))
    assert first.sent[-1] == {"gone": ["prefill-0"]} and not fixture.node.able


def test_a_second_process_of_the_same_names_is_refused(fixture: RouterFixture):
    fixture.join(worker("decode-0"))
    with pytest.raises(BadTicket, match="decode-0 is here already"):
        fixture.join(worker("decode-0", process="another"))
    eventually(lambda: fixture.knows("decode-0"))


def test_a_process_that_comes_back_before_it_was_missed_takes_its_own_place(fixture: RouterFixture):
    first = fixture.join(worker("decode-0"))
    again = fixture.join(worker("decode-0"))
    assert first.why_over == "its process joined anew"
    fixture.node.on_lost(first, "its end is found out late")
    eventually(lambda: fixture.knows("decode-0"))
    fixture.node.post(WorkerId("decode-0"), {"x": 1})
    assert again.sent[-1] == {"x": 1}


def test_workers_that_kv_cannot_reach_are_refused_at_the_door(fixture: RouterFixture):
    fixture.join(worker("decode-0"))
    with pytest.raises(TransferRefused, match="no transport"):
        fixture.join(worker("prefill-0", Role.PREFILL, "two", transports=()))


def test_nobody_speaks_for_a_worker_of_another_process(fixture: RouterFixture):
    fixture.join(worker("decode-0"))
    stranger = fixture.join(worker("decode-1", process="two"))
    for body in (said("decode-0", ROUTER, View(1, 1, 0, 0)), {"lost": "decode-0"}):
        with pytest.raises(BadTicket, match="not its own"):
            fixture.node.on_message(stranger, body)
    eventually(lambda: fixture.knows("decode-0", "decode-1"))


@pytest.mark.parametrize(
    "body",
    [
        {"from": "decode-0", "to": ROUTER, "message": None},
        {"from": "decode-0", "to": ROUTER, "message": {"is": "Nothing"}},
        {"from": "decode-0", "to": ROUTER},
        {"from": "decode-0", "to": ROUTER, "message": encode(worker("x").config)},
        {"status": {"now_s": 1.0, "recompiles": 0, "samples": [["a", "b", {}, 1.0]]}},
        {"status": {"now_s": math.nan, "recompiles": 0, "samples": []}},
        {"status": {"now_s": 10**400, "recompiles": 0, "samples": []}},
        {"status": {"now_s": 1.0, "recompiles": "many", "samples": []}},
        {"status": []},
        {"from": "decode-0", "to": ROUTER, "message": {"is": "View", "free_pages": "x"}},
        {"from": "decode-0", "to": ROUTER, "kv": {}},
        {"from": "decode-0"},
    ],
)
def test_words_that_cannot_be_read_are_refused(fixture: RouterFixture, body: dict[str, Any]):
    link = fixture.join(worker("decode-0"))
    with pytest.raises((BadTicket, SenselessWord)):
        fixture.node.on_message(link, body)


def test_words_for_workers_that_are_gone_and_from_those_are_dropped(fixture: RouterFixture):
    link = fixture.join(worker("decode-0"))
    fixture.node.on_message(link, said("decode-0", "prefill-9", Drawn(())))
    fixture.node.on_message(link, {"lost": "decode-0"})
    eventually(fixture.knows)
    fixture.node.on_message(link, said("decode-0", ROUTER, Drawn(())))
    assert fixture.knows() and not link.sent[1:], "nobody was told of either"


def test_a_worker_that_says_it_leaves_is_given_nothing_new_until_it_is_gone(fixture: RouterFixture):
    link = fixture.join(worker("decode-0"))
    fixture.join(worker("prefill-0", Role.PREFILL, "two"))
    assert fixture.node.able
    with pytest.raises(BadTicket, match="not its own"):
        fixture.node.on_message(link, {"leaving": "prefill-0"})
    fixture.node.on_message(link, {"leaving": "decode-0"})
    eventually(lambda: fixture.leaving("decode-0") is True)
    assert not fixture.node.able and fixture.knows("decode-0", "prefill-0")
    fixture.node.on_lost(link, "it hung up")
    fixture.join(worker("decode-0"))
    eventually(lambda: fixture.leaving("decode-0") is False)
    assert fixture.knows("decode-0", "prefill-0") and fixture.node.able


def test_a_client_of_a_router_that_no_worker_has_joined_waits_until_its_deadline(fixture: RouterFixture):
    tokenizer = Tokenizer(FIXTURE)
    sizes = ModelConfig("llama", tokenizer.vocab_size, 8, 16, 1, 1, 1, 8, 64)
    service = LocalService(
        Router(RouterConfig(workers_return=True), []), {}, {}, model_name="none", model_config=sizes,
        max_model_len=64, tokenizer=tokenizer, remote=fixture.node, able=lambda: fixture.node.able,
    )  # fmt: skip
    service.start()

    async def ask() -> list[Update]:
        deadline_s = service.now_s() + 0.3
        request = Request(RequestId("a"), (5, 6), SamplingParams(), service.now_s(), queue_deadline_s=deadline_s)
        return [update async for update in service.stream(request)]

    try:
        assert not service.ready, "for /ready, and for whoever balances load"
        (update,) = asyncio.run(ask())
        assert update.finish is not None and update.finish.reason == "timeout"
        assert "no worker is there for prefill and decode" in update.finish.detail
        service.draining = True
        with pytest.raises(Draining):
            asyncio.run(ask())
    finally:
        service.stop()


def test_what_a_process_counts_is_shown_until_it_is_gone(fixture: RouterFixture):
    link = fixture.join(worker("decode-0"))
    row = ["jdisagg_decode_runs", "jdisagg_decode_runs_total", {"model_name": "model", "worker": "decode-0"}, 7.0]
    fixture.node.on_message(link, {"status": {"now_s": time.monotonic(), "recompiles": 2, "samples": [row]}})
    assert 'jdisagg_decode_runs_total{model_name="model",worker="decode-0"} 7.0' in fixture.metrics.render().decode()
    free = 'jdisagg_kv_pages{model_name="model",state="free",worker="decode-0"} 64.0'
    eventually(lambda: free in fixture.metrics.render().decode())
    assert fixture.node.recompiles() == 2
    fixture.node.on_lost(link, "it left")
    eventually(lambda: "decode-0" not in fixture.metrics.render().decode())
    assert fixture.node.recompiles() == 0


def test_the_clock_of_a_process_is_read_from_its_quickest_word(fixture: RouterFixture):
    link = RecordingLink()
    fixture.node.admit(link, {"workers": records([worker("decode-0")]), "now_s": time.monotonic() - 1000.5})
    fixture.node.on_joined(link)
    for late_s in (0.4, 0.0, 0.3):
        status = {"now_s": time.monotonic() - 1000.0 - late_s, "recompiles": 0, "samples": []}
        fixture.node.on_message(link, {"status": status})
    assert fixture.node.shift_s(link) == pytest.approx(1000.0, abs=0.2)


# ------------------------------------------------------------ changes of role


def options_of(peer: PeerRecord, *roles: Role) -> dict[str, Any]:
    """What a process says that its worker can be."""
    able = {f"{role}:tp1": Option(replace(peer.config, role=role)) for role in roles or Role}
    usual = {each.config.role: name for name, each in able.items()}
    return {peer.worker: options_json(WorkerShapes(1, able, {}, usual))}


def became(peer: PeerRecord, role: Role) -> tuple[PeerRecord, dict[str, Any]]:
    now = replace(peer, config=replace(peer.config, role=role))
    return now, {"from": peer.worker, "became": now.to_json()}


def test_a_worker_that_became_another_is_that_to_the_router_and_to_every_process(fixture: RouterFixture):
    decode, prefill = worker("decode-0"), worker("prefill-0", Role.PREFILL, "two")
    link, other = fixture.join(decode, can_be=options_of(decode)), fixture.join(prefill)
    assert list(fixture.node.options[decode.worker].able) == ["prefill:tp1", "decode:tp1", "colocated:tp1"]
    now, body = became(decode, Role.COLOCATED)
    fixture.node.on_message(link, body)
    fixture.node.on_message(link, said("decode-0", ROUTER, Joined(0, now.config)))
    assert other.sent[-1] == {"peers": records([now])} and body not in link.sent
    eventually(lambda: fixture.knows("decode-0", "prefill-0"))
    eventually(lambda: fixture.router.peers[decode.worker].config.role is Role.COLOCATED)


def test_a_worker_becomes_and_joins_as_nothing_that_it_did_not_say_it_can_be(fixture: RouterFixture):
    decode = worker("decode-0")
    link = fixture.join(decode, can_be=options_of(decode, Role.DECODE))
    now, body = became(decode, Role.PREFILL)
    for wrong in (body, {**body, "became": worker("decode-9").to_json()}, {**body, "became": {}}):
        with pytest.raises(SenselessWord):
            fixture.node.on_message(link, wrong)
    with pytest.raises(SenselessWord, match="joins as prefill and has not said that it became that"):
        fixture.node.on_message(link, said("decode-0", ROUTER, Joined(0, now.config)))


def test_a_word_from_before_a_change_of_role_is_dropped_and_nonsense_still_ends_its_speaker(fixture: RouterFixture):
    """A decode worker's Ack crosses with what its prefill worker says of having become a decode worker, too."""
    prefill, decode = worker("prefill-0", Role.PREFILL, "two"), worker("decode-0")
    link, other = fixture.join(prefill, can_be=options_of(prefill)), fixture.join(decode)
    late = said("decode-0", "prefill-0", Ack(Attempt(RequestId("a"), 1)))
    fixture.node.on_message(other, late)
    assert link.sent[-1] == late
    fixture.node.on_message(link, became(prefill, Role.DECODE)[1])
    fixture.node.on_message(other, late)
    assert link.sent.count(late) == 1
    with pytest.raises(SenselessWord):
        fixture.node.on_message(other, said("decode-0", "prefill-0", View(1, 1, 0, 0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"devices": 0},
        {"able": []},
        {"able": {"decode:tp1": {"is": "Nothing"}}},
        {"able": {"decode:tp1": encode(worker("decode-9").config)}},
        {"usual": {"router": "decode:tp1"}},
        {"usual": {"decode": "decode:tp9"}},
        {"fixed": "x" * 2000},
    ],
)
def test_what_a_peer_says_that_it_can_be_is_checked(fixture: RouterFixture, wrong: dict[str, Any]):
    decode = worker("decode-0")
    record = options_of(decode)
    with pytest.raises(SenselessWord):
        fixture.join(decode, can_be={decode.worker: record[decode.worker] | wrong})


@pytest.mark.parametrize("took", [[], {"decode-0": {}}, {"decode-0": {"reshard_s": math.nan}}])
def test_times_of_changes_that_make_no_sense_are_refused(fixture: RouterFixture, took: Any):
    link = fixture.join(worker("decode-0"))
    status = {"now_s": time.monotonic(), "recompiles": 0, "samples": [], "reshape_times": took or "some"}
    with pytest.raises(SenselessWord):
        fixture.node.on_message(link, {"status": status})


def test_what_a_change_of_another_process_took_is_known_until_its_worker_is_gone(fixture: RouterFixture):
    link, took = fixture.join(worker("decode-0")), ReshapeTimes(0.1, 2.0, 0.3, 0, 5)
    told = {"decode-0": asdict(took), "decode-9": asdict(took)}
    status = {"now_s": time.monotonic(), "recompiles": 0, "samples": [], "reshape_times": told}
    fixture.node.on_message(link, {"status": status})
    assert fixture.node.reshape_times == {"decode-0": took}
    fixture.node.on_lost(link, "it left")
    assert fixture.node.reshape_times == {}
