"""The router's requests: the line of those that wait, and how an attempt at one goes wrong, begins again, or ends."""

from __future__ import annotations

import math
from bisect import insort

from jdisagg.core.ledger import Mark
from jdisagg.core.request import FinishReason, Phase, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.policy import deadlines
from jdisagg.policy.aborts import Aborts
from jdisagg.policy.admission import retry_after_s
from jdisagg.policy.early_rejection import EarlyRejection, Late
from jdisagg.policy.failures import Failure, Recovery, recovery
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.pair_selection import PairSelection
from jdisagg.policy.request_state import END_PHASE, RequestState, Waiting
from jdisagg.policy.worker_state import WorkerState


class RequestTable:
    """Every request that runs or waits. `peers` are the router's views of its workers."""

    def __init__(
        self, config: RouterConfig, peers: dict[WorkerId, WorkerState], routes: PairSelection, out: Outbox
    ) -> None:
        self.config, self.peers, self.routes, self.out = config, peers, routes, out
        self.rows: dict[RequestId, RequestState] = {}
        self.queue: list[RequestState] = []  # rows that wait for a reservation, in order
        self.aborts = Aborts(out, config.handoff_timeout_s, config.abort_tries)
        self.early = EarlyRejection(peers, self.rows, routes.forecasts)
        self._finish_gap_s, self._last_finish_s = 1.0, 0.0

    @property
    def retry_after_s(self) -> float:
        """When somebody who is refused now may come again: what the line took lately."""
        return retry_after_s(len(self.queue), self._finish_gap_s)

    def why_late(self, row: RequestState, now_s: float) -> Late | None:
        """Why a new request cannot meet its objectives, as far as can be foretold; None where it may."""
        if not self.config.early_rejection:
            return None
        line_s = len(self.queue) * self._finish_gap_s
        return self.early.late(row.request, lambda config: self.routes.cached_tokens(config, row), line_s, now_s)

    def add(self, row: RequestState) -> None:
        self.rows[row.request_id] = row
        insort(self.queue, row, key=lambda each: each.order)
        self.wait(row, Waiting.RESERVATION, row.queue_deadline_s)

    def wait(self, row: RequestState, waiting: Waiting, deadline_s: float) -> None:
        deadlines.wait(self.out, row, waiting, deadline_s)

    def meet(self, row: RequestState, failure: Failure, now_s: float) -> None:
        """Does what the table of failures says."""
        found = recovery(failure.kind, row.phase)
        told = len(row.output) > row.num_before
        assert not (found is Recovery.REPREFILL and told), f"{row.request_id} was told tokens while {row.phase}"
        if found is not Recovery.IGNORE:
            self._fail(row, failure, now_s)

    def _fail(self, row: RequestState, failure: Failure, now_s: float) -> None:
        """Ends an attempt that went wrong: tries again, elsewhere where there is an elsewhere, or gives up."""
        row.failures += 1
        if failure.avoid is not None:
            row.avoid.add(failure.avoid)
        natural = row.natural_end()
        if natural is not None:
            self.finish(row, natural, "", now_s, gone=failure.gone)
        elif row.failures > self.config.max_retries:
            self.finish(row, failure.reason, f"{failure.detail} (attempt {row.failures})", now_s, gone=failure.gone)
        else:
            self._abort_attempt(row, failure.detail, now_s, failure.gone)
            self.enqueue(row, now_s)

    def move(self, row: RequestState, why: str, now_s: float) -> None:
        """Its attempt ends where it is, and it goes on elsewhere: nothing failed, and nothing is counted as if."""
        natural = row.natural_end()
        if natural is not None:
            self.finish(row, natural, "", now_s)
        elif row.epoch:
            self._abort_attempt(row, why, now_s, None)
            self.enqueue(row, now_s)

    def gave_back(self, row: RequestState, detail: str, now_s: float) -> None:
        """Its decode worker holds nothing of it any more, for lack of pages: it is no failure."""
        self._abort_attempt(row, detail, now_s, row.decode)
        self.enqueue(row, now_s)

    def enqueue(self, row: RequestState, now_s: float) -> None:
        """Back to the line, at the place of its arrival; one that never left it keeps its deadline."""
        self._release(row)
        row.leave_workers()
        if row.phase is not Phase.QUEUED:
            row.enter(Phase.QUEUED)
            row.ledger.mark(Mark.REQUEUED, now_s)
            row.queue_deadline_s = now_s + (self.config.queue_timeout_s or math.inf)
        insort(self.queue, row, key=lambda each: each.order)
        self.wait(row, Waiting.RESERVATION, row.queue_deadline_s)

    def _release(self, row: RequestState) -> None:
        for worker in {row.prefill, row.decode}:
            peer = self.peers.get(worker) if worker is not None else None
            if peer is not None:
                peer.release(row.request_id)
                peer.withdraw(row.attempt)

    def _abort_attempt(self, row: RequestState, detail: str, now_s: float, gone: WorkerId | None) -> None:
        """Tells every worker that still holds something of the attempt; `gone` holds nothing any more."""
        holders = {row.decode}
        if row.phase in (Phase.PREFILLING, Phase.SHIPPING):
            holders.add(row.prefill)
        for worker in sorted(each for each in holders if each is not None and each != gone and each in self.peers):
            self.aborts.send(worker, row.attempt, detail, now_s)

    def finish(
        self, row: RequestState, reason: FinishReason, detail: str, now_s: float, *, gone: WorkerId | None = None
    ) -> None:
        if row in self.queue:
            self.queue.remove(row)
        self._abort_attempt(row, f"the request ended: {reason}", now_s, gone)
        self._release(row)
        row.enter(END_PHASE[reason])
        row.ledger.mark(Mark.ENDED, now_s)
        self.routes.ended(row, now_s)
        del self.rows[row.request_id]
        self._finish_gap_s += 0.1 * (min(60.0, now_s - self._last_finish_s) - self._finish_gap_s)
        self._last_finish_s = now_s
        self.out.put(row.finish(reason, detail))
