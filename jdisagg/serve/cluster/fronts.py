"""Processes that only serve clients: their end of the link, and the router's.

A front asks for requests and hears what is drawn of them. Its link is of the same kind as a worker process's; what it
says of itself is its name, which is drawn at its start and stays as long as it lives, whichever router it is joined to.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jdisagg.core.codec import decode, encode, shown
from jdisagg.core.errors import BadTicket, DecodeError, RequestError, SenselessWord, TransferRefused
from jdisagg.core.events import (
    ROUTER,
    Cancel,
    EmitTokens,
    Finish,
    Outcome,
    Reject,
    RouterFound,
    RouterLost,
    Submit,
    Told,
)
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Ask, Message, Withdraw
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.engine.executor import Executor, Shipment
from jdisagg.serve.cluster.bodies import read_shift_s
from jdisagg.serve.cluster.control_server import ServerCallbacks
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.kv_moves import Lent

log = logging.getLogger("jdisagg.cluster")

NAME = re.compile(r"front-[0-9a-f]{6,32}")
SHIFTS = 30  # the last reports of a front by which its clock is read


class FrontNode:
    """A front's end: a `control_client.ClientCallbacks`, and its driver's `RemoteWorkers`."""

    driver: LiveDriver

    def __init__(self, name: str) -> None:
        self.name = name
        self._link: Link | None = None
        self.able = False  # the router has workers of every phase

    # ------------------------------------------------------------ `driver.RemoteWorkers`

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None:
        link = self._link
        if link is not None:
            link.send({"ask": encode(message)})

    def ship(self, machine: Executor, transfer: KVTransfer) -> Shipment:
        raise TransferRefused(f"a front holds no KV, and {transfer.attempt.request_id!r} would ship some")

    def lend(self, lent: Lent) -> None:
        raise TransferRefused(f"a front holds no KV, and {lent.asker} would get some")

    def give_up(self, worker: WorkerId) -> None:
        raise AssertionError(f"a front has no workers, and {worker} would be lost")

    def end_session(self, peer: WorkerId, why: str) -> None:
        link = self._link
        if link is not None:
            link.hang_up(f"{peer}: {why}")

    def report(self) -> None:
        """By which the router reads this process's clock, and says whether it is able."""
        link = self._link
        if link is not None:
            link.send({"now_s": time.monotonic()})

    # ------------------------------------------------------------ `control_client.ClientCallbacks`

    def hello(self) -> dict[str, Any]:
        return {"front": self.name, "now_s": time.monotonic()}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        log.warning("joined the router as %s", self.name)
        self.driver.post(ROUTER, RouterFound())

    def on_lost(self, why: str) -> None:
        log.warning("the router is gone (%s): its streams wait for another", why)
        self._link, self.able = None, False
        self.driver.post(ROUTER, RouterLost())

    def on_message(self, body: dict[str, Any]) -> None:
        if "able" in body:
            self.able = body["able"] is True
            return
        try:
            outcome = decode(body.get("told"))
        except DecodeError as error:
            raise SenselessWord(str(error)) from error
        if isinstance(outcome, EmitTokens | Finish | Reject):
            self.driver.post(ROUTER, Told(outcome))


class RouterFronts:
    """The router's end: a `ServerCallbacks` that keeps to itself what fronts say; `observe` is one of its driver's
    observers. A request of a front is known to the router by its id and the front's name: fronts choose ids freely.
    """

    driver: LiveDriver

    def __init__(self, node: ServerCallbacks, check: Callable[[Request], None], able: Callable[[], bool]) -> None:
        """`check` raises RequestError where a request is none for this model; `able`: each phase has a worker."""
        self._node, self._check, self._able = node, check, able
        self._names: dict[Link, str] = {}
        self._shifts: dict[Link, deque[float]] = {}
        self._asked: dict[RequestId, tuple[Link, RequestId]] = {}  # by our id: whose, and its id there
        self._dying: set[RequestId] = set()  # whose front is gone: what is said of them is for nobody
        self._lock = threading.RLock()

    # ------------------------------------------------------------ `control_server.ServerCallbacks`

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        if "front" not in hello:
            return self._node.admit(link, hello)
        name, shift_s = hello["front"], read_shift_s(hello)
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise SenselessWord(f"a front of the name {shown(name)}")
        with self._lock:
            if name in self._names.values():
                raise BadTicket(f"{name} is here already; it may come back when it was missed")
            self._names[link], self._shifts[link] = name, deque([shift_s], SHIFTS)
        return {}

    def on_joined(self, link: Link) -> None:
        if link not in self._names:
            self._node.on_joined(link)
            return
        log.warning("%s joined", self._names[link])
        link.send({"able": self._able()})

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        if link not in self._names:
            self._node.on_message(link, body)
        elif "now_s" in body:
            self._shifts[link].append(read_shift_s(body))
            link.send({"able": self._able()})
        else:
            self._hear(link, body.get("ask"))

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            name = self._names.pop(link, None)
            self._shifts.pop(link, None)
            mine = [ours for ours, (its, _) in self._asked.items() if its is link]
            for ours in mine:
                del self._asked[ours]
            self._dying.update(mine)
        if name is None:
            self._node.on_lost(link, why)
            return
        log.warning("%s is gone: %s", name, why)
        for ours in mine:
            self.driver.post(ROUTER, Cancel(ours))

    # ------------------------------------------------------------ requests

    def _hear(self, link: Link, asked: Any) -> None:
        try:
            message = decode(asked)
        except DecodeError as error:
            raise SenselessWord(str(error)) from error
        match message:
            case Ask():
                self._ask(link, message)
            case Withdraw(request_id, reason):
                self.driver.post(ROUTER, Cancel(self._our_id(link, request_id), reason))
            case _:
                raise SenselessWord(f"{type(message).__name__} is not for a front to say")

    def _our_id(self, link: Link, request_id: RequestId) -> RequestId:
        return RequestId(f"{request_id}@{self._names[link]}")

    def _ask(self, link: Link, message: Ask) -> None:
        request, output = message.request, message.output
        try:
            self._check(request)
        except RequestError as error:
            refused = Finish(request.request_id, FinishReason.ERROR, Ledger(), detail=str(error))
            link.send({"told": encode(refused)})
            return
        if len(output) > request.sampling.max_tokens or min(output, default=0) < 0:
            raise SenselessWord(f"{request.request_id!r} has {len(output)} tokens already: {shown(output[:8])}")
        ours, shift_s = self._our_id(link, request.request_id), min(self._shifts[link])
        if ours in self._asked:
            raise SenselessWord(f"{request.request_id!r} is asked for twice")
        due_s = request.queue_deadline_s
        request = replace(
            request,
            request_id=ours,
            arrival_s=request.arrival_s + shift_s,
            queue_deadline_s=None if due_s is None else due_s + shift_s,
        )
        self._asked[ours] = link, message.request.request_id
        self.driver.post(ROUTER, Submit(request, output, message.resumed))

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """On the driver's thread: what clients of fronts are to be told goes there."""
        if not isinstance(item, EmitTokens | Finish | Reject):
            return
        if item.request_id in self._dying:
            if not isinstance(item, EmitTokens):
                self._dying.discard(item.request_id)
            return
        found = self._asked.get(item.request_id) if isinstance(item, EmitTokens) else self._over(item)
        if found is not None:
            link, theirs = found
            link.send({"told": encode(self._for_front(item, theirs, link))})

    def _over(self, item: Finish | Reject) -> tuple[Link, RequestId] | None:
        with self._lock:
            return self._asked.pop(item.request_id, None)

    def _for_front(self, item: Outcome, theirs: RequestId, link: Link) -> Outcome:
        """With the front's own id and clock."""
        match item:
            case EmitTokens(delta):
                return replace(item, delta=replace(delta, attempt=replace(delta.attempt, request_id=theirs)))
            case Finish(ledger=ledger):
                shift_ns = round(min(self._shifts.get(link, (0.0,))) * 1e9)
                marks = [(mark, at_ns - shift_ns) for mark, at_ns in ledger.marks]
                there = Ledger(marks, ledger.wire_ns, ledger.cached_tokens)
                return replace(item, request_id=theirs, ledger=there)
            case Reject():
                return replace(item, request_id=theirs)
