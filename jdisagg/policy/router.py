"""The router: one actor that takes requests, pairs workers, reserves before it starts, and owns every deadline.

Its state is soft: the table of running requests and a view of each worker. Only it tells clients anything, so that
tokens come in order and once, and each request ends with exactly one `Finish` (or is answered by one `Reject`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from itertools import count

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    Cancel,
    Effect,
    EmitTokens,
    Event,
    Received,
    Reject,
    SetTimer,
    Submit,
    TimerFired,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Drawn,
    Ended,
    Message,
    Preempted,
    Progress,
    Refused,
    Reserved,
    TokenDelta,
    View,
)
from jdisagg.core.request import Attempt, FinishReason, Phase, Request, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy import deadlines, message_builders
from jdisagg.policy.aborts import Aborts
from jdisagg.policy.admission import (
    could_ever_serve,
    may_be_served,
    missing_phase,
    retry_after_s,
    why_never,
    why_rejected,
)
from jdisagg.policy.decisions import Decision, Verdict, unheard
from jdisagg.policy.failures import Failure, FailureKind, Recovery, recovery
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.pair_selection import PairSelection
from jdisagg.policy.planning import order_of
from jdisagg.policy.request_state import END_PHASE, FAILURE_OF_WAIT, PHASE_OF_MARK, RequestState, Waiting
from jdisagg.policy.routing import Pair
from jdisagg.policy.worker_state import WorkerState

CAPACITY_TIMER = "capacity"


class Router:
    """Takes `Submit`, `Cancel`, words of workers, timers and losses."""

    def __init__(
        self, config: RouterConfig, workers: Iterable[WorkerConfig], note: Callable[[Decision], None] = unheard
    ) -> None:
        """`note` is given every decision about whom a request goes to, for people: it must return at once."""
        self.config = config
        self.peers = {each.worker: WorkerState(each) for each in workers}
        self.routes = PairSelection(config, self.peers, note)
        self.rows: dict[RequestId, RequestState] = {}
        self.queue: list[RequestState] = []  # rows that wait for a reservation, in order
        self.out = Outbox()
        self.aborts = Aborts(self.out, config.handoff_timeout_s, config.abort_tries)
        self._epochs = count(config.first_epoch)
        self._finish_gap_s, self._last_finish_s = 1.0, 0.0
        self._ask_anyway = False
        self._capacity_armed = False

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What follows from the event at `now_s`, seconds of the driver's clock; effects are to happen in order."""
        match event:
            case Received(sender, message):
                self._hear(sender, message, now_s)
            case Submit(request):
                self._submit(request, now_s)
            case Cancel(request_id, reason):
                if request_id in self.rows:
                    self._finish(self.rows[request_id], reason, "cancelled", now_s)
            case TimerFired(key):
                self._timer(key, now_s)
            case WorkerLost(worker):
                self._lose(worker, now_s)
            case WorkerLeaving(worker):
                if worker in self.peers:
                    self.peers[worker].leaving = True
            case WorkerJoined(config):
                self._join(config, now_s)
            case _:
                raise AssertionError(f"no router takes {event!r}")
        self._dispatch(now_s)
        return self.out.drain()

    # ------------------------------------------------------------ from clients

    def _submit(self, request: Request, now_s: float) -> None:
        assert request.request_id not in self.rows, f"the id {request.request_id!r} is running"
        peers, waiting = self.peers.values(), len(self.queue)
        rejected = why_rejected(peers, waiting, self.config)
        if rejected:
            self.routes.refuse(request.request_id, Verdict.REJECTED, rejected, now_s)
            self.out.put(Reject(request.request_id, retry_after_s(waiting, self._finish_gap_s), rejected))
            return
        row = RequestState(request, order_of(request), Ledger(), self._queue_deadline_s(request, now_s))
        row.ledger.mark(Mark.ARRIVED, now_s)
        self.rows[request.request_id] = row
        insort(self.queue, row, key=lambda each: each.order)
        self._wait(row, Waiting.RESERVATION, row.first_deadline_s)
        self._refuse_if_never(row, now_s)

    def _refuse_if_never(self, row: RequestState, now_s: float) -> None:
        peers = self.peers.values()
        if not may_be_served(peers, row.request, self.config):
            never = why_never(peers, row.request)
            self.routes.refuse(row.request_id, Verdict.NEVER, never, now_s)
            self._finish(row, FinishReason.ERROR, never, now_s)

    def _queue_deadline_s(self, request: Request, now_s: float) -> float:
        if request.queue_deadline_s is not None:
            return request.queue_deadline_s
        return now_s + self.config.queue_timeout_s if self.config.queue_timeout_s else math.inf

    # ------------------------------------------------------------ to workers

    def _dispatch(self, now_s: float) -> None:
        """Asks for reservations in order; where the first in line finds none, nobody overtakes it."""
        while self.queue:
            row = self.queue[0]
            pair = self.routes.choose(row, now_s, ask_anyway=self._ask_anyway)
            if pair is None:
                break
            del self.queue[0]
            self._reserve(row, pair, now_s)
        self._ask_anyway = False
        if self.queue and not self._capacity_armed:
            self._capacity_armed = True
            self.out.put(SetTimer(now_s + self.config.capacity_retry_s, CAPACITY_TIMER))

    def _reserve(self, row: RequestState, pair: Pair, now_s: float) -> None:
        request = row.to_prefill()
        row.epoch, row.num_before = next(self._epochs), len(row.output)
        row.prefill, row.decode = pair.prefill, pair.decode
        decode_tokens = request.sampling.max_tokens * self.config.decode_token_weight
        self.peers[pair.prefill].book(row.request_id, float(len(request.prompt)), 0.0)
        self.peers[pair.decode].book(row.request_id, 0.0, decode_tokens)
        self.peers[pair.decode].ask(row.attempt, request)
        self.out.send(pair.decode, message_builders.reserve(row, self.config))
        row.ledger.mark(Mark.RESERVE_SENT, now_s)
        self._wait(row, Waiting.ANSWER, now_s + self.config.handoff_timeout_s)

    def _start(self, row: RequestState, reservation: Reserved, now_s: float) -> None:
        assert row.prefill is not None, "a reserved row has its pair"
        row.enter(Phase.PREFILLING)
        row.ledger.mark(Mark.RESERVED, now_s)
        self.out.send(row.prefill, message_builders.start_prefill(row, reservation, self.config))
        self._wait(row, Waiting.PREFILL, now_s + self.config.prefill_timeout_s)

    # ------------------------------------------------------------ from workers

    def _hear(self, sender: WorkerId, message: Message, now_s: float) -> None:
        match message:
            case Drawn(deltas):
                for delta in deltas:
                    self._drawn(sender, delta, now_s)
            case View():
                if sender in self.peers:
                    self.peers[sender].hear(message)
            case Reserved() | Refused():
                self._answered(sender, message, now_s)
            case Abort(attempt):
                self.out.send(sender, AbortAck(attempt))
                self._aborted(sender, message, now_s)
            case AbortAck(attempt):
                self.aborts.acknowledged(sender, attempt)
            case Progress() | Ended() | Preempted():
                row = self._begun_row(sender, message.attempt)
                if row is not None:
                    self._follow(row, sender, message, now_s)
            case _:
                raise SenselessWord(f"{sender} says {type(message).__name__}, which is not for a router")

    def _row_of(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """Its row, where it runs still and `sender` has a part in it."""
        row = self.rows.get(attempt.request_id)
        ours = row is not None and row.epoch == attempt.epoch and sender in (row.prefill, row.decode)
        return row if ours else None

    def _begun_row(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """As `_row_of`, where its prefill was ordered: of what nobody has begun there is nothing to say."""
        row = self._row_of(sender, attempt)
        return None if row is None or row.phase is Phase.QUEUED else row

    def _answered(self, sender: WorkerId, message: Reserved | Refused, now_s: float) -> None:
        attempt, held = message.attempt, isinstance(message, Reserved)
        if sender in self.peers:
            self.peers[sender].answered(attempt, held=held)
        row = self._row_of(sender, attempt)
        if row is None and held:  # it was asked for late
            self.aborts.send(sender, attempt, "nobody waits for this reservation any more", now_s)
        if row is None or row.waiting is not Waiting.ANSWER or sender != row.decode:
            return
        if isinstance(message, Reserved):
            self._start(row, message, now_s)
        else:
            self._enqueue(row, now_s)

    def _follow(self, row: RequestState, sender: WorkerId, message: Progress | Ended | Preempted, now_s: float) -> None:
        match message:
            case Progress(mark=mark, at_s=at_s):
                row.mark(mark, at_s, message.wire_s)
                if mark is Mark.PREFILL_STARTED:
                    row.begun(message.cached_tokens)
                self._reach(row, PHASE_OF_MARK.get(mark, row.phase), now_s)
            case Ended():
                row.ended = message
                self._end_if_complete(row, sender, now_s)
            case Preempted():
                self._enqueue(row, now_s)

    def _drawn(self, sender: WorkerId, delta: TokenDelta, now_s: float) -> None:
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
            self._prefilled(row)
            self._wait(row, Waiting.SHIP, now_s + self.config.handoff_timeout_s)
        if row.phase is Phase.SHIPPING and phase is Phase.DECODING:
            row.enter(Phase.DECODING)
            self._wait(row, Waiting.TOKEN, now_s + self.config.stall_timeout_s)

    def _prefilled(self, row: RequestState) -> None:
        if row.prefill is not None and row.prefill in self.peers:
            self.peers[row.prefill].prefilled(row.request_id)

    def _end_if_complete(self, row: RequestState, sender: WorkerId, now_s: float) -> None:
        if row.ended is not None and len(row.output) >= row.ended.num_output:
            self._finish(row, row.ended.reason, row.ended.detail, now_s, gone=sender)

    def _aborted(self, sender: WorkerId, message: Abort, now_s: float) -> None:
        row = self._row_of(sender, message.attempt)
        if row is not None:
            kind = FailureKind.DECODE_GAVE_UP if sender == row.decode else FailureKind.PREFILL_GAVE_UP
            avoid = row.blamed(sender) if message.reason is FinishReason.TIMEOUT else sender
            self._meet(row, Failure(kind, message.reason, message.detail, gone=sender, avoid=avoid), now_s)

    # ------------------------------------------------------------ waits

    def _wait(self, row: RequestState, waiting: Waiting, deadline_s: float) -> None:
        deadlines.wait(self.out, row, waiting, deadline_s)

    def _timer(self, key: str, now_s: float) -> None:
        kind, _, name = key.partition("/")
        if key == CAPACITY_TIMER:
            self._capacity_armed = False
            self._ask_anyway = True
        elif kind == "row":
            self._row_timer(self.rows.get(RequestId(name)), now_s)
        else:
            self.aborts.timer(key, now_s)

    def _row_timer(self, row: RequestState | None, now_s: float) -> None:
        if row is None or not deadlines.runs_out(self.out, row, now_s):
            return
        detail = f"waited for {row.waiting} until its deadline"
        if row.waiting is Waiting.RESERVATION:
            missing = missing_phase(self.peers.values())
            why = f"; no worker is there for {missing}" if missing else ""
            self._finish(row, FinishReason.TIMEOUT, detail + why, now_s)
        else:
            late = row.prefill if row.waiting is Waiting.PREFILL else row.decode
            self._meet(row, Failure(FAILURE_OF_WAIT[row.waiting], FinishReason.TIMEOUT, detail, avoid=late), now_s)

    # ------------------------------------------------------------ failures and ends

    def _join(self, config: WorkerConfig, now_s: float) -> None:
        """Who waited for a phase to have a worker, and was never tried, learns now whether it fits."""
        self.peers[config.worker] = WorkerState(config)
        self.routes.joined()
        for row in [each for each in self.queue if not (each.failures or each.output)]:
            self._refuse_if_never(row, now_s)

    def _lose(self, worker: WorkerId, now_s: float) -> None:
        self.peers.pop(worker, None)
        self.aborts.forget(worker)
        self.routes.forget(worker)
        for row in list(self.rows.values()):
            if worker in (row.prefill, row.decode):
                kind = FailureKind.DECODE_LOST if row.decode == worker else FailureKind.PREFILL_LOST
                self._meet(row, Failure(kind, FinishReason.ERROR, f"worker {worker} was lost", gone=worker), now_s)
        for row in [] if self.config.workers_return else list(self.queue):
            if not could_ever_serve(self.peers.values(), row.to_prefill()):
                self._finish(row, FinishReason.ERROR, f"worker {worker} was lost and no other can do its work", now_s)

    def _meet(self, row: RequestState, failure: Failure, now_s: float) -> None:
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
            self._finish(row, natural, "", now_s, gone=failure.gone)
        elif row.failures > self.config.max_retries:
            self._finish(row, failure.reason, f"{failure.detail} (attempt {row.failures})", now_s, gone=failure.gone)
        else:
            self._abort_attempt(row, failure.detail, now_s, failure.gone)
            self._enqueue(row, now_s)

    def _enqueue(self, row: RequestState, now_s: float) -> None:
        """Back to the line, at the place of its arrival; one that never left it keeps its deadline."""
        self._release(row)
        row.leave_workers()
        deadline_s = row.first_deadline_s
        if row.phase is not Phase.QUEUED:
            row.enter(Phase.QUEUED)
            row.ledger.mark(Mark.REQUEUED, now_s)
            deadline_s = now_s + (self.config.queue_timeout_s or math.inf)
        insort(self.queue, row, key=lambda each: each.order)
        self._wait(row, Waiting.RESERVATION, deadline_s)

    def _release(self, row: RequestState) -> None:
        for worker in {row.prefill, row.decode}:
            peer = self.peers.get(worker) if worker is not None else None
            if peer is not None:
                peer.release(row.request_id)
                peer.unanswered.pop(row.attempt, None)

    def _abort_attempt(self, row: RequestState, detail: str, now_s: float, gone: WorkerId | None) -> None:
        """Tells every worker that still holds something of the attempt; `gone` holds nothing any more."""
        holders = {row.decode}
        if row.phase in (Phase.PREFILLING, Phase.SHIPPING):
            holders.add(row.prefill)
        for worker in sorted(each for each in holders if each is not None and each != gone and each in self.peers):
            self.aborts.send(worker, row.attempt, detail, now_s)

    def _finish(
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
