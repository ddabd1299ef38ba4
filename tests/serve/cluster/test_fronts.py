"""A front hears the outcomes of a step in one record, in order; a link that ends within one loses and repeats none."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from jdisagg.core.authenticated_channel import AuthenticatedChannel
from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import ROUTER, Cancel, Effect, EmitTokens, Event, Finish, Submit, TimerFired
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.policy.front import RouterClient
from jdisagg.serve.cluster import router_node
from jdisagg.serve.cluster.link import Heartbeat, Link, read_record
from jdisagg.serve.cluster.router_node import FrontNode, RouterFronts
from jdisagg.serve.driver.driver import LiveDriver
from tests.serve.live_http import eventually

SECRET = b"sixteen bytes or more"
CALM = Heartbeat(10.0, 600.0)
NUM_REQUESTS, NUM_TOKENS = 5, 6


class CountingRouter:
    """Draws a token of every request at each step: the numbers 0, 1, 2, ... after those that the client has."""

    def __init__(self) -> None:
        self.rows: dict[RequestId, int] = {}  # tokens out

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Submit(request, output):
                self.rows[request.request_id] = len(output)
            case Cancel(request_id):
                self.rows.pop(request_id)
                return [Finish(request_id, FinishReason.ABORT, Ledger())]
            case TimerFired():
                return [effect for each in [*self.rows] for effect in self._draw(each)]
            case _:
                raise AssertionError(f"no such event here: {event!r}")
        return []

    def _draw(self, request_id: RequestId) -> list[Effect]:
        index, attempt = self.rows[request_id], Attempt(request_id, 1)
        self.rows[request_id] += 1
        effects: list[Effect] = [EmitTokens(TokenDelta(attempt, index, (Sampled(index),)), WorkerId("decode-0"))]
        if index + 1 == NUM_TOKENS:
            del self.rows[request_id]
            effects.append(Finish(request_id, FinishReason.LENGTH, Ledger()))
        return effects


class NoWorkers:
    """The node of a router that no worker process joins."""

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("no worker joins here")

    def on_joined(self, link: Link) -> None:
        raise AssertionError("no worker joins here")

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        raise AssertionError("no worker speaks here")

    def on_lost(self, link: Link, why: str) -> None:
        raise AssertionError("no worker is lost here")


class FrontRig:
    """A router's process and a front's, each with its driver; the test carries the bytes of the link between them."""

    def __init__(self) -> None:
        self.router, self.front = CountingRouter(), FrontNode("front-0a0a0a")
        self.fronts = RouterFronts(NoWorkers(), lambda request: None, lambda: True)
        self.told: queue.SimpleQueue[tuple[RequestId, Any]] = queue.SimpleQueue()  # what clients of the front get
        self.num_deliveries = 0
        self.fronts.driver = LiveDriver(self.router, {}, {}, deliver=self.fronts.deliver, died=self._died)
        self.front.driver = LiveDriver(
            RouterClient(60.0), {}, {}, deliver=self._deliver, died=self._died, remote=self.front
        )  # fmt: skip
        for driver in (self.fronts.driver, self.front.driver):
            driver.start()
        self._count = count()
        self.join()

    def _deliver(self, told: list[tuple[RequestId, Any]]) -> None:
        self.num_deliveries += 1
        for each in told:
            self.told.put(each)

    def _died(self, error: BaseException) -> None:
        raise AssertionError("a driver ended") from error

    def join(self) -> None:
        """A link of two ends, as a handshake would have made it; the router's end is `self.link`."""
        session = f"session-{next(self._count)}"
        self.link, self._far = (
            Link(AuthenticatedChannel(SECRET, session, own), AuthenticatedChannel(SECRET, session, other), CALM)
            for own, other in (("router", "front"), ("front", "router"))
        )
        self.fronts.admit(self.link, self.front.hello())
        self.front.on_joined(self._far, {})
        self.fronts.on_joined(self.link)
        self._sent = self.link.records()
        self._asked = self._far.records()
        assert "able" in self.read()

    def read(self) -> dict[str, Any]:
        """The next record of the router, handed to the front."""
        body = self._far.read(read_record(self._sent, 1 << 20))
        assert body is not None
        self.front.on_message(body)
        return body

    def pass_on(self, num_asked: int) -> None:
        """So many messages of the front reach the router."""
        for _ in range(num_asked):
            body = self.link.read(read_record(self._asked, 1 << 20))
            assert body is not None
            self.fronts.on_message(self.link, body)

    def ask(self, num_requests: int = NUM_REQUESTS) -> list[RequestId]:
        names = [RequestId(f"r{n}") for n in range(num_requests)]
        for name in names:
            request = Request(name, (1, 2), SamplingParams(max_tokens=NUM_TOKENS), time.monotonic())
            self.front.driver.post(ROUTER, Submit(request))
        self.pass_on(num_requests)
        self.settle()
        return names

    def step(self) -> None:
        self.fronts.driver.post(ROUTER, TimerFired("step"))
        self.settle()

    def settle(self) -> None:
        """Both drivers have followed all that was posted."""
        for driver in (self.fronts.driver, self.front.driver):
            driver.call(lambda: None)

    def taken(self) -> dict[RequestId, list[Any]]:
        """Tokens, and at the end the reason, by request."""
        found: dict[RequestId, list[Any]] = {}
        while not self.told.empty():
            name, item = self.told.get()
            row = found.setdefault(name, [])
            row += [each.token for each in item.delta.sampled] if isinstance(item, EmitTokens) else [item.reason]
        return found


WHOLE = [*range(NUM_TOKENS), FinishReason.LENGTH]


@pytest.fixture
def rig() -> Iterator[FrontRig]:
    rig = FrontRig()
    yield rig
    for driver in (rig.fronts.driver, rig.front.driver):
        assert driver.alive
        driver.stop()


def test_all_outcomes_of_a_step_are_one_record_in_their_order(rig: FrontRig):
    names = rig.ask()
    for step in range(NUM_TOKENS):
        rig.step()
        told, before = rig.read()["told"], rig.num_deliveries
        rig.settle()
        assert len(told) == NUM_REQUESTS * (2 if step == NUM_TOKENS - 1 else 1)
        assert rig.num_deliveries == before + 1, "the front's clients are woken once a step"
    assert rig.taken() == dict.fromkeys(names, WHOLE)


def test_tokens_beyond_the_bound_of_a_record_go_in_the_next(rig: FrontRig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_node, "BATCH_TOKENS", 2)
    names = rig.ask()
    for step in range(NUM_TOKENS):
        rig.step()
        sizes = [len(rig.read()["told"]) for _ in range(5 if step == NUM_TOKENS - 1 else 3)]
        assert sizes == ([2] * 5 if step == NUM_TOKENS - 1 else [2, 2, 1])
    rig.settle()
    assert rig.taken() == dict.fromkeys(names, WHOLE)


@pytest.mark.parametrize("is_read", [True, False], ids=["after the record", "within the record"])
def test_a_link_that_ends_at_a_record_of_several_outcomes_loses_none_and_repeats_none(rig: FrontRig, is_read: bool):
    names = rig.ask()
    for _ in range(2):
        rig.step()
        rig.read()
    rig.step()
    record = next(rig._sent)
    if is_read:
        body = rig._far.read(read_record(iter([record]), 1 << 20))
        assert body is not None
        rig.front.on_message(body)
    else:
        half = b"\1" + record[1 : len(record) // 2]
        with pytest.raises(StopIteration):
            read_record(iter([half]), 1 << 20)
    rig.front.on_lost("cut off")
    rig.fronts.on_lost(rig.link, "cut off")
    eventually(lambda: not rig.router.rows)
    rig.join()
    rig.pass_on(NUM_REQUESTS)
    for _ in range(NUM_TOKENS - (3 if is_read else 2)):
        rig.step()
        rig.read()
    rig.settle()
    assert rig.taken() == dict.fromkeys(names, WHOLE)


@pytest.mark.parametrize("told", [None, {}, [None], [{"is": "Sampled", "token": 1}], [{"is": "Nothing"}]])
def test_a_record_that_is_no_list_of_outcomes_is_refused(rig: FrontRig, told: Any):
    with pytest.raises(SenselessWord):
        rig.front.on_message({"told": told})


def test_a_front_that_leaves_tokens_unread_is_ended_by_their_number_and_not_that_of_records(
    rig: FrontRig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jdisagg.serve.cluster.link.MOST_WAITING", 2 * NUM_REQUESTS)
    rig.ask()
    for _ in range(3):
        rig.step()
    assert "10 messages unread" in rig.link.why_over
