"""The router's process takes no word for granted: names, speakers, clocks and counts are checked, and nobody stays."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.codec import encode
from jdisagg.core.errors import BadTicket, SenselessWord, TransferRefused
from jdisagg.core.events import ROUTER
from jdisagg.core.messages import Drawn, View
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.wire import Seal
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.kv.transport.choose import capability
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router import Router
from jdisagg.serve.cluster.crossing import Crossing, PeerRecord, records
from jdisagg.serve.cluster.link import Link, Pulse
from jdisagg.serve.cluster.nodes import RouterNode
from jdisagg.serve.driver import LiveDriver
from jdisagg.serve.local import LocalService
from jdisagg.serve.metrics import Metrics
from jdisagg.serve.service import Delta, Draining
from tests.serve.live_http import eventually
from tests.serve.scripted import FIXTURE

SECRET = b"sixteen bytes or more"


class Wire(Link):
    """A link whose words stay where they were put."""

    def __init__(self) -> None:
        super().__init__(Seal(SECRET, "s", "router"), Seal(SECRET, "s", "worker"), Pulse())
        self.sent: list[dict[str, Any]] = []

    def send(self, body: dict[str, Any]) -> None:
        self.sent.append(body)


class House:
    """A router's process without workers of its own."""

    def __init__(self) -> None:
        here = capability("cpu")
        crossing = Crossing(TransportConfig(SECRET, Identity("model", "layout", "float32")), here)
        self.node = RouterNode(crossing, {}, [])
        self.router = Router(RouterConfig(workers_return=True), [])
        self.metrics = Metrics("model")
        self.node.counted = self.metrics.counted
        self.node.driver = LiveDriver(
            self.router, {}, {}, deliver=lambda told: None, died=lambda error: None,
            observers=(self.metrics.observe, self.node.observe), far=self.node,
        )  # fmt: skip
        self.node.driver.start()

    def join(self, *peers: PeerRecord) -> Wire:
        wire = Wire()
        self.node.admit(wire, {"workers": records(peers), "now_s": time.monotonic()})
        self.node.welcomed(wire)
        return wire

    def leaving(self, name: str) -> bool | None:
        """Whether the router takes it for one that leaves; None where it knows no such worker."""
        peer = self.router.peers.get(WorkerId(name))
        return None if peer is None else peer.leaving

    def knows(self, *names: str) -> bool:
        return set(self.router.peers) == set(names) == set(self.node.peers)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    assert house.node.driver.alive, "nothing that a peer says may end the driver"
    house.node.driver.stop()
    house.node.close()


def worker(name: str, role: Role = Role.DECODE, process: str = "one", **more: Any) -> PeerRecord:
    config = WorkerConfig(WorkerId(name), role, 64, 16, 256, num_slots=4)
    return PeerRecord(config, (), replace(capability("cpu"), process=process, **more))


def said(sender: str, to: str, message: Any) -> dict[str, Any]:
    return {"from": sender, "to": to, "message": encode(message)}


def test_workers_come_and_go_and_the_others_are_told(house: House):
    first = house.join(worker("decode-0"))
    second = house.join(worker("prefill-0", Role.PREFILL, "two"))
    assert house.node.able
    eventually(lambda: house.knows("decode-0", "prefill-0"))
    assert [one["config"]["worker"] for one in first.sent[-1]["peers"]] == ["prefill-0"]
    house.node.lose(second, "it left")
    eventually(lambda: house.knows("decode-0"))
    assert first.sent[-1] == {"gone": ["prefill-0"]} and not house.node.able


def test_a_second_process_of_the_same_names_is_refused(house: House):
    house.join(worker("decode-0"))
    with pytest.raises(BadTicket, match="decode-0 is here already"):
        house.join(worker("decode-0", process="another"))
    eventually(lambda: house.knows("decode-0"))


def test_a_process_that_comes_back_before_it_was_missed_takes_its_own_place(house: House):
    first = house.join(worker("decode-0"))
    again = house.join(worker("decode-0"))
    assert first.why_over == "its process joined anew"
    house.node.lose(first, "its end is found out late")
    eventually(lambda: house.knows("decode-0"))
    house.node.post(WorkerId("decode-0"), {"x": 1})
    assert again.sent[-1] == {"x": 1}


def test_workers_that_kv_cannot_reach_are_refused_at_the_door(house: House):
    house.join(worker("decode-0"))
    with pytest.raises(TransferRefused, match="no transport"):
        house.join(worker("prefill-0", Role.PREFILL, "two", transports=()))


def test_nobody_speaks_for_a_worker_of_another_process(house: House):
    house.join(worker("decode-0"))
    stranger = house.join(worker("decode-1", process="two"))
    for body in (said("decode-0", ROUTER, View(1, 1, 0, 0)), {"lost": "decode-0"}):
        with pytest.raises(BadTicket, match="not its own"):
            house.node.hear(stranger, body)
    eventually(lambda: house.knows("decode-0", "decode-1"))


@pytest.mark.parametrize(
    "body",
    [
        {"from": "decode-0", "to": ROUTER, "message": None},
        {"from": "decode-0", "to": ROUTER, "message": {"is": "Nothing"}},
        {"from": "decode-0", "to": ROUTER},
        {"from": "decode-0", "to": ROUTER, "message": encode(worker("x").config)},
        {"tidings": {"now_s": 1.0, "recompiles": 0, "samples": [["a", "b", {}, 1.0]]}},
        {"tidings": {"now_s": math.nan, "recompiles": 0, "samples": []}},
        {"tidings": {"now_s": 10**400, "recompiles": 0, "samples": []}},
        {"tidings": {"now_s": 1.0, "recompiles": "many", "samples": []}},
        {"tidings": []},
        {"from": "decode-0", "to": ROUTER, "message": {"is": "View", "free_pages": "x"}},
        {"from": "decode-0", "to": ROUTER, "kv": {}},
        {"from": "decode-0"},
    ],
)
def test_words_that_cannot_be_read_are_refused(house: House, body: dict[str, Any]):
    link = house.join(worker("decode-0"))
    with pytest.raises((BadTicket, SenselessWord)):
        house.node.hear(link, body)


def test_words_for_workers_that_are_gone_and_from_those_are_dropped(house: House):
    link = house.join(worker("decode-0"))
    house.node.hear(link, said("decode-0", "prefill-9", Drawn(())))
    house.node.hear(link, {"lost": "decode-0"})
    eventually(house.knows)
    house.node.hear(link, said("decode-0", ROUTER, Drawn(())))
    assert house.knows() and not link.sent[1:], "nobody was told of either"


def test_a_worker_that_says_it_leaves_is_given_nothing_new_until_it_is_gone(house: House):
    link = house.join(worker("decode-0"))
    house.join(worker("prefill-0", Role.PREFILL, "two"))
    assert house.node.able
    with pytest.raises(BadTicket, match="not its own"):
        house.node.hear(link, {"leaving": "prefill-0"})
    house.node.hear(link, {"leaving": "decode-0"})
    eventually(lambda: house.leaving("decode-0") is True)
    assert not house.node.able and house.knows("decode-0", "prefill-0")
    house.node.lose(link, "it hung up")
    house.join(worker("decode-0"))
    eventually(lambda: house.leaving("decode-0") is False)
    assert house.knows("decode-0", "prefill-0") and house.node.able


def test_a_client_of_a_router_that_no_worker_has_joined_waits_until_its_deadline(house: House):
    tokenizer = Tokenizer(FIXTURE)
    sizes = ModelConfig("llama", tokenizer.vocab_size, 8, 16, 1, 1, 1, 8, 64)
    service = LocalService(
        Router(RouterConfig(workers_return=True), []), {}, {}, model_name="none", model_config=sizes,
        max_model_len=64, tokenizer=tokenizer, far=house.node, able=lambda: house.node.able,
    )  # fmt: skip
    service.start()

    async def ask() -> list[Delta]:
        deadline_s = service.now_s() + 0.3
        request = Request(RequestId("a"), (5, 6), SamplingParams(), service.now_s(), queue_deadline_s=deadline_s)
        return [delta async for delta in service.stream(request)]

    try:
        assert not service.ready, "for /ready, and for whoever balances load"
        (delta,) = asyncio.run(ask())
        assert delta.finish is not None and delta.finish.reason == "timeout"
        assert "no worker is there for prefill and decode" in delta.finish.detail
        service.draining = True
        with pytest.raises(Draining):
            asyncio.run(ask())
    finally:
        service.stop()


def test_what_a_process_counts_is_shown_until_it_is_gone(house: House):
    link = house.join(worker("decode-0"))
    row = ["jdisagg_decode_runs", "jdisagg_decode_runs_total", {"model_name": "model", "worker": "decode-0"}, 7.0]
    house.node.hear(link, {"tidings": {"now_s": time.monotonic(), "recompiles": 2, "samples": [row]}})
    assert 'jdisagg_decode_runs_total{model_name="model",worker="decode-0"} 7.0' in house.metrics.render().decode()
    free = 'jdisagg_kv_pages{model_name="model",state="free",worker="decode-0"} 64.0'
    eventually(lambda: free in house.metrics.render().decode())
    assert house.node.recompiles() == 2
    house.node.lose(link, "it left")
    eventually(lambda: "decode-0" not in house.metrics.render().decode())
    assert house.node.recompiles() == 0


def test_the_clock_of_a_process_is_read_from_its_quickest_word(house: House):
    link = Wire()
    house.node.admit(link, {"workers": records([worker("decode-0")]), "now_s": time.monotonic() - 1000.5})
    house.node.welcomed(link)
    for late_s in (0.4, 0.0, 0.3):
        tidings = {"now_s": time.monotonic() - 1000.0 - late_s, "recompiles": 0, "samples": []}
        house.node.hear(link, {"tidings": tidings})
    assert house.node.shift_s(link) == pytest.approx(1000.0, abs=0.05)
