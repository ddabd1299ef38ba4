"""The worker of one mesh: an actor that takes events and returns effects. It reads no clock and touches no array.

Its prefill phase (`prefill.py`) and its decode phase (`decode.py`) share one page pool, and one scheduler
(`scheduler.py`) forms the steps of both. A colocated worker is the same actor with both phases in use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    ROUTER,
    Effect,
    EngineFailed,
    Event,
    KVArrived,
    Received,
    Reshaped,
    RouterFound,
    RouterLost,
    Send,
    StepDone,
    TimerFired,
    WiresTimed,
)
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Ack,
    Adopt,
    CacheWanted,
    Commit,
    FetchPages,
    Leave,
    Message,
    NoPages,
    Renew,
    Resend,
    Reserve,
    StartPrefill,
    View,
)
from jdisagg.core.request import Attempt, FinishReason, Sampled, WorkerId
from jdisagg.core.tiers import PagesFound, PagesMoved
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.page_pool import PagePool, PageState, SharedPages
from jdisagg.policy.cache.prefix_cache import CacheChangeLog
from jdisagg.policy.cache.tiers import Tiers
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.drain import DrainState, WorkerStatus
from jdisagg.policy.worker.handoff import Signal, Timer, owner_of_timer
from jdisagg.policy.worker.orphans import GRACE_TIMER, OrphanedSequences
from jdisagg.policy.worker.prefill import PrefillPhase
from jdisagg.policy.worker.scheduler import Scheduler


class Worker:
    """Owns the pages, the prompts, the reservations and its end of every handoff."""

    def __init__(self, config: WorkerConfig) -> None:
        self.drain_state, self.out = DrainState(), EffectBuffer()
        self._begin(config, None, count(1).__next__)

    def _begin(self, config: WorkerConfig, before: Tiers | None, new_step_id: Callable[[], int]) -> None:
        """Reinitialises the worker with `config`. Only KV in lower tiers (`before`) survives."""
        self.config = config
        self.shared = SharedPages(config, PagePool(config.num_pages))
        self.tiers = Tiers(config, self.shared, self.out) if before is None else before.follow(config, self.shared)
        self.decode = DecodePhase(config, self.shared, self.out, self.tiers)
        self.prefill = PrefillPhase(config, self.shared, self.out, self.decode, self.tiers)
        self.scheduler = Scheduler(config, self.decode, self.prefill, new_step_id)
        self.orphans = OrphanedSequences(config.router_grace_s, self.decode)
        self._sent_view: View | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns the effects of the event at `now_s`, seconds of the driver's clock, in the order to apply them."""
        resend_view = self._take(event, now_s)
        self.scheduler.dispatch_all(now_s)
        if not (isinstance(event, StepDone) and self._is_steady()):
            self._after_event(now_s, resend_view=resend_view)
        effects = self.out.drain()
        if self.config.router_grace_s:
            self.orphans.record(effects)
        return effects

    def _is_steady(self) -> bool:
        """Returns True if the step changed only token counts, so that the work after an event can be skipped."""
        quiet = self.decode.is_quiet and self.scheduler.is_repeating and not self.config.has_tiers
        return quiet and self.drain_state.status is WorkerStatus.SERVING

    def _after_event(self, now_s: float, *, resend_view: bool) -> None:
        """Runs demotions and sends changed state to the router."""
        if self.drain_state.status is WorkerStatus.SERVING:
            self.tiers.run_demotions(now_s)
        self.drain_state.after_event(self.out, idle=self.idle)
        view = self._view()
        if resend_view or view != self._sent_view:
            self._sent_view = view
            self.out.tell_router(view)
        for log in self._change_logs():
            if (delta := log.take_delta()) is not None:
                self.out.tell_router(delta)

    def _view(self) -> View:
        """Returns the worker's load as the router sees it."""
        decode, streaming = self.decode, self.prefill.sender.streaming
        return View(
            free_pages=decode.reservable_pages if self.config.role.decodes else self.shared.available,
            free_slots=max(0, decode.free_slots),
            waiting_tokens=self.prefill.waiting_tokens,
            running=decode.slots.num_taken,
            stream_tokens=0 if streaming is None else streaming.stream_tokens,
        )

    def _change_logs(self) -> tuple[CacheChangeLog, ...]:
        """Returns the change logs of HBM and of all lower tiers."""
        return self.shared.changes, *self.tiers.changes

    # ------------------------------------------------------------ events

    def _take(self, event: Event, now_s: float) -> bool:
        """Applies the event; returns True if the router needs the view again even if it is unchanged."""
        match event:
            case StepDone():
                self._on_step_done(event, now_s)
            case KVArrived():
                self.decode.on_kv_arrived(event, now_s)
            case Received(sender, message):
                self._on_message(sender, message, now_s)
                return isinstance(message, Reserve)
            case TimerFired(key) if key == GRACE_TIMER:
                self._on_grace_timer(now_s)
            case TimerFired(key):
                self._on_timer(*owner_of_timer(key), now_s)
            case EngineFailed():
                self._on_engine_failed(event, now_s)
            case WiresTimed(costs):
                self.prefill.sender.codecs.measured(costs)
            case PagesMoved():
                self.decode.on_fetched(self.tiers.moved(event, now_s), now_s)
            case PagesFound():
                self.tiers.found(event)
            case RouterLost():
                self._abort_all_except(self.orphans.on_router_lost(now_s))
                self.drain_state.on_router_lost()
                return True
            case RouterFound():
                self.orphans.on_router_found(now_s)
                return True
            case Reshaped(config, why):
                self._begin(config, self.tiers, self.scheduler.new_step_id)
                self.drain_state.on_reshaped(self.out, config, why)
                return True
            case _:
                raise AssertionError(f"no worker takes {event!r}")
        return False

    def _on_step_done(self, event: StepDone, now_s: float) -> None:
        """Takes a mixed step's rows before its chunks: a prompt that ends with it decodes from the next step on."""
        of_rows, of_chunks = self.decode.steps, self.prefill.steps
        self.decode.is_quiet = False
        assert event.step_id in of_rows or event.step_id in of_chunks, f"step {event.step_id} is not under way"
        if event.step_id in of_rows:
            self.decode.on_step_done(event, now_s)
        if event.step_id in of_chunks:
            self.prefill.on_step_done(event, now_s)
            self.decode.is_quiet = False

    def _on_message(self, sender: WorkerId, message: Message, now_s: float) -> None:
        if self.drain_state.refuse(self.out, message):
            return
        match message:
            case Leave():
                self.drain_state.on_leave(self.out, message, self.config)
                self._park_all()
            case Reserve():
                self.decode.reserve(message, now_s)
            case StartPrefill():
                self.prefill.start(message, now_s)
            case Commit():
                self.decode.on_commit(message, sender, now_s)
            case Ack():
                self.prefill.on_ack(message)
            case Resend():
                self.prefill.on_resend(message, sender, now_s)
            case Renew():
                self.decode.on_renew(message, sender, now_s)
            case Adopt():
                self.orphans.adopt(message)
            case Abort():
                self._on_abort(message, sender)
            case AbortAck():
                return  # this end is over already
            case FetchPages() | NoPages():
                answered = self.tiers.hear(message, sender, now_s, lends=self.drain_state.can_lend)
                self.decode.on_fetched(answered, now_s)
            case CacheWanted():
                for snapshot in [part for log in self._change_logs() for part in log.take_snapshot()]:
                    self.out.tell_router(snapshot)
            case _:
                raise SenselessWord(f"{sender} says {type(message).__name__}, which is not for a worker")

    def _on_timer(self, kind: Timer, owner: Attempt, now_s: float) -> None:
        match kind:
            case Timer.RENEW:
                self.prefill.renew_lease(owner, now_s)
            case Timer.FETCH:
                self.decode.on_fetched(self.tiers.fetches.expire(owner, now_s), now_s)
            case Timer.PARTS:
                self.decode.on_parts_late(owner, now_s)
            case _:
                self._expire(owner, now_s)

    def _on_engine_failed(self, event: EngineFailed, now_s: float) -> None:
        step, reason = event.step_id, f"{self.config.worker} failed: {event.reason}"
        if step in self.decode.steps:
            self.decode.on_step_failed(step, reason)
        if step in self.prefill.steps:
            self.prefill.on_step_failed(step, reason)
        if event.attempt is not None and event.part is not None:
            self._on_transfer_failed(event.attempt, event.part, reason, now_s)

    def _on_transfer_failed(self, owner: Attempt, part: int, reason: str, now_s: float) -> None:
        """Sends the part again; ends the attempt if that failed too often, or if the insert at this end failed."""
        if not self.prefill.on_ship_failed(owner, part, now_s) and self._end(owner, Signal.ABORT):
            self.out.abort(owner, reason)

    # ------------------------------------------------------------ ends

    def _end(self, owner: Attempt, signal: Signal, *, good: bool = False) -> bool:
        """Ends the attempt in both phases; returns True if there was one."""
        self.decode.forget(owner)
        has_ended = self.prefill.end(owner, signal)
        return self.decode.end(owner, signal, good=good) or has_ended

    def _on_abort(self, message: Abort, sender: WorkerId) -> None:
        """Releases what the handoff holds here; an abort by the other end is reported to the router at once."""
        owner = message.attempt
        cancelled = sender == ROUTER  # its KV is whole; a worker's abort may report a failure
        self.orphans.forget(owner)
        if cancelled and self.drain_state.status is WorkerStatus.LEAVING and owner in self.decode.sequences:
            self.decode.park(self.decode.sequences[owner])  # it resumes on another worker
        if self._end(owner, Signal.ABORT, good=cancelled) and not cancelled:
            self.out.abort(owner, f"{sender}: {message.detail}", message.reason)
        self.out.send(sender, AbortAck(owner))

    def _park_all(self) -> None:
        """Copies the KV of all sequences to the shared pool, from which other workers can resume them."""
        if self.config.shared_pool:
            for sequence in self.decode.sequences.values():
                self.decode.park(sequence)

    def _expire(self, owner: Attempt, now_s: float) -> None:
        """Ends the handoff whose deadline is over."""
        has_expired = self.prefill.expire(owner, now_s)
        if owner in self.prefill.sequences:
            self.decode.renew(owner, now_s)  # a colocated sequence whose prompt still waits or runs here
        if self.decode.expire(owner, now_s) or has_expired:
            self._end(owner, Signal.ABORT)
            detail = f"a deadline of the handoff ran out on {self.config.worker}"
            self.out.abort(owner, detail, FinishReason.TIMEOUT)

    def _abort_all_except(self, kept: set[Attempt]) -> None:
        """Ends all other attempts without a message, because there is no router; steps in flight are discarded."""
        for log in self._change_logs():
            log.stop()
        self.tiers.fetches.give_up_all()
        phases = self.prefill.sequences, self.decode.sequences, self.decode.awaiting_fetch
        for owner in [owner for phase in phases for owner in phase if owner not in kept]:
            self._end(owner, Signal.ABORT)
        for effect in self.out.drain():
            if not isinstance(effect, Send):
                self.out.put(effect)

    def _on_grace_timer(self, now_s: float) -> None:
        """Ends the orphaned sequences that no router has adopted in time."""
        for owner in self.orphans.expire(now_s):
            self._end(owner, Signal.ABORT, good=True)
            self.out.abort(owner, "no router has asked for it in time")

    # ------------------------------------------------------------ fast forward

    @property
    def repeatable_steps(self) -> int:
        """Number of steps that will end quietly: each only gives its sequences a token, until another event occurs."""
        return self.scheduler.repeatable_steps

    def end_repeated_steps(self, steps: int, sampled: Sampled) -> list[Effect]:
        """Ends as many of the `repeatable_steps`, each token `sampled`; returns the effects of that many `StepDone`s,
        with the tokens in one message, and of the steps dispatched since only those still in flight."""
        self.scheduler.repeat(steps, sampled)
        return self.out.drain()

    # ------------------------------------------------------------ invariants

    @property
    def idle(self) -> bool:
        """True if no attempt or fetch is held and no step is in flight."""
        busy = any(phase.sequences or phase.steps for phase in (self.prefill, self.decode))
        return not (busy or self.decode.awaiting_fetch or self.tiers.busy)

    def check_invariants(self) -> None:
        """Asserts that every page is counted once, and that exactly the living sequences and fetches own pages."""
        self.shared.check_invariants()
        self.tiers.check_invariants()
        listed = {owner: set(each.own_pages) for owner, each in self.decode.sequences.items() if each.own_pages}
        listed |= {owner: set(prompt.own) for owner, prompt in self.prefill.sequences.items() if prompt.own}
        listed |= self.tiers.fetches.pages_of()
        pool = self.shared.pool
        owned = {owner: pool.pages_of(owner) for owner in pool.owners() - pool.owners(PageState.CACHED)}
        assert owned == listed, f"the pool says {owned}, the sequences say {listed}"
