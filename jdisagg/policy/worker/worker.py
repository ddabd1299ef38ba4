"""One mesh's worker: an actor that takes events and returns what is to happen. It reads no clock and touches no array.

Its prefill side is `prefill_side.py`, its decode side `decode_side.py`; both share one page pool, and one
`scheduler.py` forms the steps. A colocated worker is the same actor with both sides in use.
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
from jdisagg.policy.worker.decode import DecodePhase, KVArrivals, Reservations, StepResults
from jdisagg.policy.worker.drain import DrainState, WorkerStatus
from jdisagg.policy.worker.handoff import Signal, Timer, owner_of_timer
from jdisagg.policy.worker.orphans import GRACE_TIMER, OrphanedSequences
from jdisagg.policy.worker.prefill import PrefillPhase
from jdisagg.policy.worker.scheduler import Scheduler, repeat, repeatable_steps


class Worker:
    """Owns its pool, its prompts, its reservations, and its side of every handoff."""

    def __init__(self, config: WorkerConfig) -> None:
        self.leaving, self.out = DrainState(), EffectBuffer()
        self._begin(config, None, count(1).__next__)

    def _begin(self, config: WorkerConfig, before: Tiers | None, new_step_id: Callable[[], int]) -> None:
        """It is this, and holds nothing but what tiers below HBM kept `before`."""
        self.config = config
        self.shared = SharedPages(config, PagePool(config.num_pages))
        tiers = Tiers(config, self.shared, self.out) if before is None else before.follow(config, self.shared)
        self.decode_side = DecodePhase(config, self.shared, self.out)
        self.reservations = Reservations(self.decode_side, tiers)
        self.arrivals, self.results = KVArrivals(self.decode_side), StepResults(self.decode_side)
        self.prefill_side = PrefillPhase(config, self.shared, self.out, self.decode_side, tiers)
        self.scheduler = Scheduler(config, self.decode_side, self.prefill_side, self.out, new_step_id)
        self.keeping = OrphanedSequences(config.router_grace_s, self.decode_side, self.out)
        self._told_view: View | None = None

    @property
    def pool(self) -> PagePool:
        return self.shared.pool

    @property
    def tiers(self) -> Tiers:
        return self.reservations.tiers

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What follows from the event at `now_s`, seconds of the driver's clock; effects are to happen in order."""
        refused = self._take(event, now_s)
        self.scheduler.dispatch_all(now_s)
        if not (isinstance(event, StepDone) and only_goes_on(self)):
            self._look_round(now_s, refused=refused)
        return self.keeping.noted(self.out.drain())

    def _look_round(self, now_s: float, *, refused: bool) -> None:
        """Whoever waits for what may have come free gets it, and whoever is to know of it is told."""
        if self.leaving.standing is WorkerStatus.SERVING:
            self.tiers.tend(now_s)
        self.leaving.look(self.out, idle=self.idle)
        self._tell_view(again=refused)
        tell_changes(self)

    def _take(self, event: Event, now_s: float) -> bool:
        """Books the event; whether the router must hear the view again."""
        match event:
            case StepDone():
                self._step_done(event, now_s)
            case KVArrived():
                self.arrivals.arrive(event, now_s)
            case Received(sender, message):
                self._hear(sender, message, now_s)
                return isinstance(message, Reserve)
            case TimerFired(key) if key == GRACE_TIMER:
                give_up_late(self, now_s)
            case TimerFired(key):
                self._timer(*owner_of_timer(key), now_s)
            case EngineFailed():
                self._engine_failed(event, now_s)
            case WiresTimed(costs):
                self.prefill_side.shipping.wires.measured(costs)
            case PagesMoved():
                self.reservations.all_fetched(self.tiers.moved(event, now_s), now_s)
            case PagesFound():
                self.tiers.found(event)
            case RouterLost():
                give_up_but(self, self.keeping.router_lost(now_s))
                self.leaving.router_lost()
                return True
            case RouterFound():
                self.keeping.router_found(now_s)
                return True
            case Reshaped(config, why):
                self._begin(config, self.tiers, self.scheduler.new_step_id)
                self.leaving.reshaped(self.out, config, why)
                return True
            case _:
                raise AssertionError(f"no worker takes {event!r}")
        return False

    def _step_done(self, event: StepDone, now_s: float) -> None:
        """A mixed step's rows first: a prompt that ends with it takes part in the next step."""
        of_rows, of_chunks = self.decode_side.steps, self.prefill_side.steps
        self.results.quiet = False
        assert event.step_id in of_rows or event.step_id in of_chunks, f"step {event.step_id} is not under way"
        if event.step_id in of_rows:
            self.results.done(event, now_s)
        if event.step_id in of_chunks:
            self.prefill_side.step_done(event, now_s)
            self.results.quiet = False

    def _hear(self, sender: WorkerId, message: Message, now_s: float) -> None:
        if self.leaving.refuses(self.out, message):
            return
        match message:
            case Leave():
                self.leaving.asked(self.out, message, self.config)
                park_all(self)
            case Reserve():
                self.reservations.reserve(message, now_s)
            case StartPrefill():
                self.prefill_side.start(message, now_s)
            case Commit():
                self.arrivals.commit(message, sender, now_s)
            case Ack():
                self.prefill_side.acknowledged(message)
            case Resend():
                self.prefill_side.resend(message, sender, now_s)
            case Renew():
                self.arrivals.renew(message, sender, now_s)
            case Adopt():
                self.keeping.adopt(message)
            case Abort():
                aborted(self, message, sender)
            case AbortAck():
                return  # this end is gone already
            case FetchPages() | NoPages():
                self.reservations.all_fetched(self.tiers.hear(message, sender, now_s, lends=self.leaving.lends), now_s)
            case CacheWanted():
                for part in [part for changes in changes_of(self) for part in changes.all_of_it()]:
                    self.out.tell_router(part)
            case _:
                raise SenselessWord(f"{sender} says {type(message).__name__}, which is not for a worker")

    def end(self, owner: Attempt, signal: Signal, *, good: bool = False) -> bool:
        self.reservations.forget(owner)
        prompt_ended = self.prefill_side.end(owner, signal)
        return self.decode_side.end(owner, signal, good=good) or prompt_ended

    def _timer(self, kind: Timer, owner: Attempt, now_s: float) -> None:
        match kind:
            case Timer.RENEW:
                self.prefill_side.beat(owner, now_s)
            case Timer.FETCH:
                self.reservations.all_fetched(self.tiers.fetches.expire(owner, now_s), now_s)
            case Timer.PARTS:
                self.arrivals.parts_late(owner, now_s)
            case _:
                expire(self, owner, now_s)

    def _engine_failed(self, event: EngineFailed, now_s: float) -> None:
        step, reason = event.step_id, f"{self.config.worker} failed: {event.reason}"
        if step in self.decode_side.steps:
            self.results.failed(step, reason)
        if step in self.prefill_side.steps:
            self.prefill_side.step_failed(step, reason)
        if event.attempt is not None and event.part is not None:
            self._transfer_failed(event.attempt, event.part, reason, now_s)

    def _transfer_failed(self, owner: Attempt, part: int, reason: str, now_s: float) -> None:
        """At the source it is shipped again; where that is no use, or it was the insert that failed, it ends."""
        if not self.prefill_side.ship_failed(owner, part, now_s) and self.end(owner, Signal.ABORT):
            self.out.abort(owner, reason)

    # ------------------------------------------------------------ steps that repeat

    @property
    def repeatable_steps(self) -> int:
        """Steps whose ends are foreseen: each only gives its sequences a token, until another event comes."""
        busy_with_prompts = self.prefill_side.waiting.tokens or self.prefill_side.steps
        return 0 if busy_with_prompts else repeatable_steps(self.decode_side)

    def end_repeated_steps(self, steps: int, sampled: Sampled) -> list[Effect]:
        """What follows when as many of the `repeatable_steps` have ended, each token `sampled`: as from their
        `StepDone`s, but the tokens in one word, and of the steps dispatched meanwhile only those still in flight."""
        repeat(self.decode_side, steps, sampled, self.scheduler.new_step_id)
        self.scheduler.steps_since_chunk += steps
        return self.out.drain()

    # ------------------------------------------------------------ what the router sees

    def _tell_view(self, *, again: bool) -> None:
        view = view_of(self.prefill_side, self.reservations)
        if again or view != self._told_view:
            self._told_view = view
            self.out.tell_router(view)

    # ------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Asserts that every page is booked once, and that whoever owns pages is alive and lists just those."""
        self.shared.check_invariants()
        check_owners(self.pool, self.decode_side, self.prefill_side, self.tiers)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is held."""
        busy = any(side.sequences or side.steps for side in (self.prefill_side, self.decode_side))
        return not (busy or self.reservations.waiting or self.tiers.busy)


def only_goes_on(worker: Worker) -> bool:
    """After the end of a step: it gave tokens, the next one is as the last, and so is all that depends on more."""
    quiet = worker.results.quiet and worker.scheduler.repeats and not worker.config.has_tiers
    return quiet and worker.leaving.standing is WorkerStatus.SERVING


def changes_of(worker: Worker) -> tuple[CacheChangeLog, ...]:
    """Of all its tiers."""
    return worker.shared.changes, *worker.tiers.changes


def tell_changes(worker: Worker) -> None:
    """To the router: of what is kept, as far as that follows it."""
    for changed in filter(None, [changes.since_told() for changes in changes_of(worker)]):
        worker.out.tell_router(changed)


def aborted(worker: Worker, message: Abort, sender: WorkerId) -> None:
    """Gives back what the handoff holds here. Where the other end says so, the router is to know at once."""
    owner = message.attempt
    cancelled = sender == ROUTER  # what it had is whole; another's abort may tell of a failure
    worker.keeping.aborted(owner)
    if cancelled and worker.leaving.standing is WorkerStatus.LEAVING and owner in worker.decode_side.sequences:
        worker.decode_side.park(worker.decode_side.sequences[owner])  # it goes on elsewhere
    if worker.end(owner, Signal.ABORT, good=cancelled) and not cancelled:
        worker.out.abort(owner, f"{sender}: {message.detail}", message.reason)
    worker.out.send(sender, AbortAck(owner))


def park_all(worker: Worker) -> None:
    """It is to leave: what others may fetch from the pool, they need not compute if this is recalled."""
    if worker.config.shared_pool:
        for sequence in worker.decode_side.sequences.values():
            worker.decode_side.park(sequence)


def expire(worker: Worker, owner: Attempt, now_s: float) -> None:
    """A deadline of a handoff is due."""
    gone = worker.prefill_side.expire(owner, now_s)
    if owner in worker.prefill_side.sequences:
        worker.decode_side.keep(owner, now_s)  # a colocated sequence, whose prompt still waits or runs here
    if worker.decode_side.expire(owner, now_s) or gone:
        worker.end(owner, Signal.ABORT)
        detail = f"a deadline of the handoff ran out on {worker.config.worker}"
        worker.out.abort(owner, detail, FinishReason.TIMEOUT)


def give_up_but(worker: Worker, kept: set[Attempt]) -> None:
    """Ends other handoffs and sequences, so that pages come back; plans in flight find their sequences over."""
    for changes in changes_of(worker):
        changes.stop()
    worker.tiers.fetches.give_up_all()
    sides = worker.prefill_side.sequences, worker.decode_side.sequences, worker.reservations.waiting
    for owner in [owner for side in sides for owner in side if owner not in kept]:
        worker.end(owner, Signal.ABORT)
    for effect in worker.out.drain():
        if not isinstance(effect, Send):  # there is nobody to tell
            worker.out.put(effect)


def give_up_late(worker: Worker, now_s: float) -> None:
    """Ends what was kept for a router that did not come."""
    for owner in worker.keeping.run_out(now_s):
        worker.end(owner, Signal.ABORT, good=True)
        worker.out.abort(owner, "no router has asked for it in time")


def check_owners(pool: PagePool, decode_side: DecodePhase, prefill_side: PrefillPhase, tiers: Tiers) -> None:
    """Asserts that the pool's owners of pages are those sequences and fetches that list just these."""
    listed = {owner: set(each.own_pages) for owner, each in decode_side.sequences.items() if each.own_pages}
    listed |= {owner: set(prompt.own) for owner, prompt in prefill_side.sequences.items() if prompt.own}
    listed |= tiers.fetches.pages_of()
    owned = {owner: pool.pages_of(owner) for owner in pool.owners() - pool.owners(PageState.CACHED)}
    tiers.check_invariants()
    assert owned == listed, f"the pool says {owned}, the sequences say {listed}"


def view_of(prefill: PrefillPhase, reservations: Reservations) -> View:
    """What the router is told of a worker's two sides."""
    decode, streaming = reservations.side, prefill.shipping.streaming
    return View(
        free_pages=reservations.free_pages if decode.config.role.decodes else decode.shared.available,
        free_slots=reservations.free_slots,
        waiting_tokens=prefill.waiting.tokens,
        running=decode.slots.num_taken,
        stream_tokens=0 if streaming is None else streaming.stream_tokens,
    )
