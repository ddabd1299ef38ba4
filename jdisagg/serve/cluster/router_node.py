"""The router's process: it relays what workers of different processes say to each other, and knows who is there."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from jdisagg.core.codec import shown
from jdisagg.core.errors import BadTicket, LateWord, SenselessWord
from jdisagg.core.events import ROUTER, WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.messages import Joined, Message
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.transport.choose import choose
from jdisagg.serve.cluster.bodies import read_shift_s, read_status
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.cluster.nodes import Node
from jdisagg.serve.cluster.remote_kv import PeerRecord, RemoteKV, read_peer, records
from jdisagg.serve.cluster.role_options import read_all_options
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.deploy.pools import Place, place_of
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
