"""The router: one actor that takes requests, pairs workers, reserves before it starts, and owns every deadline.

Its state is soft: the table of running requests and a view of each worker. Only it tells clients anything, so that
tokens come in order and once, and each request ends with exactly one `Finish` (or is answered by one `Reject`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import count

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    Cancel,
    ChangeRole,
    Effect,
    Event,
    Received,
    Reject,
    SetTimer,
    Submit,
    TermBegan,
    TimerFired,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    CacheChanged,
    CacheHeld,
    CacheWanted,
    Drawn,
    Ended,
    Joined,
    Kept,
    Left,
    Message,
    Preempted,
    Priced,
    Progress,
    Refused,
    Reserved,
    View,
)
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import order_of
from jdisagg.policy.router.admission import has_adapter_room, missing_phase, why_rejected
from jdisagg.policy.router.decisions import Decision, Verdict, unheard
from jdisagg.policy.router.membership import LEAVE_TIMER, Adoption, Membership
from jdisagg.policy.router.pair_selection import PairSelection
from jdisagg.policy.router.request_state import (
    FAILURE_OF_WAIT,
    Failure,
    RequestState,
    Waiting,
    build_reserve,
    check_deadline,
)
from jdisagg.policy.router.requests import AttemptProgress, RequestTable
from jdisagg.policy.router.routing import Pair
from jdisagg.policy.router.worker_view import WorkerState

CAPACITY_TIMER = "capacity"
EPOCHS_PER_TERM = 1 << 32  # attempts that a router may number before they meet those of the next term


class Router:
    """Takes `Submit`, `Cancel`, words of workers, timers and losses."""

    def __init__(
        self, config: RouterConfig, workers: Iterable[WorkerConfig], note: Callable[[Decision], None] = unheard
    ) -> None:
        """`note` is given every decision about whom a request goes to, for people: it must return at once."""
        self.config = config
        self.peers = {each.worker: WorkerState(each) for each in workers}
        self.routes = PairSelection(config, self.peers, note)
        self.out = EffectBuffer()
        self.requests = RequestTable(config, self.peers, self.routes, self.out)
        self.aborts = self.requests.aborts
        self.progress, self.adoption = AttemptProgress(config, self.requests), Adoption(self.requests)
        self._epochs = count(config.first_epoch)
        self._ask_anyway = False
        self._capacity_armed = False
        self.members = Membership(self.requests, config.first_epoch)
        for peer in self.peers.values():
            self.members.follow_cache(peer.config)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns the effects of an event at `now_s` (driver's clock, seconds), to be carried out in order."""
        match event:
            case Received(sender, message):
                self._hear(sender, message, now_s)
            case Submit():
                self._submit(event, now_s)
            case Cancel(request_id, reason):
                if request_id in self.rows:
                    self.requests.finish(self.rows[request_id], reason, "cancelled", now_s)
            case TimerFired(key):
                self._timer(key, now_s)
            case WorkerLost(worker):
                self.adoption.lose(worker)
                self.members.lose(worker, now_s)
            case WorkerLeaving(worker):
                self.members.leaving(worker)
            case WorkerJoined(config):
                self.members.join(config, now_s)
            case TermBegan(term):
                self._begin_term(term)
            case ChangeRole():
                self.members.change_role(event, now_s)
            case _:
                raise AssertionError(f"no router takes {event!r}")
        self._dispatch(now_s)
        for worker in self.routes.kept.to_ask():
            self.out.send(worker, CacheWanted())
        return self.out.drain()

    @property
    def rows(self) -> dict[RequestId, RequestState]:
        """Every request that runs or waits."""
        return self.requests.rows

    @property
    def queue(self) -> list[RequestState]:
        """Returns the requests that wait for a reservation, in order."""
        return self.requests.queue

    # ------------------------------------------------------------ from clients

    def _submit(self, event: Submit, now_s: float) -> None:
        request = event.request
        assert request.request_id not in self.rows, f"the id {request.request_id!r} is running"
        rejected = why_rejected(self.routes.by_role, len(self.queue), self.config)
        if rejected and not event.resumed:
            self.routes.refuse(request.request_id, Verdict.REJECTED, rejected, now_s)
            self.out.put(Reject(request.request_id, self.requests.retry_after_s, rejected))
            return
        row = RequestState(request, order_of(request), Ledger(), self._queue_deadline_s(request, now_s))
        late = None if event.resumed else self.requests.why_late(row, now_s)
        if late is not None:
            self.routes.refuse(request.request_id, Verdict.REJECTED, late.detail, now_s)
            self.out.put(Reject(request.request_id, late.retry_after_s, late.detail, objective=True))
            return
        row.ledger.mark(Mark.ARRIVED, now_s)
        if event.output:
            row.output.extend(event.output)
            self.adoption.resumed(row, now_s)
            return
        row.output.extend(request.beginning)  # as if it had been drawn by an earlier attempt
        self.requests.add(row)
        if event.resumed and request.request_id in self.adoption.kept:
            self.adoption.told(*self.adoption.kept.pop(request.request_id), now_s)
        else:
            self.members.refuse_if_never(row, now_s)

    def _queue_deadline_s(self, request: Request, now_s: float) -> float:
        if request.queue_deadline_s is not None:
            return request.queue_deadline_s
        return now_s + self.config.queue_timeout_s if self.config.queue_timeout_s else math.inf

    def _begin_term(self, term: int) -> None:
        """Numbers attempts and role changes above those of every router that led with a lower term."""
        self._epochs = count(term * EPOCHS_PER_TERM)
        self.members.number_changes_from(term * EPOCHS_PER_TERM)

    # ------------------------------------------------------------ to workers

    def _dispatch(self, now_s: float) -> None:
        """Asks for reservations in order; where the first in line finds none, nobody overtakes it."""
        while self.queue:
            row = self.queue[0]
            if not self._has_adapter_room(row):
                break
            pair = self.routes.choose(row, now_s, ask_anyway=self._ask_anyway)
            if pair is None:
                break
            del self.queue[0]
            self._reserve(row, pair, now_s)
        self._ask_anyway = False
        if self.queue and not self._capacity_armed:
            self._capacity_armed = True
            self.out.put(SetTimer(now_s + self.config.capacity_retry_s, CAPACITY_TIMER))

    def _has_adapter_room(self, row: RequestState) -> bool:
        """In the next step of whoever takes it; the line waits for that, so that nobody waits for ever."""
        running = (each.request for each in self.rows.values() if each.waiting is not Waiting.RESERVATION)
        return has_adapter_room(row.request, running, self.config.max_loras)

    def _reserve(self, row: RequestState, pair: Pair, now_s: float) -> None:
        request = row.to_prefill()
        row.epoch, row.num_before = next(self._epochs), len(row.output)
        row.prefill, row.decode = pair.prefill, pair.decode
        decode_tokens = request.sampling.max_tokens * self.config.decode_token_weight
        self.peers[pair.prefill].book(row.request_id, float(len(request.prompt)), 0.0)
        self.peers[pair.decode].book(row.request_id, 0.0, decode_tokens)
        decode = self.peers[pair.decode]
        decode.ask(row.attempt, request)
        holders = self.routes.holders(decode.config, row) if pair.prefill == pair.decode else ()
        self.out.send(pair.decode, build_reserve(row, decode.config, self.config, holders))
        row.ledger.mark(Mark.RESERVE_SENT, now_s)
        self.requests.wait(row, Waiting.ANSWER, now_s + self.config.handoff_timeout_s)

    # ------------------------------------------------------------ from workers

    def _hear(self, sender: WorkerId, message: Message, now_s: float) -> None:
        match message:
            case Drawn(deltas):
                for delta in deltas:
                    self.progress.drawn(sender, delta, now_s)
            case View():
                if sender in self.peers:
                    self.peers[sender].hear(message)
            case CacheHeld() | CacheChanged():
                if sender in self.peers:
                    self.routes.kept.hear(self.peers[sender].config, message)
            case Priced():
                self.routes.kept.hear_prices(sender, message)
            case Reserved() | Refused():
                self.progress.answered(sender, message, now_s)
            case Abort(attempt):
                self.out.send(sender, AbortAck(attempt))
                self.adoption.gave_up(sender, attempt)
                self.progress.aborted(sender, message, now_s)
            case AbortAck(attempt):
                self.aborts.acknowledged(sender, attempt)
            case Progress() | Ended() | Preempted():
                self.progress.follow(sender, message, now_s)
            case Kept():
                self.adoption.told(sender, message, now_s)
            case Left():
                self.members.left(sender, message, now_s)
            case Joined():
                self.members.joined(sender, message, now_s)
            case _:
                raise SenselessWord(f"{sender} says {type(message).__name__}, which is not for a router")

    # ------------------------------------------------------------ waits

    def _timer(self, key: str, now_s: float) -> None:
        kind, _, name = key.partition("/")
        if key == CAPACITY_TIMER:
            self._capacity_armed = False
            self._ask_anyway = True
        elif kind == "row":
            self._row_timer(self.rows.get(RequestId(name)), now_s)
        elif kind == LEAVE_TIMER:
            self.members.timer(WorkerId(name), now_s)
        else:
            self.aborts.timer(key, now_s)

    def _row_timer(self, row: RequestState | None, now_s: float) -> None:
        if row is None or not check_deadline(self.out, row, now_s):
            return
        detail = f"waited for {row.waiting} until its deadline"
        if row.waiting is Waiting.KEEPER:
            self.adoption.waited(row, now_s)
        elif row.waiting is Waiting.RESERVATION:
            missing = missing_phase(self.routes.by_role)
            why = f"; no worker is there for {missing}" if missing else ""
            self.requests.finish(row, FinishReason.TIMEOUT, detail + why, now_s)
        else:
            late = row.prefill if row.waiting is Waiting.PREFILL else row.decode
            self.requests.meet(
                row, Failure(FAILURE_OF_WAIT[row.waiting], FinishReason.TIMEOUT, detail, avoid=late), now_s
            )
