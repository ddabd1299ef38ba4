"""Workers that join, leave, change their role or are lost, and the requests that an earlier router had.

A router that takes over knows no request. Workers that still run one report it (`Kept`), clients that still wait for
one submit it again with its output so far; the router joins both, or starts the request again.
"""

from __future__ import annotations

import math
from itertools import count

from jdisagg.core.events import ChangeRole, SetTimer, WorkerStands
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Adopt, Joined, Kept, Leave, Left
from jdisagg.core.request import Attempt, FinishReason, Phase, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.router.admission import could_ever_serve, may_be_served, why_never
from jdisagg.policy.router.decisions import Verdict
from jdisagg.policy.router.request_state import Failure, FailureKind, RequestState, Waiting
from jdisagg.policy.router.requests import RequestTable
from jdisagg.policy.router.worker_view import WorkerState
from jdisagg.policy.worker.drain import DrainSignal, RoleTransition, WorkerStatus, why_not

LEAVE_TIMER = "leave"


class Membership:
    """The router's workers, and the changes of role under way among them."""

    def __init__(self, requests: RequestTable, first_life: int) -> None:
        self.requests, self.config, self.out = requests, requests.config, requests.out
        self.peers, self.routes = requests.peers, requests.routes
        self.changes: dict[WorkerId, RoleTransition] = {}
        self._lives = count(first_life)

    def number_changes_from(self, first_life: int) -> None:
        """Numbers the next role changes from `first_life` on."""
        self._lives = count(first_life)

    def standing_of(self, worker: WorkerId) -> WorkerStatus:
        change = self.changes.get(worker)
        if change is not None:
            return change.standing
        return WorkerStatus.LEAVING if self.peers[worker].leaving else WorkerStatus.SERVING

    # ------------------------------------------------------------ coming and going

    def join(self, config: WorkerConfig, now_s: float) -> None:
        """Refuses waiting requests that fit no pair now that the missing phase has a worker."""
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
        """Follows the worker's prefix cache if the routing or a peer fetch needs it."""
        if self.config.routing is Routing.CACHE_AWARE or config.peer_fetch:
            self.routes.kept.follow(config)

    def leaving(self, worker: WorkerId) -> None:
        """Marks a worker whose process shuts down; it finishes its requests."""
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
        """Ends the waiting requests that no worker can serve any more."""
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
        standing = WorkerStatus.SERVING if change is None else change.standing
        change = RoleTransition(event.number, next(self._lives), event.config, now_s + event.drain_s, standing)
        self.changes[worker] = change
        self.peers[worker].leaving = True
        self.routes.joined()
        change.take(DrainSignal.LEAVE)
        self._tell(worker, event.number)
        self.timer(worker, now_s)

    def timer(self, worker: WorkerId, now_s: float) -> None:
        """Resends `Leave`; after the drain deadline, moves the worker's requests to other workers."""
        change = self.changes.get(worker)
        if change is None or change.standing is WorkerStatus.DRAINED:
            return
        if now_s >= change.recall_s:
            self._recall_all(worker, now_s)
        self.out.send(worker, Leave(change.life, change.target))
        due_s = change.recall_s if now_s < change.recall_s else now_s + self.config.handoff_timeout_s
        self.out.put(SetTimer(due_s, f"{LEAVE_TIMER}/{worker}"))

    def left(self, sender: WorkerId, message: Left, now_s: float) -> None:
        change = self.changes.get(sender)
        if change is None or change.life != message.life or change.standing is not WorkerStatus.LEAVING:
            return
        change.take(DrainSignal.EMPTY)
        for row in list(self.requests.rows.values()):
            if row.prefill == sender and row.phase in (Phase.QUEUED, Phase.PREFILLING):
                self.requests.move(row, f"worker {sender} leaves", now_s)  # it had not come to it yet
        self._tell(sender, change.number)
        if change.target is not None:
            change.take(DrainSignal.CHANGE)
            self._tell(sender, change.number)

    def joined(self, sender: WorkerId, message: Joined, now_s: float) -> None:
        """Takes the worker's reported role, even if an earlier router asked for the change."""
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
    """Returns True if the worker holds part of the request; a prefill worker does until its KV was sent."""
    return row.decode == worker or (row.prefill == worker and row.phase is not Phase.DECODING)


ADOPTED = (Phase.PREFILLING, Phase.SHIPPING, Phase.DECODING)  # a row goes through them in one go


class Adoption:
    """The streams that workers keep and nobody has asked for yet."""

    def __init__(self, requests: RequestTable) -> None:
        self.requests, self.config, self.out = requests, requests.config, requests.out
        self.kept: dict[RequestId, tuple[WorkerId, Kept]] = {}

    def resumed(self, row: RequestState, now_s: float) -> None:
        """A new row that another router had: it is taken over, or waits for a worker that says it has kept it."""
        natural = row.natural_end()
        worker, kept = self.kept.pop(row.request_id, (None, None))
        if natural is not None:  # only its end was not told
            if worker is not None and kept is not None:
                self._refuse(worker, kept)
            self.requests.rows[row.request_id] = row
            row.enter(Phase.PREFILLING)  # as it was, somewhere
            self.requests.finish(row, natural, "", now_s)
            return
        self.requests.rows[row.request_id] = row
        self.requests.wait(row, Waiting.KEEPER, now_s + self.config.adopt_s)
        if worker is not None and kept is not None:
            self.told(worker, kept, now_s)

    def told(self, sender: WorkerId, kept: Kept, now_s: float) -> None:
        """A worker has kept this."""
        row = self.requests.rows.get(kept.attempt.request_id)
        if sender not in self.requests.peers:
            return
        if row is None:
            self.kept[kept.attempt.request_id] = sender, kept
        elif self._may_adopt(row, kept):
            self._adopt(row, sender, kept, now_s)
        else:
            self._refuse(sender, kept)

    def _may_adopt(self, row: RequestState, kept: Kept) -> bool:
        """Nobody else works for it, and its client lacks nothing that was drawn elsewhere."""
        scored = row.request.sampling.reads_prompt and not row.output
        free = row.waiting is Waiting.KEEPER or (row.waiting is Waiting.RESERVATION and row.phase is Phase.QUEUED)
        return free and not scored and kept.num_output <= len(row.output)

    def _adopt(self, row: RequestState, worker: WorkerId, kept: Kept, now_s: float) -> None:
        if row in self.requests.queue:
            self.requests.queue.remove(row)
        row.epoch, row.decode, row.num_before = kept.attempt.epoch, worker, len(row.output)
        for phase in ADOPTED:
            row.enter(phase)
        row.ledger.mark(Mark.FIRST_STEP, now_s)
        tokens = row.request.sampling.max_tokens * self.config.decode_token_weight
        self.requests.peers[worker].book(row.request_id, 0.0, tokens)
        self.out.send(worker, Adopt(row.attempt, len(row.output)))
        self.requests.wait(row, Waiting.TOKEN, now_s + self.config.stall_timeout_s)

    def _refuse(self, worker: WorkerId, kept: Kept) -> None:
        self.out.send(worker, Abort(kept.attempt, "nobody asks for what was kept"))

    def waited(self, row: RequestState, now_s: float) -> None:
        """No worker has kept it."""
        deadline_s = now_s + (self.config.queue_timeout_s or math.inf)
        row.queue_deadline_s = max(row.queue_deadline_s, deadline_s)
        self.requests.add(row)

    def gave_up(self, sender: WorkerId, attempt: Attempt) -> None:
        """A worker keeps this no longer."""
        if self.kept.get(attempt.request_id, (None, None))[0] == sender:
            del self.kept[attempt.request_id]

    def lose(self, worker: WorkerId) -> None:
        self.kept = {name: each for name, each in self.kept.items() if each[0] != worker}
