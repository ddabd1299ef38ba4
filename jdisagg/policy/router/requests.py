"""The router's requests: the queue, retries and ends, unacknowledged aborts, and what workers report of attempts."""

from __future__ import annotations

import math
from bisect import insort

from jdisagg.core.events import EmitTokens, SetTimer
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ended, Preempted, Progress, Refused, Reserved, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Phase, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import readable_pages
from jdisagg.policy.router.admission import EarlyRejection, SloMiss, retry_after_s
from jdisagg.policy.router.pair_selection import PairSelection
from jdisagg.policy.router.request_state import (
    END_PHASE,
    PHASE_OF_MARK,
    Failure,
    FailureKind,
    Recovery,
    RequestState,
    Waiting,
    build_start_prefill,
    recovery,
    set_deadline,
)
from jdisagg.policy.router.worker_view import WorkerState


class Aborts:
    def __init__(self, out: EffectBuffer, timeout_s: float, tries: int) -> None:
        self.out, self.timeout_s, self.tries = out, timeout_s, tries
        self._open: dict[str, tuple[WorkerId, Abort, int]] = {}  # by timer key: to whom, what, times sent

    def __len__(self) -> int:
        return len(self._open)

    def send(self, worker: WorkerId, attempt: Attempt, detail: str, now_s: float) -> None:
        self._send(_key(worker, attempt), worker, Abort(attempt, detail), 1, now_s)

    def acknowledged(self, worker: WorkerId, attempt: Attempt) -> None:
        self._open.pop(_key(worker, attempt), None)

    def timer(self, key: str, now_s: float) -> None:
        worker, abort, sent = self._open.pop(key, (None, None, 0))
        if worker is not None and abort is not None and sent < self.tries:
            self._send(key, worker, abort, sent + 1, now_s)

    def forget(self, worker: WorkerId) -> None:
        """A lost worker acknowledges nothing, and holds nothing."""
        for key in [key for key, (to, _, _) in self._open.items() if to == worker]:
            del self._open[key]

    def _send(self, key: str, worker: WorkerId, abort: Abort, sent: int, now_s: float) -> None:
        self._open[key] = (worker, abort, sent)
        self.out.send(worker, abort)
        self.out.put(SetTimer(now_s + self.timeout_s, key))


def _key(worker: WorkerId, attempt: Attempt) -> str:
    return f"abort/{worker}/{attempt.epoch}/{attempt.request_id}"


class RequestTable:
    """Every request that runs or waits. `peers` are the router's views of its workers."""

    def __init__(
        self, config: RouterConfig, peers: dict[WorkerId, WorkerState], routes: PairSelection, out: EffectBuffer
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

    def why_late(self, row: RequestState, now_s: float) -> SloMiss | None:
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
        set_deadline(self.out, row, waiting, deadline_s)

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
        """Moves a request to other workers without counting a failure."""
        natural = row.natural_end()
        if natural is not None:
            self.finish(row, natural, "", now_s)
        elif row.epoch:
            self._abort_attempt(row, why, now_s, None)
            self.enqueue(row, now_s)

    def gave_back(self, row: RequestState, detail: str, now_s: float) -> None:
        """Requeues a request that its decode worker preempted; not counted as a failure."""
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


class AttemptProgress:
    """Follows every request of the table; a word of an attempt that is over, or of somebody without a part, is void."""

    def __init__(self, config: RouterConfig, requests: RequestTable) -> None:
        self.config, self.requests = config, requests
        self.rows, self.peers, self.out, self.aborts = requests.rows, requests.peers, requests.out, requests.aborts

    def _row_of(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """Returns the request's state if it still runs and `sender` takes part in the attempt."""
        row = self.rows.get(attempt.request_id)
        ours = row is not None and row.epoch == attempt.epoch and sender in (row.prefill, row.decode)
        return row if ours else None

    def _begun_row(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """Returns the request's state if its prefill was ordered; else as `_row_of`."""
        row = self._row_of(sender, attempt)
        return None if row is None or row.phase is Phase.QUEUED else row

    def answered(self, sender: WorkerId, message: Reserved | Refused, now_s: float) -> None:
        attempt, held = message.attempt, isinstance(message, Reserved)
        if sender in self.peers:
            self.peers[sender].answered(attempt, held=held)
        row = self._row_of(sender, attempt)
        if row is None and held:  # it was asked for late
            self.aborts.send(sender, attempt, "nobody waits for this reservation any more", now_s)
        if row is None or row.waiting is not Waiting.ANSWER or sender != row.decode:
            return
        if isinstance(message, Reserved):
            self._found(row, sender, message.cached_pages)
            self._start(row, message, now_s)
        else:
            self.requests.enqueue(row, now_s)

    def follow(self, sender: WorkerId, message: Progress | Ended | Preempted, now_s: float) -> None:
        """Handles a report about an attempt; ignored if its prefill was not ordered."""
        row = self._begun_row(sender, message.attempt)
        if row is None:
            return
        match message:
            case Progress(mark=mark, at_s=at_s):
                row.mark(mark, at_s, message.wire_s)
                if mark is Mark.PREFILL_STARTED:
                    row.begun(message.cached_tokens)
                    self._found_by_prefill(row, sender, message.cached_tokens)
                if mark is Mark.COMMITTED and sender == row.decode and row.phase is not Phase.DECODING:
                    self.requests.routes.shipped(row, message.cached_tokens, message.wire_s)
                self._reach(row, PHASE_OF_MARK.get(mark, row.phase), now_s)
            case Ended():
                row.ended = message
                self._end_if_complete(row, sender, now_s)
            case Preempted():
                self.requests.gave_back(row, message.detail, now_s)

    def _found_by_prefill(self, row: RequestState, sender: WorkerId, cached_tokens: int) -> None:
        """Compares a prefill worker's cached tokens with the directory; a decode worker's were compared before."""
        if sender != row.decode and sender in self.peers:
            self._found(row, sender, cached_tokens // self.peers[sender].config.page_size)

    def _found(self, row: RequestState, sender: WorkerId, pages: int) -> None:
        """The worker has so many of the prompt's leading pages: whether that is what the directory says."""
        directory = self.requests.routes.directory
        if sender in self.peers and directory.follows(sender):
            config = self.peers[sender].config
            names = row.page_names(config.page_size)
            most = readable_pages(row.to_prefill(), config) if sender == row.prefill else len(names)
            directory.found(config, names[:most], pages * config.page_size)

    def drawn(self, sender: WorkerId, delta: TokenDelta, now_s: float) -> None:
        row = self._begun_row(sender, delta.attempt)
        if row is None:
            return
        self._reach(row, Phase.SHIPPING if delta.index == row.num_before else Phase.DECODING, now_s)
        if row.waiting is Waiting.TOKEN:
            row.deadline_s = now_s + self.config.stall_timeout_s  # the timer finds this out when it fires
        told = row.take(delta)
        if told.sampled:
            self.out.put(EmitTokens(told, sender))
            self._end_if_complete(row, sender, now_s)

    def _reach(self, row: RequestState, phase: Phase, now_s: float) -> None:
        """Moves a row on to `phase`, step by step; a word that says less than is known changes nothing."""
        if row.phase is Phase.PREFILLING and phase in (Phase.SHIPPING, Phase.DECODING):
            row.enter(Phase.SHIPPING)
            self._prefilled(row, now_s)
            self.requests.wait(row, Waiting.SHIP, now_s + self.config.handoff_timeout_s)
        if row.phase is Phase.SHIPPING and phase is Phase.DECODING:
            row.enter(Phase.DECODING)
            self.requests.wait(row, Waiting.TOKEN, now_s + self.config.stall_timeout_s)

    def _prefilled(self, row: RequestState, now_s: float) -> None:
        if row.prefill is None or row.prefill not in self.peers:
            return
        peer = self.peers[row.prefill]
        began = [at_ns for mark, at_ns in row.ledger.marks if mark is Mark.PREFILL_STARTED]
        tokens = peer.prefill_work.get(row.request_id, 0.0)
        if began and tokens:
            self.requests.routes.forecasts.drain.done(row.prefill, tokens, began[-1] / 1e9, now_s)
        peer.prefilled(row.request_id)

    def _end_if_complete(self, row: RequestState, sender: WorkerId, now_s: float) -> None:
        if row.ended is not None and len(row.output) >= row.ended.num_output:
            self.requests.finish(row, row.ended.reason, row.ended.detail, now_s, gone=sender)

    def aborted(self, sender: WorkerId, message: Abort, now_s: float) -> None:
        row = self._row_of(sender, message.attempt)
        if row is not None:
            kind = FailureKind.DECODE_GAVE_UP if sender == row.decode else FailureKind.PREFILL_GAVE_UP
            avoid = row.blamed(sender) if message.reason is FinishReason.TIMEOUT else sender
            self.requests.meet(row, Failure(kind, message.reason, message.detail, gone=sender, avoid=avoid), now_s)

    def _start(self, row: RequestState, reservation: Reserved, now_s: float) -> None:
        assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
        row.enter(Phase.PREFILLING)
        row.ledger.mark(Mark.RESERVED, now_s)
        decode = self.peers[row.decode].config
        apart = row.prefill != row.decode and row.prefill in self.peers
        holders = self.requests.routes.holders(self.peers[row.prefill].config, row) if apart else ()
        self.out.send(row.prefill, build_start_prefill(row, reservation, decode, self.config, holders))
        self.requests.wait(row, Waiting.PREFILL, now_s + self.config.prefill_timeout_s)
