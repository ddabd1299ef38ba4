"""The router's process: it relays what workers of different processes say to each other, and knows who is there."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from jdisagg.core.codec import decode_as, shown
from jdisagg.core.errors import BadTicket, DecodeError, LateWord, RequestError, SenselessWord, TransferRefused
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
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Ask, Joined, Message, Withdraw
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role
from jdisagg.engine.executor import Executor, Shipment
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.transport.choose import choose
from jdisagg.serve.cluster.control_server import ServerCallbacks
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV, read_peer, records
from jdisagg.serve.cluster.link import Link, read_shift_s, read_status
from jdisagg.serve.cluster.nodes import Node
from jdisagg.serve.cluster.role_options import read_all_options
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.deploy.pools import Place, place_of
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.kv_moves import Lent
from jdisagg.serve.driver.role_change import ReshapeTimes
from jdisagg.serve.observability.records import TransferStats, transfer_stats_of

log = logging.getLogger("jdisagg.cluster")

SHIFTS = 30  # the last status reports of a peer by which its clock is read


class RouterNode(Node):
    """The process with the router, and perhaps workers of its own; a `control_server.ServerCallbacks`."""

    def __init__(
        self,
        remote_kv: RemoteKV,
        machines: Mapping[WorkerId, MeshExecutor],
        own: Sequence[PeerRecord],
        options: Mapping[WorkerId, WorkerShapes] | None = None,
    ) -> None:
        super().__init__(remote_kv, machines, own, options)
        self.reshape_times: dict[WorkerId, ReshapeTimes] = {}  # of workers of other processes
        self._links: dict[WorkerId, Link] = {}
        self._shifts: dict[Link, deque[float]] = {}
        self._joining: dict[Link, list[PeerRecord]] = {}
        self._recompiles: dict[Link, int] = {}
        self._leaving: set[WorkerId] = set()
        self._transfer_stats: dict[Link, TransferStats] = {}

    @property
    def able(self) -> bool:
        """Every phase has a worker, here or elsewhere."""
        roles = [peer.config.role for peer in [*self.own, *self.peers.values()] if peer.worker not in self._leaving]
        return any(role.prefills for role in roles) and any(role.decodes for role in roles)

    def places(self) -> list[Place]:
        """Of the workers that are there now, in all processes."""
        with self._lock:
            present, own = [*self.own, *self.peers.values()], set(self.machines)
            return [
                place_of(each.config, each.stages, remote=each.worker not in own, leaving=each.worker in self._leaving)
                for each in present
            ]

    def recompiles(self) -> int:
        return super().recompiles() + sum([*self._recompiles.values()])

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        link = self._links.get(to)
        if link is not None:
            link.send(body)

    def give_up(self, worker: WorkerId) -> None:
        self._drop([worker], "its plans fail again and again")

    def end_session(self, peer: WorkerId, why: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.hang_up(why)
            self._drop(self._workers_of(link), why)

    # ------------------------------------------------------------ `control_server.ServerCallbacks`

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        shift_s, described = read_shift_s(hello), hello.get("workers")
        if not isinstance(described, list):
            raise SenselessWord(f"a peer's workers are {shown(described)}")
        joining = [read_peer(record) for record in described]
        options = read_all_options(hello.get("can_be", {}), joining)
        with self._lock:
            self._check_names(joining)
            self._check_ways(joining)
            self._joining[link] = joining
            self.options |= options
            self._shifts[link] = deque([shift_s], SHIFTS)
        return {}

    def _check_names(self, joining: Sequence[PeerRecord]) -> None:
        """A process that comes back before it was missed takes its own place; another of the same names is refused."""
        known = {peer.worker: peer for peer in [*self.own, *self.peers.values(), *_all(self._joining)]}
        same = [(peer, known[peer.worker]) for peer in joining if peer.worker in known]
        for peer, earlier in same:
            if earlier.capability.process != peer.capability.process or peer.worker in self.machines:
                raise BadTicket(f"a worker named {peer.worker} is here already, of another process")
        for link in {self._links[peer.worker] for peer, _ in same if peer.worker in self._links}:
            link.hang_up("its process joined anew")
            self._drop(self._workers_of(link), link.why_over)

    def _check_ways(self, joining: Sequence[PeerRecord]) -> None:
        """Raises where KV would have no way between a joining worker and one of the other phase."""
        for one, other in product(joining, [*self.own, *self.peers.values()]):
            roles = one.config.role, other.config.role
            if one.worker == other.worker:
                continue  # what it was
            if Role.COLOCATED not in roles and roles[0] is not roles[1]:  # a colocated worker ships to nobody
                for mine, theirs in product(one.capabilities, other.capabilities):
                    choose(mine, theirs, self.remote_kv.wanted)

    def on_joined(self, link: Link) -> None:
        with self._lock:
            joining = self._joining.pop(link)
            link.send({"peers": records([*self.own, *self.peers.values()])})
            self._tell_all({"peers": records(joining)})
            for peer in joining:
                self.peers[peer.worker], self._links[peer.worker] = peer, link
                log.warning("%s joined", peer.worker)
                self.driver.post(ROUTER, WorkerJoined(peer.config))

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        if "status" in body:
            self._note(link, body["status"])
            return
        speaker = WorkerId(str(next((body[key] for key in ("lost", "leaving", "from") if key in body), None)))
        owner = self._links.get(speaker)
        if owner is None:
            return  # it was dropped: its last messages are for nobody
        if owner is not link:
            raise BadTicket(f"a process speaks for {speaker!r}, which is not its own")
        if "became" in body:
            self._become(link, speaker, read_peer(body["became"]))
            return
        to = WorkerId(str(body.get("to")))
        if "lost" in body:
            self.give_up(speaker)
        elif "leaving" in body:
            self._leaving.add(speaker)
            self.driver.post(ROUTER, WorkerLeaving(speaker))
        elif to in self.driver.actors:
            self.receive(body, self.shift_s(link))
        elif to in self.peers:
            with suppress(LateWord):
                self.checked(body, speaker, to)
                self.post(to, body)
        elif not {"message", "kv", "lent"} & body.keys():
            raise SenselessWord(f"{shown(speaker)} says nothing that is known: {shown(body)}")

    def checked(self, body: dict[str, Any], sender: WorkerId, to: WorkerId) -> Message | None:
        """Who joins again is what its process has said that it became."""
        message = super().checked(body, sender, to)
        if isinstance(message, Joined) and sender in self.peers and message.config != self.peers[sender].config:
            raise SenselessWord(f"{sender} joins as {message.config.role} and has not said that it became that")
        return message

    def _become(self, link: Link, worker: WorkerId, record: PeerRecord) -> None:
        """A worker of another process is another now, one of those that it said it can be."""
        before, options = self.peers[worker], self.options.get(worker)
        can_be = [] if options is None else [each.config for each in options.able.values()]
        if record.worker != worker or record.capabilities != before.capabilities or record.config not in can_be:
            raise SenselessWord(f"{worker} became {record.worker[:80]!r}, {record.config.role}, which it cannot be")
        with self._lock:
            self._check_ways([record])
            self.meet(record)
            self._tell_all({"peers": records([record])}, besides=link)

    def tell_become(self, record: PeerRecord) -> None:
        self._tell_all({"peers": records([record])})

    def shift_s(self, link: Link) -> float:
        """Seconds to add to times of that process's clock to make them ours."""
        return min(self._shifts.get(link, [0.0]))

    def _note(self, link: Link, status: dict[str, Any]) -> None:
        """Its clock is read from the quickest of the latest reports: clocks drift, and messages are held up."""
        with self._lock:
            if link not in self._shifts:
                return  # on its way out
            shift_s, recompiles, samples, transfer_stats, took = read_status(status)
            self._shifts[link].append(shift_s)
            self._recompiles[link] = recompiles
            self.merged.update(link, samples)
            self._transfer_stats[link] = transfer_stats
            self.reshape_times |= {name: each for name, each in took.items() if self._links.get(name) is link}

    def transfer_stats(self) -> TransferStats:
        """By the workers of all processes, those of others a second ago."""
        with self._lock:
            remote = [*self._transfer_stats.values()]
        found = transfer_stats_of(self.driver.actors)
        for reported in remote:
            found |= reported
        return found

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            self._drop(self._workers_of(link), why)
            for book in (self._shifts, self._joining, self._recompiles, self._transfer_stats):
                book.pop(link, None)
            self.merged.forget(link)

    def _workers_of(self, link: Link) -> list[WorkerId]:
        return [worker for worker, theirs in self._links.items() if theirs is link]

    def _drop(self, workers: Sequence[WorkerId], why: str) -> None:
        with self._lock:
            for worker in workers:
                for book in (self._links, self.options, self.reshape_times):
                    book.pop(worker, None)
                log.warning("%s is gone: %s", worker, "it left" if worker in self._leaving else why)
                self._leaving.discard(worker)
                self.driver.post(ROUTER, WorkerLost(worker))
            self.disconnect(workers)
            if workers:
                self._tell_all({"gone": list(workers)})

    def _tell_all(self, body: dict[str, Any], besides: Link | None = None) -> None:
        for link in {*self._links.values()} - {besides}:
            link.send(body)


def _all(joining: Mapping[Link, Sequence[PeerRecord]]) -> list[PeerRecord]:
    return [peer for peers in joining.values() for peer in peers]


# Processes that only serve clients: their end of the link, and the router's.
#
# A front asks for requests and hears what is drawn of them. Its link is of the same kind as a worker process's;
# what it says of itself is its name, which is drawn at its start and stays as long as it lives, whichever router
# it is joined to.

NAME = re.compile(r"front-[0-9a-f]{6,32}")
BATCH_TOKENS = 4096  # in one record to a front


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
            link.send({"ask": message})

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
        self.driver.post(ROUTER, Told(_read_outcomes(body.get("told"))))


def _read_outcomes(record: Any) -> tuple[Outcome, ...]:
    """Returns the outcomes of one record, in order. Raises SenselessWord."""
    if not isinstance(record, list):
        raise SenselessWord(f"a record of outcomes is {shown(record)}, must be a list")
    try:
        return tuple(decode_as(Outcome, each) for each in record)
    except DecodeError as error:
        raise SenselessWord(str(error)) from error


class RouterFronts:
    """The router's end of the links to fronts: a `ServerCallbacks` that handles the messages of fronts and passes on
    all others. The router knows a front's request by its id and the front's name: fronts choose ids freely.

    `deliver` takes the outcomes of a step from the driver and sends each front its own in one record.
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
            message = decode_as(Ask | Withdraw, asked)
        except DecodeError as error:
            raise SenselessWord(str(error)) from error
        match message:
            case Ask():
                self._ask(link, message)
            case Withdraw(request_id, reason):
                self.driver.post(ROUTER, Cancel(self._our_id(link, request_id), reason))

    def _our_id(self, link: Link, request_id: RequestId) -> RequestId:
        return RequestId(f"{request_id}@{self._names[link]}")

    def _ask(self, link: Link, message: Ask) -> None:
        request, output = message.request, message.output
        try:
            self._check(request)
        except RequestError as error:
            refused = Finish(request.request_id, FinishReason.ERROR, Ledger(), detail=str(error))
            link.send({"told": [refused]})
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

    def deliver(self, told: Sequence[tuple[RequestId, Outcome]]) -> None:
        """Sends each front its outcomes of one step, in order and in one record, or several where they are many.

        Runs on the driver's thread.
        """
        by_link: dict[Link, list[Outcome]] = {}
        for request_id, item in told:
            if request_id in self._dying:
                if not isinstance(item, EmitTokens):
                    self._dying.discard(request_id)
                continue
            found = self._asked.get(request_id) if isinstance(item, EmitTokens) else self._over(item)
            if found is not None:
                link, theirs = found
                by_link.setdefault(link, []).append(self._for_front(item, theirs, link))
        for link, outcomes in by_link.items():
            for batch in _batches(outcomes):
                link.send({"told": batch}, len(batch))

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


def _batches(outcomes: Sequence[Outcome]) -> Iterator[list[Outcome]]:
    """Yields the outcomes in order, in lists of at most `BATCH_TOKENS` tokens: one outcome may have more.

    A record over the size limit is not sent, so a long prompt's log-probabilities must not be in one with others.
    """
    batch, held = list[Outcome](), 0
    for each in outcomes:
        size = _num_tokens(each)
        if batch and held + size > BATCH_TOKENS:
            yield batch
            batch, held = [], 0
        batch.append(each)
        held += size
    if batch:
        yield batch


def _num_tokens(outcome: Outcome) -> int:
    if not isinstance(outcome, EmitTokens):
        return 1
    return len(outcome.delta.sampled) + len(outcome.delta.prompt) + len(outcome.delta.pooled)
