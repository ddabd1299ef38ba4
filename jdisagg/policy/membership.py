"""Which workers the router has: they join, leave, are lost, and change their role; what becomes of requests then."""

from __future__ import annotations

from itertools import count

from jdisagg.core.events import ChangeRole, SetTimer, WorkerStands
from jdisagg.core.messages import Joined, Leave, Left
from jdisagg.core.request import FinishReason, Phase, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.admission import could_ever_serve, may_be_served, why_never
from jdisagg.policy.decisions import Verdict
from jdisagg.policy.failures import Failure, FailureKind
from jdisagg.policy.request_state import RequestState
from jdisagg.policy.request_table import RequestTable
from jdisagg.policy.role_change import RoleChange, Signal, Standing, why_not
from jdisagg.policy.worker_state import WorkerState

LEAVE_TIMER = "leave"


class Membership:
    """The router's workers, and the changes of role under way among them."""

    def __init__(self, requests: RequestTable, first_life: int) -> None:
        self.requests, self.config, self.out = requests, requests.config, requests.out
        self.peers, self.routes = requests.peers, requests.routes
        self.changes: dict[WorkerId, RoleChange] = {}
        self._lives = count(first_life)

    def number_changes_from(self, first_life: int) -> None:
        """Numbers the next role changes from `first_life` on."""
        self._lives = count(first_life)

    def standing_of(self, worker: WorkerId) -> Standing:
        change = self.changes.get(worker)
        if change is not None:
            return change.standing
        return Standing.LEAVING if self.peers[worker].leaving else Standing.SERVING

    # ------------------------------------------------------------ coming and going

    def join(self, config: WorkerConfig, now_s: float) -> None:
        """Who waited for a phase to have a worker, and was never tried, learns now whether it fits."""
        self.changes.pop(config.worker, None)
        self.peers[config.worker] = WorkerState(config)
        self.routes.joined()
        self.follow_cache(config)
        for row in [each for each in self.requests.queue if not (each.failures or each.output)]:
            self.refuse_if_never(row, now_s)

    def refuse_if_never(self, row: RequestState, now_s: float) -> None:
        if not may_be_served(self.routes.by_role, row.request, self.config):
            never = why_never(self.peers.values(), row.request)
            self.routes.refuse(row.request_id, Verdict.NEVER, never, now_s)
            self.requests.finish(row, FinishReason.ERROR, never, now_s)

    def follow_cache(self, config: WorkerConfig) -> None:
        """Where it is asked what workers keep."""
        if self.config.routing in (Routing.CACHE_AWARE, Routing.PREDICTED) or config.peer_fetch:
            self.routes.kept.follow(config)

    def leaving(self, worker: WorkerId) -> None:
        """Its process goes down: it ends what it has."""
        if worker in self.peers:
            self.peers[worker].leaving = True

    def lose(self, worker: WorkerId, now_s: float) -> None:
        self._forget(worker)
        for row in list(self.requests.rows.values()):
            if worker in (row.prefill, row.decode):
                kind = FailureKind.DECODE_LOST if row.decode == worker else FailureKind.PREFILL_LOST
                failure = Failure(kind, FinishReason.ERROR, f"worker {worker} was lost", gone=worker)
                self.requests.meet(row, failure, now_s)
        if not self.config.workers_return:
            self._end_hopeless(f"worker {worker} was lost and no other can do its work", now_s)

    def _forget(self, worker: WorkerId) -> None:
        self.peers.pop(worker, None)
        self.changes.pop(worker, None)
        self.requests.aborts.forget(worker)
        self.routes.forget(worker)

    def _end_hopeless(self, why: str, now_s: float) -> None:
        """Those in line that no worker can serve any more."""
        for row in list(self.requests.queue):
            if not could_ever_serve(self.routes.by_role, row.to_prefill()):
                self.requests.finish(row, FinishReason.ERROR, why, now_s)

    # ------------------------------------------------------------ changes of role

    def change_role(self, event: ChangeRole, now_s: float) -> None:
        worker = event.worker
        standings = {name: (peer.config.role, self.standing_of(name)) for name, peer in self.peers.items()}
        refused = why_not(worker, standings)
        if refused:
            self._tell(worker, event.number, refused)
            return
        change = self.changes.get(worker)
        standing = Standing.SERVING if change is None else change.standing
        change = RoleChange(event.number, next(self._lives), event.config, now_s + event.drain_s, standing)
        self.changes[worker] = change
        self.peers[worker].leaving = True
        self.routes.joined()
        change.take(Signal.LEAVE)
        self._tell(worker, event.number)
        self.timer(worker, now_s)

    def timer(self, worker: WorkerId, now_s: float) -> None:
        """It is asked to leave, and again lest a word was lost; once it had its time, what it has goes on elsewhere."""
        change = self.changes.get(worker)
        if change is None or change.standing is Standing.DRAINED:
            return
        if now_s >= change.recall_s:
            self._recall_all(worker, now_s)
        self.out.send(worker, Leave(change.life, change.target))
        due_s = change.recall_s if now_s < change.recall_s else now_s + self.config.handoff_timeout_s
        self.out.put(SetTimer(due_s, f"{LEAVE_TIMER}/{worker}"))

    def left(self, sender: WorkerId, message: Left, now_s: float) -> None:
        change = self.changes.get(sender)
        if change is None or change.life != message.life or change.standing is not Standing.LEAVING:
            return
        change.take(Signal.EMPTY)
        for row in list(self.requests.rows.values()):
            if row.prefill == sender and row.phase in (Phase.QUEUED, Phase.PREFILLING):
                self.requests.move(row, f"worker {sender} leaves", now_s)  # it had not come to it yet
        self._tell(sender, change.number)
        if change.target is not None:
            change.take(Signal.CHANGE)
            self._tell(sender, change.number)

    def joined(self, sender: WorkerId, message: Joined, now_s: float) -> None:
        """It is what it says, whoever asked for it: a router before this one may have."""
        if sender not in self.peers:
            return
        change = self.changes.get(sender)
        self._recall_all(sender, now_s)
        self._forget(sender)
        self.join(message.config, now_s)
        if change is not None:
            self._tell(sender, change.number, message.why)
        if not self.config.workers_return:
            self._end_hopeless("no worker can serve it since the workers' roles have changed", now_s)

    def _recall_all(self, worker: WorkerId, now_s: float) -> None:
        for row in list(self.requests.rows.values()):
            if _is_held(row, worker):
                self.requests.move(row, f"worker {worker} leaves", now_s)

    def _tell(self, worker: WorkerId, number: int, refused: str = "") -> None:
        peer = self.peers.get(worker)
        standing = "" if peer is None else self.standing_of(worker).value
        role = "" if peer is None else peer.config.role.value
        self.out.put(WorkerStands(worker, number, standing, role, refused))


def _is_held(row: RequestState, worker: WorkerId) -> bool:
    """Whether something of the row is there: where it was prefilled, only until its KV has gone."""
    return row.decode == worker or (row.prefill == worker and row.phase is not Phase.DECODING)
