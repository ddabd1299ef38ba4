"""The two kinds of processes of a cluster: the one with the router, and those with workers alone.

The router's process relays words between workers of different processes (a star: one link each, one place that knows
who is there); KV goes from worker process to worker process. A worker process without its router holds nothing: it
fences itself at once, and joins again, empty, as soon as there is a router.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jdisagg.core.errors import BadTicket, TransferRefused
from jdisagg.core.events import ROUTER, Received, RouterLost, WorkerJoined, WorkerLost
from jdisagg.core.journal import decode, encode
from jdisagg.core.messages import Abort, AbortAck, Ack, Ended, Message, Progress
from jdisagg.core.plans import KVTransfer
from jdisagg.core.request import WorkerId
from jdisagg.engine.mesh_machine import MeshMachine
from jdisagg.serve.cluster.crossing import Crossing, PeerRecord, read_peer, records
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.driver import LiveDriver, Readers

log = logging.getLogger("jdisagg.cluster")


class Node:
    """What both kinds share: the way out for words and KV, and the way in. `driver` is set before anything starts."""

    driver: LiveDriver

    def __init__(self, crossing: Crossing, machines: Mapping[WorkerId, MeshMachine], own: Sequence[PeerRecord]) -> None:
        self.crossing, self.machines, self.own = crossing, machines, tuple(own)
        self.peers: dict[WorkerId, PeerRecord] = {}  # workers of other processes
        self._readers = Readers()
        self._lock = threading.Lock()

    # ------------------------------------------------------------ out: `driver.Far`

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None:
        self._forget_offers(message)
        self.post(to, {"from": sender, "to": to, "message": encode(message)})

    def ship(self, machine: Any, transfer: KVTransfer) -> Any:
        peer = self.peers.get(transfer.destination)
        if peer is None:
            raise TransferRefused(f"{transfer.destination} has gone, with the pages that {transfer.handoff!r} was for")
        notice = self.crossing.ship(machine, transfer, peer)
        self.post(transfer.destination, {"from": transfer.source, "to": transfer.destination, "kv": notice})

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        """Sends a body on its way to the process of `to`; nobody there, nothing sent."""
        raise NotImplementedError

    def _forget_offers(self, message: Message) -> None:
        if isinstance(message, Abort | AbortAck | Ack):
            self.crossing.call_off(message.handoff, message.epoch)

    # ------------------------------------------------------------ in

    def take(self, body: dict[str, Any], shift_s: float = 0.0) -> None:
        """A body for an actor of this process."""
        sender, to = WorkerId(body["from"]), WorkerId(body["to"])
        if "kv" in body:
            self._readers.read(f"pull-{sender}-{to}", lambda: self._fetch(to, body["kv"]))
        else:
            message = decode(body["message"])
            self._forget_offers(message)
            self.driver.post(to, Received(sender, _shifted(message, shift_s)))

    def _fetch(self, to: WorkerId, notice: dict[str, Any]) -> None:
        try:
            self.driver.land(*self.crossing.fetch(self.machines[to], notice))
        except Exception:  # the part counts as never sent, and is asked for again
            log.exception("a part for %s was lost", to)

    def meet(self, described: Sequence[dict[str, Any]]) -> None:
        for record in described:
            peer = read_peer(record)
            self.peers[peer.worker] = peer

    def part_with(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self.peers.pop(WorkerId(worker), None)

    def close(self) -> None:
        self._readers.stop()
        self.crossing.close()


def _shifted(message: Message, shift_s: float) -> Message:
    """Times of another process's clock as times of this one's."""
    return replace(message, at_s=message.at_s + shift_s) if isinstance(message, Progress | Ended) else message


class WorkerNode(Node):
    """A process with workers alone; a `visit.Guest`."""

    _link: Link | None = None

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        link = self._link
        if link is not None:
            link.send(body)

    def give_up(self, worker: WorkerId) -> None:
        self.post(ROUTER, {"lost": worker})

    # ------------------------------------------------------------ `visit.Guest`

    def hello(self) -> dict[str, Any]:
        return {"workers": records(self.own), "now_s": time.monotonic()}

    def joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        log.warning("joined the router as %s", ", ".join(self.machines))

    def lose(self, why: str) -> None:
        log.warning("the router is gone (%s): giving everything up", why)
        self._link = None
        self.part_with(list(self.peers))
        for worker in self.machines:
            self.driver.post(worker, RouterLost())

    def hear(self, body: dict[str, Any]) -> None:
        if "peers" in body:
            self.meet(body["peers"])
        elif "gone" in body:
            self.part_with(body["gone"])
        else:
            self.take(body)


class RouterNode(Node):
    """The process with the router, and perhaps workers of its own; a `reception.Host`."""

    def __init__(self, crossing: Crossing, machines: Mapping[WorkerId, MeshMachine], own: Sequence[PeerRecord]) -> None:
        super().__init__(crossing, machines, own)
        self._links: dict[WorkerId, Link] = {}
        self._shifts: dict[Link, float] = {}
        self._joining: dict[Link, list[PeerRecord]] = {}

    @property
    def able(self) -> bool:
        """Every phase has a worker, here or elsewhere."""
        roles = [peer.config.role for peer in [*self.own, *self.peers.values()]]
        return any(role.prefills for role in roles) and any(role.decodes for role in roles)

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        link = self._links.get(to)
        if link is not None:
            link.send(body)

    def give_up(self, worker: WorkerId) -> None:
        self._drop([worker], "its plans fail again and again")

    # ------------------------------------------------------------ `reception.Host`

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        self._shifts[link] = time.monotonic() - float(hello["now_s"])
        self._joining[link] = [read_peer(record) for record in hello["workers"]]
        taken = [
            peer.worker for peer in self._joining[link] if peer.worker in self.peers or peer.worker in self.machines
        ]
        if taken:
            raise BadTicket(f"workers named {', '.join(taken)} are here already")
        return {}

    def welcomed(self, link: Link) -> None:
        joining = self._joining.pop(link)
        with self._lock:
            link.send({"peers": records([*self.own, *self.peers.values()])})
            self._tell_all({"peers": records(joining)})
            for peer in joining:
                self.peers[peer.worker], self._links[peer.worker] = peer, link
        for peer in joining:
            log.warning("%s joined", peer.worker)
            self.driver.post(ROUTER, WorkerJoined(peer.config))

    def hear(self, link: Link, body: dict[str, Any]) -> None:
        if "lost" in body:
            self.give_up(WorkerId(body["lost"]))
            return
        to, sender = WorkerId(body["to"]), body.get("from")
        if sender is not None and self._links.get(WorkerId(sender)) is not link:
            raise BadTicket(f"a process speaks for {sender!r}, which is not its own")
        if to == ROUTER or to in self.machines:
            self.take(body, self._shifts.get(link, 0.0))
        else:
            self.post(to, body)

    def lose(self, link: Link, why: str) -> None:
        self._drop([worker for worker, theirs in self._links.items() if theirs is link], why)
        self._shifts.pop(link, None)
        self._joining.pop(link, None)

    def _drop(self, workers: Sequence[WorkerId], why: str) -> None:
        with self._lock:
            for worker in workers:
                self._links.pop(worker, None)
            self.part_with(workers)
            if workers:
                self._tell_all({"gone": list(workers)})
        for worker in workers:
            log.warning("%s is gone: %s", worker, why)
            self.driver.post(ROUTER, WorkerLost(worker))

    def _tell_all(self, body: dict[str, Any]) -> None:
        for link in set(self._links.values()):
            link.send(body)
