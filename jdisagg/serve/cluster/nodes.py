"""The two kinds of processes of a cluster: the one with the router, and those with workers alone.

The router's process relays messages between workers of different processes (a star: one link each, one place that knows
who is there); KV goes from worker process to worker process. A worker process without its router goes on with what it
decodes, gives up all else at once, and joins again as soon as there is a router.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from jdisagg.core.codec import encode, shown
from jdisagg.core.errors import BadTicket, SenselessWord, TransferRefused
from jdisagg.core.events import ROUTER, Received, RouterFound, RouterLost, Send, WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.messages import Abort, AbortAck, Adopt, Message
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.transport.choose import choose
from jdisagg.policy.worker import Worker
from jdisagg.serve.cluster.bodies import read_shift_s, read_status, read_word, shifted
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.cluster.remote_kv import PeerRecord, RemoteKV, read_peer, records
from jdisagg.serve.driver import LiveDriver
from jdisagg.serve.executors import failure_of
from jdisagg.serve.places import Place, place_of
from jdisagg.serve.readers import Readers
from jdisagg.serve.remote_metrics import MergedRegistry, samples_of
from jdisagg.serve.transfer_stats import TransferStats, transfer_stats_of

log = logging.getLogger("jdisagg.cluster")

SHIFTS = 30  # the last status reports of a peer by which its clock is read


class Node:
    """What both kinds share: messages and KV out, and in.

    `driver` and `merged` are set before anything starts; `observe` is one of the driver's observers.
    """

    driver: LiveDriver
    merged: MergedRegistry

    def __init__(
        self, remote_kv: RemoteKV, machines: Mapping[WorkerId, MeshExecutor], own: Sequence[PeerRecord]
    ) -> None:
        self.remote_kv, self.machines, self.own = remote_kv, machines, tuple(own)
        self.peers: dict[WorkerId, PeerRecord] = {}  # workers of other processes
        self._readers = Readers()
        self._lock = threading.RLock()

    def recompiles(self) -> int:
        return sum(machine.recompiles() for machine in self.machines.values())

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Whoever gives a handoff up here, or hears of it, lets go what is offered for it. On the driver's thread."""
        match item:
            case Received(_, Abort() | AbortAck() as message) | Send(_, Abort() | AbortAck() as message):
                self.remote_kv.withdraw(message.attempt)
            case RouterLost():
                self.remote_kv.withdraw_all()
            case Send(to, Adopt(attempt)):
                log.warning("%s goes on with %s, which another router had", to, attempt.request_id)

    # ------------------------------------------------------------ out: `driver.RemoteWorkers`

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None:
        self.post(to, {"from": sender, "to": to, "message": encode(message)})

    def ship(self, machine: Any, transfer: KVTransfer) -> Any:
        peer = self.peers.get(transfer.destination)
        if peer is None:
            request_id = transfer.attempt.request_id
            raise TransferRefused(f"{transfer.destination} has gone, with the pages that {request_id!r} was for")
        source, to = transfer.source, transfer.destination
        tell = lambda notice: self.post(to, {"from": source, "to": to, "kv": notice})  # noqa: E731
        failed = lambda error: self.driver.post(source, failure_of(source, error, transfer=transfer))  # noqa: E731
        self.remote_kv.ship(machine, transfer, peer, tell, failed)

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        """Sends a body on its way to the process of `to`; nobody there, nothing sent."""
        raise NotImplementedError

    # ------------------------------------------------------------ in

    def receive(self, body: dict[str, Any], shift_s: float = 0.0) -> None:
        """A body for an actor of this process. Raises SenselessWord, BadTicket."""
        sender, to = WorkerId(str(body.get("from"))), WorkerId(str(body.get("to")))
        if to not in self.driver.actors:
            raise SenselessWord(f"there is no {shown(to)} here for {shown(sender)}")
        if not self.knows(sender):
            return  # it was dropped: its last messages are for nobody
        message = self.checked(body, sender, to)
        if message is None:
            self._readers.read(_lane(sender, to), lambda: self._fetch(sender, to, body["kv"]))
        else:
            self.driver.post(to, Received(sender, shifted(message, shift_s)))

    def knows(self, name: WorkerId) -> bool:
        return name == ROUTER or name in self.machines or name in self.peers

    def checked(self, body: dict[str, Any], sender: WorkerId, to: WorkerId) -> Message | None:
        """As `read_word`, by names. The router checks what it relays: who speaks is cut off, not who hears."""
        try:
            return read_word(body, self._config_of(sender), self._config_of(to))
        except SenselessWord as error:
            raise SenselessWord(f"{sender} to {to}: {error}") from error

    def _config_of(self, name: WorkerId) -> WorkerConfig | None:
        """None for the router."""
        if name == ROUTER:
            return None
        return self.machines[name].config if name in self.machines else self.peers[name].config

    def _fetch(self, sender: WorkerId, to: WorkerId, notice: dict[str, Any]) -> None:
        try:
            self.driver.land(*self.remote_kv.fetch(self.machines[to], notice, self.peers[sender]))
        except Exception:  # the part counts as never sent, and is asked for again
            log.exception("a part for %s was lost", to)

    def connect(self, described: Iterable[dict[str, Any]]) -> None:
        for record in described:
            peer = read_peer(record)
            self.peers[peer.worker] = peer
            self.remote_kv.met(peer)

    def disconnect(self, workers: Iterable[WorkerId]) -> None:
        """They are gone: nothing is kept for them, and what they offered will not be asked for again."""
        for worker in workers:
            self.peers.pop(worker, None)
            self.remote_kv.withdraw_for(worker)
            for own in self.machines:
                self._readers.end(_lane(worker, own))

    def close(self) -> None:
        self._readers.stop()
        self.remote_kv.close()


def _lane(source: WorkerId, destination: WorkerId) -> str:
    """Parts of one source are pulled one after the other: a source that stalls holds up its own."""
    return f"pull-{source}-{destination}"


class WorkerNode(Node):
    """A process with workers alone; a `control_client.ClientCallbacks`."""

    def __init__(
        self,
        remote_kv: RemoteKV,
        machines: Mapping[WorkerId, MeshExecutor],
        own: Sequence[PeerRecord],
        ended: Callable[[str], None],
    ) -> None:
        """`ended` is called when no worker of this process is of use any more."""
        super().__init__(remote_kv, machines, own)
        self._ended = ended
        self._link: Link | None = None
        self._broken: set[WorkerId] = set()
        self._leaving = False

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        link = self._link
        if link is not None:
            link.send(body)

    def give_up(self, worker: WorkerId) -> None:
        self._broken.add(worker)
        self.post(ROUTER, {"lost": worker})
        if len(self._broken) == len(self.machines):
            self._ended(f"plans fail again and again on {', '.join(sorted(self._broken))}")

    def end_session(self, peer: WorkerId, why: str) -> None:
        """Ends the session with the router, by way of which whatever `peer` said came."""
        link = self._link
        if link is not None:
            link.hang_up(f"{peer}: {why}")

    def report_status(self) -> None:
        """What this process counts and has learnt by now; nobody there, nothing sent."""
        counted = {"now_s": time.monotonic(), "recompiles": self.recompiles(), "samples": samples_of(self.merged)}
        self.post(ROUTER, {"status": counted | {"transfer_stats": transfer_stats_of(self.driver.actors)}})

    def leave(self) -> None:
        """From now on the router gives the workers nothing new; what they have they may end."""
        self._leaving = True
        for worker in self.machines:
            self.post(ROUTER, {"leaving": worker})

    @property
    def idle(self) -> bool:
        """Whether nothing of any request is left here."""
        return all(actor.idle for actor in self.driver.actors.values() if isinstance(actor, Worker))

    # ------------------------------------------------------------ `control_client.ClientCallbacks`

    def hello(self) -> dict[str, Any]:
        able = [peer for peer in self.own if peer.worker not in self._broken]
        return {"workers": records(able), "now_s": time.monotonic()}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        for worker in self.machines:
            self.driver.post(worker, RouterFound())
        log.warning("joined the router as %s", ", ".join(self.machines))
        if self._leaving:
            self.leave()

    def on_lost(self, why: str) -> None:
        log.warning("the router is gone (%s): giving up all but what is decoded here", why)
        self._link = None
        self.disconnect(list(self.peers))
        for worker in self.machines:
            self.driver.post(worker, RouterLost())

    def on_message(self, body: dict[str, Any]) -> None:
        if "peers" in body:
            self.connect(body["peers"])
        elif "gone" in body:
            self.disconnect([WorkerId(worker) for worker in body["gone"]])
        else:
            self.receive(body)


class RouterNode(Node):
    """The process with the router, and perhaps workers of its own; a `control_server.ServerCallbacks`."""

    def __init__(
        self, remote_kv: RemoteKV, machines: Mapping[WorkerId, MeshExecutor], own: Sequence[PeerRecord]
    ) -> None:
        super().__init__(remote_kv, machines, own)
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
        with self._lock:
            self._check_names(joining)
            self._check_ways(joining)
            self._joining[link] = joining
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
        to = WorkerId(str(body.get("to")))
        if "lost" in body:
            self.give_up(speaker)
        elif "leaving" in body:
            self._leaving.add(speaker)
            self.driver.post(ROUTER, WorkerLeaving(speaker))
        elif to in self.driver.actors:
            self.receive(body, self.shift_s(link))
        elif to in self.peers:
            self.checked(body, speaker, to)
            self.post(to, body)
        elif "message" not in body and "kv" not in body:
            raise SenselessWord(f"{shown(speaker)} says nothing that is known: {shown(body)}")

    def shift_s(self, link: Link) -> float:
        """Seconds to add to times of that process's clock to make them ours."""
        return min(self._shifts.get(link, [0.0]))

    def _note(self, link: Link, status: dict[str, Any]) -> None:
        """Its clock is read from the quickest of the latest reports: clocks drift, and messages are held up."""
        with self._lock:
            if link not in self._shifts:
                return  # on its way out
            shift_s, recompiles, samples, transfer_stats = read_status(status)
            self._shifts[link].append(shift_s)
            self._recompiles[link] = recompiles
            self.merged.update(link, samples)
            self._transfer_stats[link] = transfer_stats

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
                self._links.pop(worker, None)
                log.warning("%s is gone: %s", worker, "it left" if worker in self._leaving else why)
                self._leaving.discard(worker)
                self.driver.post(ROUTER, WorkerLost(worker))
            self.disconnect(workers)
            if workers:
                self._tell_all({"gone": list(workers)})

    def _tell_all(self, body: dict[str, Any]) -> None:
        for link in set(self._links.values()):
            link.send(body)


def _all(joining: Mapping[Link, Sequence[PeerRecord]]) -> list[PeerRecord]:
    return [peer for peers in joining.values() for peer in peers]
