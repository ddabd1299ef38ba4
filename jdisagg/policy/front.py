"""The actor of a process that only serves clients: it forwards requests to a router and streams the replies.

It remembers the tokens that each client has received, so that streams survive a router: the next one sends the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    Cancel,
    Effect,
    EmitTokens,
    Event,
    Finish,
    Outcome,
    Reject,
    RouterFound,
    RouterLost,
    SetTimer,
    Submit,
    TimerFired,
    Told,
)
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Ask, Withdraw
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.policy.effect_buffer import EffectBuffer

FAR_ROUTER = WorkerId("the router")  # of another process; here ROUTER is this
GRACE_TIMER = "router"


@dataclass(slots=True)
class PendingRequest:
    """A client's request, and the tokens that its client has received."""

    request: Request
    output: list[int] = field(default_factory=list[int])
    is_resumed: bool = False  # a router that is gone had it


class RouterClient:
    """Forwards `Submit` and `Cancel` of clients to the router, and its replies (`Told`) to the clients."""

    def __init__(self, grace_s: float, retry_after_s: float = 1.0) -> None:
        """grace_s: seconds that requests wait for another router once theirs is gone."""
        self.grace_s, self.retry_after_s = grace_s, retry_after_s
        self.out = EffectBuffer()
        self.rows: dict[RequestId, PendingRequest] = {}
        self.linked = False
        self._until_s = 0.0  # how long the requests wait for a router
        self._alone = False  # that time is over

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns the effects of the event at `now_s`, seconds of the driver's clock, in the order to apply them."""
        match event:
            case Submit(request):
                self._submit(request, now_s)
            case Cancel(request_id, reason):
                self._cancel(request_id, reason, now_s)
            case Told(outcomes):
                for outcome in outcomes:
                    self._told(outcome)
            case RouterFound():
                self._found()
            case RouterLost():
                self._lost(now_s)
            case TimerFired() if not self.linked and now_s >= self._until_s:
                self._give_up(now_s)
            case TimerFired():
                pass
            case _:
                raise AssertionError(f"no front takes {event!r}")
        return self.out.drain()

    def _submit(self, request: Request, now_s: float) -> None:
        if self._alone:
            self.out.put(Reject(request.request_id, self.retry_after_s, "there is no router"))
            return
        self.rows[request.request_id] = PendingRequest(request)
        if self.linked:
            self._ask(self.rows[request.request_id])
        elif len(self.rows) == 1:
            self._wait(now_s)

    def _ask(self, row: PendingRequest) -> None:
        self.out.send(FAR_ROUTER, Ask(row.request, tuple(row.output), row.is_resumed))
        row.is_resumed = True

    def _cancel(self, request_id: RequestId, reason: FinishReason, now_s: float) -> None:
        if request_id not in self.rows:
            return
        if self.linked:
            self.out.send(FAR_ROUTER, Withdraw(request_id, reason))
        else:
            self._end(request_id, reason, "cancelled", now_s)

    def _told(self, outcome: Outcome) -> None:
        """Passes tokens on in order, none twice; raises SenselessWord if the router skips one."""
        row = self.rows.get(outcome.request_id)
        if row is None:
            return  # it ended here meanwhile
        if not isinstance(outcome, EmitTokens):
            del self.rows[outcome.request_id]
            self.out.put(outcome)
            return
        delta, known = outcome.delta, len(row.output)
        if delta.index > known:
            raise SenselessWord(f"token {delta.index} of {outcome.request_id!r}, where {known} are known")
        fresh = delta.sampled[known - delta.index :]
        if fresh:
            row.output.extend(each.token for each in fresh)
            self.out.put(replace(outcome, delta=replace(delta, index=known, sampled=fresh)))

    def _found(self) -> None:
        self.linked, self._alone = True, False
        for row in self.rows.values():
            self._ask(row)

    def _lost(self, now_s: float) -> None:
        self.linked = False
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        self._until_s = now_s + self.grace_s
        self.out.put(SetTimer(self._until_s, GRACE_TIMER))

    def _give_up(self, now_s: float) -> None:
        self._alone = True
        for request_id in [*self.rows]:
            self._end(request_id, FinishReason.ERROR, f"there was no router for {self.grace_s:g} s", now_s)

    def _end(self, request_id: RequestId, reason: FinishReason, detail: str, now_s: float) -> None:
        row, ledger = self.rows.pop(request_id), Ledger()
        ledger.mark(Mark.ARRIVED, row.request.arrival_s)
        ledger.mark(Mark.ENDED, now_s)
        self.out.put(Finish(request_id, reason, ledger, detail=detail))
