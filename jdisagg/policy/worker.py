"""One mesh's worker: an actor that takes events and returns what is to happen. It reads no clock and touches no array.

Its prefill side is `prompts.py`, its decode side `beds.py`; both share one page pool. A colocated worker is the same
actor with both sides in use.
"""

from __future__ import annotations

from itertools import count

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    ROUTER,
    DecodeDone,
    Effect,
    EngineFailed,
    Event,
    KVArrived,
    PrefillDone,
    Received,
    RouterLost,
    Send,
    TimerFired,
    WiresTimed,
)
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Ack,
    Commit,
    Message,
    Renew,
    Resend,
    Reserve,
    StartPrefill,
    View,
)
from jdisagg.core.plans import DecodePlan
from jdisagg.core.request import FinishReason, Sampled, WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.beds import Beds, HeldPrefix, no_prefix
from jdisagg.policy.handoff import Signal, Timer, owner_of_timer
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import Owner, PagePool, PageState
from jdisagg.policy.prompts import Prompts
from jdisagg.policy.steady import next_plans, quiet_turns, repeat


class Worker:
    """Owns its pool, its prompts, its beds, and its side of every handoff."""

    def __init__(self, config: WorkerConfig, held_prefix: HeldPrefix = no_prefix) -> None:
        """`held_prefix` says which pages hold the KV of a prompt's first tokens already: they are nobody's to fill."""
        plan_ids = count(1)
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.out = Outbox()
        self.beds = Beds(config, self.pool, self.out, plan_ids.__next__, held_prefix)
        self.prompts = Prompts(config, self.pool, self.out, self.beds, plan_ids.__next__)
        self._turns_since_prefill = 0
        self._told_view: View | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What follows from the event at `now_s`, seconds of the driver's clock; effects are to happen in order."""
        refused = self._take(event, now_s)
        self._plan(now_s)
        self._tell_view(again=refused)
        return self.out.drain()

    def _take(self, event: Event, now_s: float) -> bool:
        """Books the event; whether the router must hear the view again."""
        match event:
            case DecodeDone():
                self.beds.decode_done(event, now_s)
            case PrefillDone():
                self.prompts.prefill_done(event, now_s)
            case KVArrived():
                self.beds.arrive(event, now_s)
            case Received(sender, message):
                self._hear(sender, message, now_s)
                return isinstance(message, Reserve)
            case TimerFired(key):
                self._timer(*owner_of_timer(key), now_s)
            case EngineFailed():
                self._engine_failed(event, now_s)
            case WiresTimed(costs):
                self.prompts.wires.measured(costs)
            case RouterLost():
                self._give_up_all()
                return True
            case _:
                raise AssertionError(f"no worker takes {event!r}")
        return False

    def _hear(self, sender: WorkerId, message: Message, now_s: float) -> None:
        match message:
            case Reserve():
                self.beds.reserve(message, now_s)
            case StartPrefill():
                self.prompts.start(message, now_s)
            case Commit():
                self.beds.commit(message, sender, now_s)
            case Ack():
                self.prompts.acknowledged(message)
            case Resend():
                self.prompts.resend(message, sender, now_s)
            case Renew():
                self.beds.renew(message, sender, now_s)
            case Abort():
                self._aborted(message, sender)
            case AbortAck():
                return  # this end is gone already
            case _:
                raise SenselessWord(f"{sender} says {type(message).__name__}, which is not for a worker")

    def _end(self, owner: Owner, signal: Signal) -> bool:
        prompt_ended = self.prompts.end(owner, signal)
        return self.beds.end(owner, signal) or prompt_ended

    def _aborted(self, message: Abort, sender: WorkerId) -> None:
        """Gives back what the handoff holds here. Where the other end says so, the router is to know at once."""
        owner = Owner(message.handoff, message.epoch)
        if self._end(owner, Signal.ABORT) and sender != ROUTER:
            self.out.abort(owner, f"{sender}: {message.detail}", message.reason)
        self.out.send(sender, AbortAck(*owner))

    def _timer(self, kind: Timer, owner: Owner, now_s: float) -> None:
        match kind:
            case Timer.RENEW:
                self.prompts.beat(owner, now_s)
            case Timer.PARTS:
                self.beds.parts_late(owner, now_s)
            case _:
                self._expire(owner, now_s)

    def _expire(self, owner: Owner, now_s: float) -> None:
        gone = self.prompts.expire(owner, now_s)
        if owner in self.prompts.prompts:
            self.beds.keep(owner, now_s)  # a colocated bed, whose prompt still waits or runs here
        if self.beds.expire(owner, now_s) or gone:
            self._end(owner, Signal.ABORT)
            detail = f"a deadline of the handoff ran out on {self.config.worker}"
            self.out.abort(owner, detail, FinishReason.TIMEOUT)

    def _engine_failed(self, event: EngineFailed, now_s: float) -> None:
        reason = f"{self.config.worker} failed: {event.reason}"
        if event.plan_id in self.prompts.plans:
            self.prompts.plan_failed(event.plan_id, reason)
        elif event.plan_id in self.beds.turns:
            self.beds.turn_failed(event.plan_id, reason)
        elif event.handoff is not None and event.epoch is not None and event.part is not None:
            self._transfer_failed(Owner(event.handoff, event.epoch), event.part, reason, now_s)

    def _transfer_failed(self, owner: Owner, part: int, reason: str, now_s: float) -> None:
        """At the source it is shipped again; where that is no use, or it was the insert that failed, it ends."""
        if not self.prompts.ship_failed(owner, part, now_s) and self._end(owner, Signal.ABORT):
            self.out.abort(owner, reason)

    def _give_up_all(self) -> None:
        """Ends every handoff and sequence, so that pages come back; plans in flight find their sequences over."""
        for owner in [*self.prompts.prompts, *self.beds.beds]:
            self._end(owner, Signal.ABORT)
        for effect in self.out.drain():
            if not isinstance(effect, Send):  # there is nobody to tell
                self.out.put(effect)

    # ------------------------------------------------------------ turns that repeat

    @property
    def quiet_turns(self) -> int:
        """Turns whose ends are foreseen: each only gives its sequences a token, until another event comes."""
        busy_with_prompts = self.prompts.waiting_tokens or self.prompts.plans
        return 0 if busy_with_prompts else quiet_turns(self.beds)

    def next_quiet_plans(self) -> tuple[DecodePlan, ...]:
        """One round of them, without plan ids."""
        return next_plans(self.beds)

    def end_quiet_turns(self, turns: int, sampled: Sampled) -> list[Effect]:
        """What follows when as many of the `quiet_turns` have ended, each token `sampled`: as from their `DecodeDone`s,
        but the tokens in one word, and of the turns dispatched meanwhile only those still in flight."""
        repeat(self.beds, turns, sampled)
        self._turns_since_prefill += turns
        return self.out.drain()

    # ------------------------------------------------------------ plans

    def _plan(self, now_s: float) -> None:
        """Dispatches all that may be dispatched: turns and chunks take turns, so that neither starves the other."""
        self.beds.seat_ready()
        while self._plan_one(now_s):
            self.beds.seat_ready()

    def _plan_one(self, now_s: float) -> bool:
        if self._prefill_is_due() and self.prompts.plan(now_s):
            self._turns_since_prefill = 0
            return True
        if self.beds.plan_turn():
            self._turns_since_prefill += 1
            return True
        nothing_else = not self.beds.turns  # every sequence waits for pages that only prompts can free
        return nothing_else and self.prompts.plan(now_s)

    def _prefill_is_due(self) -> bool:
        turns = self.config.decode_turns_per_prefill * self.beds.slots.busy_microbatches
        return self._turns_since_prefill >= turns

    def _look(self) -> View:
        free_pages = self.beds.reservable_pages if self.config.role.decodes else self.pool.free_pages
        streaming = self.prompts.streaming
        return View(
            free_pages=free_pages,
            free_slots=max(0, self.beds.free_slots),
            waiting_tokens=self.prompts.waiting_tokens,
            running=self.beds.slots.num_taken,
            stream_tokens=0 if streaming is None else streaming.stream_tokens,
        )

    def _tell_view(self, *, again: bool) -> None:
        view = self._look()
        if again or view != self._told_view:
            self._told_view = view
            self.out.tell_router(view)

    # ------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Asserts that every page is booked once, and that whoever owns pages is alive and lists just those."""
        self.pool.check_invariants()
        listed = {owner: set(bed.own_pages) for owner, bed in self.beds.beds.items() if bed.own_pages}
        listed |= {owner: set(prompt.pages) for owner, prompt in self.prompts.prompts.items() if prompt.pages}
        owned = {owner: self.pool.pages_of(owner) for owner in self.pool.owners() - self.pool.owners(PageState.CACHED)}
        assert owned == listed, f"the pool says {owned}, the sequences say {listed}"

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is held."""
        return not (self.prompts.prompts or self.prompts.plans or self.beds.beds or self.beds.turns)
