"""Nodes: a process's messages and KV to and from other processes. `Node` is the base; `WorkerNode` has workers only.

The router's process relays messages between workers of different processes: each process has one link, to the router,
which alone knows the members. KV goes directly between worker processes. A worker process that lost its router keeps
decoding, gives up all other work at once, and joins again when there is a router.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from jdisagg.core.codec import shown
from jdisagg.core.errors import LateWord, SenselessWord, TransferRefused
from jdisagg.core.events import ROUTER, Received, RouterFound, RouterLost, Send
from jdisagg.core.layout.reshard import of_one_process
from jdisagg.core.messages import Abort, AbortAck, Adopt, Joined, Message
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.shipping import shapes_of
from jdisagg.kv.transport.choose import Capability
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.cluster.kv_notices import (
    PeerRecord,
    RemoteKV,
    offer_records,
    pull_records,
    read_lent,
    read_peer,
    records,
)
from jdisagg.serve.cluster.link import Link, read_word, shifted
from jdisagg.serve.cluster.role_options import options_json
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.executors import failure_of
from jdisagg.serve.driver.kv_moves import Lent
from jdisagg.serve.driver.readers import Readers
from jdisagg.serve.driver.role_change import ReshapeTimes
from jdisagg.serve.observability.records import transfer_stats_of
from jdisagg.serve.observability.worker_metrics import MergedRegistry, samples_of

log = logging.getLogger("jdisagg.cluster")


class Node:
    """Sends and receives messages and KV of a process; the base of both kinds of nodes.

    `driver` and `merged` are set before anything starts; `observe` is one of the driver's observers.
    """

    driver: LiveDriver
    merged: MergedRegistry

    def __init__(
        self,
        remote_kv: RemoteKV,
        machines: Mapping[WorkerId, MeshExecutor],
        own: Sequence[PeerRecord],
        options: Mapping[WorkerId, WorkerShapes] | None = None,
    ) -> None:
        """`options` has the roles and shapes that workers of this process can take."""
        self.remote_kv, self.machines, self.own = remote_kv, machines, tuple(own)
        self.options: dict[WorkerId, WorkerShapes] = dict(options or {})
        self.peers: dict[WorkerId, PeerRecord] = {}  # workers of other processes
        self._former: dict[WorkerId, dict[Role, WorkerConfig]] = {}  # earlier configurations of workers, by role
        self._readers = Readers()
        self._lock = threading.RLock()

    def recompiles(self) -> int:
        return sum(machine.recompiles() for machine in self.machines.values())

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Withdraws KV of aborted handoffs, and all KV when the router is lost. Called on the driver's thread."""
        match item:
            case Received(_, Abort() | AbortAck() as message) | Send(_, Abort() | AbortAck() as message):
                self.remote_kv.withdraw(message.attempt)
            case RouterLost():
                self.remote_kv.withdraw_all()
            case Send(to, Adopt(attempt)):
                log.warning("%s goes on with %s, which another router had", to, attempt.request_id)

    # ------------------------------------------------------------ sending: `driver.RemoteWorkers`

    def send(self, sender: WorkerId, to: WorkerId, message: Message) -> None:
        self.post(to, {"from": sender, "to": to, "message": message})

    def ship(self, machine: Any, transfer: KVTransfer) -> Any:
        peer = self.peers.get(transfer.destination)
        if peer is None:
            request_id = transfer.attempt.request_id
            raise TransferRefused(f"{transfer.destination} has gone, with the pages that {request_id!r} was for")
        source, to = transfer.source, transfer.destination
        send_notice = lambda notice: self.post(to, {"from": source, "to": to, "kv": notice})  # noqa: E731
        failed = lambda error: self.driver.post(source, failure_of(source, error, transfer=transfer))  # noqa: E731
        self.remote_kv.ship(machine, transfer, peer, send_notice, failed)

    def lend(self, lent: Lent) -> None:
        peer = self.peers.get(lent.asker)
        if peer is None:
            raise TransferRefused(f"{lent.asker} has gone, with the pages that were for it")
        notice = offer_records(self.remote_kv, lent, peer)
        self.post(lent.asker, {"from": lent.lender, "to": lent.asker, "lent": notice})

    def post(self, to: WorkerId, body: dict[str, Any]) -> None:
        """Sends a body towards the process of `to`; without a connection it is dropped."""
        raise NotImplementedError

    # ------------------------------------------------------------ receiving

    def receive(self, body: dict[str, Any], shift_s: float = 0.0) -> None:
        """Handles a body for an actor of this process. Raises SenselessWord, BadTicket."""
        sender, to = WorkerId(str(body.get("from"))), WorkerId(str(body.get("to")))
        if to not in self.driver.actors:
            raise SenselessWord(f"there is no {shown(to)} here for {shown(sender)}")
        if not self.knows(sender):
            return  # the sender has left: its last messages are dropped
        try:
            message = self.checked(body, sender, to)
        except LateWord:
            return
        if message is None:
            pull, notice = (self._fetch, body["kv"]) if "kv" in body else (self._fetch_lent, body["lent"])
            self._readers.read(_lane(sender, to), lambda: pull(sender, to, notice))
        else:
            self.driver.post(to, Received(sender, shifted(message, shift_s)))

    def knows(self, name: WorkerId) -> bool:
        return name == ROUTER or name in self.machines or name in self.peers

    def checked(self, body: dict[str, Any], sender: WorkerId, to: WorkerId) -> Message | None:
        """Reads a body from `sender` to `to` with their configurations, as `read_word`; None for a KV notice.

        The router checks messages that it relays, so that an invalid one ends the sender's session, not the receiver's.
        Raises SenselessWord, and LateWord for a message that was valid before one of the two changed its role.
        """
        configs = self._config_of(sender), self._config_of(to)
        try:
            return read_word(body, *configs)
        except SenselessWord as error:
            earlier = product(self._configs_of(sender), self._configs_of(to))
            kind = LateWord if any(_is_valid(body, *each) for each in earlier) else SenselessWord
            raise kind(f"{sender} to {to}: {error}") from error

    def _config_of(self, name: WorkerId) -> WorkerConfig | None:
        if name == ROUTER:
            return None
        return self.machines[name].config if name in self.machines else self.peers[name].config

    def _configs_of(self, name: WorkerId) -> list[WorkerConfig | None]:
        return [self._config_of(name), *self._former.get(name, {}).values()]

    def became(self, machine: MeshExecutor) -> None:
        """Records a local worker's new configuration. Called on the driver's thread before its actor's event."""
        record = record_of(machine, self.remote_kv.mine)
        with self._lock:
            for each in self.own:
                if each.worker == record.worker:
                    self._former.setdefault(each.worker, {})[each.config.role] = each.config
            self.own = tuple(record if each.worker == record.worker else each for each in self.own)
        self.tell_become(record)

    def tell_become(self, record: PeerRecord) -> None:
        """Announces the worker's new configuration to other processes."""
        raise NotImplementedError

    def _fetch(self, sender: WorkerId, to: WorkerId, notice: dict[str, Any]) -> None:
        try:
            self.driver.land(*self.remote_kv.fetch(self.machines[to], notice, self.peers[sender]))
        except Exception:  # the part counts as never sent and is requested again
            log.exception("a part for %s was lost", to)

    def _fetch_lent(self, sender: WorkerId, to: WorkerId, record: dict[str, Any]) -> None:
        tiers, notice = self.driver.executors.tiers, read_lent(record)
        if not tiers.awaits(to, notice.asked):
            return
        try:
            tiers.arrive(pull_records(self.remote_kv, notice, sender, to))
        except Exception as error:
            tiers.lost(to, notice.asked, error)

    def connect(self, described: Iterable[dict[str, Any]]) -> None:
        for record in described:
            self.meet(read_peer(record))

    def meet(self, peer: PeerRecord) -> None:
        """Records a worker of another process that joined or changed its role."""
        before = self.peers.get(peer.worker)
        if before is not None:
            self._former.setdefault(peer.worker, {})[before.config.role] = before.config
        self.peers[peer.worker] = peer
        self.remote_kv.met(peer)

    def disconnect(self, workers: Iterable[WorkerId]) -> None:
        """Forgets workers of other processes that are gone, and withdraws KV that was offered to them."""
        for worker in workers:
            self.peers.pop(worker, None)
            self._former.pop(worker, None)
            self.remote_kv.withdraw_for(worker)
            for own in self.machines:
                self._readers.end(_lane(worker, own))

    def close(self) -> None:
        self._readers.stop()
        self.remote_kv.close()


def _is_valid(body: dict[str, Any], sender: WorkerConfig | None, to: WorkerConfig | None) -> bool:
    try:
        read_word(body, sender, to)
    except SenselessWord:
        return False
    return True


def record_of(machine: MeshExecutor, mine: Capability) -> PeerRecord:
    """Returns the record of a worker that runs in this process alone."""
    stages = shapes_of(machine.pages)
    return PeerRecord(machine.config, stages, (mine,), of_one_process([stage.tp for stage in stages]))


def _lane(source: WorkerId, destination: WorkerId) -> str:
    """Returns the lane for parts of one source; they are pulled in order, so a stalled source delays only its own."""
    return f"pull-{source}-{destination}"


class WorkerNode(Node):
    """The node of a process with workers only; it implements `control_client.ClientCallbacks`."""

    def __init__(
        self,
        remote_kv: RemoteKV,
        machines: Mapping[WorkerId, MeshExecutor],
        own: Sequence[PeerRecord],
        ended: Callable[[str], None],
        options: Mapping[WorkerId, WorkerShapes] | None = None,
    ) -> None:
        """`ended` is called with the reason when every worker of this process is lost."""
        super().__init__(remote_kv, machines, own, options)
        self.reshape_times: Mapping[WorkerId, ReshapeTimes] = {}
        self._announced = self.own  # the records sent to the router at the last join
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
        """Ends the session with the router, which relayed the message of `peer`."""
        link = self._link
        if link is not None:
            link.hang_up(f"{peer}: {why}")

    def tell_become(self, record: PeerRecord) -> None:
        self.post(ROUTER, {"from": record.worker, "became": record.to_json()})

    def report_status(self) -> None:
        """Sends this process's counters and measurements to the router; without a router they are dropped."""
        counted = {"now_s": time.monotonic(), "recompiles": self.recompiles(), "samples": samples_of(self.merged)}
        took = {worker: asdict(each) for worker, each in self.reshape_times.items()}
        learnt = {"transfer_stats": transfer_stats_of(self.driver.actors), "reshape_times": took}
        self.post(ROUTER, {"status": counted | learnt})

    def leave(self) -> None:
        """Asks the router for no new requests; the workers finish those that they have."""
        self._leaving = True
        for worker in self.machines:
            self.post(ROUTER, {"leaving": worker})

    @property
    def serves(self) -> bool:
        return self._link is not None and not self._leaving

    @property
    def idle(self) -> bool:
        return all(actor.idle for actor in self.driver.actors.values() if isinstance(actor, Worker))

    # ------------------------------------------------------------ `control_client.ClientCallbacks`

    def hello(self) -> dict[str, Any]:
        self._announced = self.own
        able = [peer for peer in self._announced if peer.worker not in self._broken]
        can_be = {peer.worker: options_json(self.options[peer.worker]) for peer in able if peer.worker in self.options}
        named = [str(worker) for worker in self.machines]
        return {"named": named, "workers": records(able), "can_be": can_be, "now_s": time.monotonic()}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        for worker in self.machines:
            self.driver.post(worker, RouterFound())
        log.warning("joined the router as %s", ", ".join(self.machines))
        for record in [each for each in self.own if each not in self._announced]:  # changed since `hello`
            self.tell_become(record)
            self.send(record.worker, ROUTER, Joined(0, record.config))
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
