"""The decode side of a worker: beds held for requests, sequences in slots, turns dispatched ahead of their tokens.

A sequence is assumed to advance one token a turn. Its pages are granted before the turn that needs them, its slot and
pages are free once its last turn is dispatched (later plans run later on the device), and a stop is learnt late: turns
dispatched meanwhile find the slot masked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from jdisagg.core.events import DecodeDone, DropKV, InsertKV, KVArrived, RunDecode
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Commit, Draw, Preempted, Refused, Reserve, Reserved
from jdisagg.core.plans import Admission, DecodePlan, PageGrant
from jdisagg.core.request import FinishReason, Request, Sampled, WorkerId
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.policy.handoff import End, Handoff, Signal, State
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import Owner, PagePool, PageState
from jdisagg.policy.planning import Order, choose_victim, full_tokens, history_of, order_of, predicted_pages
from jdisagg.policy.slots import Slots


@dataclass(slots=True, eq=False)
class Bed:
    """One sequence's place: from its reservation to its last token."""

    handoff: Handoff
    request: Request
    order: Order
    num_output: int  # tokens the client had before this attempt
    pages: list[int]
    lease_s: float
    parts: set[int] = field(default_factory=set)  # that are inserted
    num_parts: int | None = None  # that COMMIT counts
    source: WorkerId | None = None  # that said COMMIT
    num_tokens: int = 0  # tokens in the KV when it was committed
    output: list[int] = field(default_factory=list)  # tokens of this attempt, as read
    first: Sampled | None = None  # known from COMMIT on
    dispatched: int = 0  # output tokens drawn or on their way
    slot: int | None = None
    on_device: bool = False  # its admission has been dispatched
    stepped: bool = False  # a decoded token has been read

    @property
    def owner(self) -> Owner:
        return self.handoff.owner

    @property
    def drained(self) -> bool:
        """All its turns are dispatched: it only waits for tokens."""
        return self.dispatched == self.request.sampling.max_tokens

    def wants(self, part: int) -> bool:
        """Whether this part is still to come; one that COMMIT does not count is none of this bed's."""
        known = self.num_parts is None or part < self.num_parts
        return known and part not in self.parts and self.handoff.can_take(Signal.ARRIVE)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A decode plan in flight, and whose its slots were when it was dispatched."""

    microbatch: int
    beds: dict[int, Bed]
    retired: tuple[int, ...]


class Beds:
    """All beds of one worker."""

    def __init__(self, config: WorkerConfig, pool: PagePool, out: Outbox, new_plan_id: Callable[[], int]) -> None:
        self.config, self.pool, self.out, self.new_plan_id = config, pool, out, new_plan_id
        self.slots: Slots[Bed] = Slots(config)
        self.beds: dict[Owner, Bed] = {}
        self.turns: dict[int, Turn] = {}
        self._ready: list[Bed] = []  # admitted, waiting for a slot, in order
        self._drained = 0

    # ------------------------------------------------------------ what is free

    @property
    def free_slots(self) -> int:
        return self.config.num_slots + self.config.beds_ahead - (len(self.beds) - self._drained)

    @property
    def reservable_pages(self) -> int:
        """Free pages, less one for each sequence that may still grow."""
        growing = sum(self._may_grow(bed) for bed in self.beds.values())
        return max(0, self.pool.free_pages - growing)

    def _may_grow(self, bed: Bed) -> bool:
        return not bed.drained and len(bed.pages) < self.config.pages_for(full_tokens(bed.request))

    # ------------------------------------------------------------ the handoff

    def reserve(self, message: Reserve, now_s: float) -> None:
        owner = Owner(message.handoff, message.epoch)
        bed = self.beds.get(owner)
        if bed is None:
            bed = self._make_bed(owner, message, now_s)
        if bed is None:
            detail = f"{self.free_slots} slots and {self.reservable_pages} pages are free"
            self.out.tell_router(Refused(*owner, detail))
        elif bed.handoff.state is State.RESERVED:
            self.out.tell_router(Reserved(*owner, tuple(bed.pages)))

    def _make_bed(self, owner: Owner, message: Reserve, now_s: float) -> Bed | None:
        need = predicted_pages(message.request, self.config)
        if self.free_slots < 1 or need > self.reservable_pages:
            return None
        pages = self.pool.take(need, owner, PageState.IN_FLIGHT)
        assert pages is not None, "reservable pages are free"
        handoff = Handoff(owner, End.DESTINATION, now_s + message.lease_s)
        handoff.take(Signal.RESERVE)
        self.out.arm(handoff)
        order = order_of(message.request)
        bed = Bed(handoff, message.request, order, message.num_output, list(pages), message.lease_s)
        self.beds[owner] = bed
        return bed

    def commit(self, message: Commit, source: WorkerId, now_s: float) -> None:
        owner = Owner(message.handoff, message.epoch)
        bed = self.beds.get(owner)
        if bed is None:
            self.out.send(source, Abort(*owner, "no such bed"))
        elif bed.handoff.can_take(Signal.COMMIT):
            bed.handoff.take(Signal.COMMIT)
            bed.first, bed.num_tokens, bed.num_parts = message.first, message.num_tokens, message.num_parts
            bed.source = source
            self._admit_if_complete(bed, now_s)
        elif bed.handoff.state is State.ADMITTED:
            self.out.send(source, Ack(*owner))  # it was said twice: the Ack may have been lost

    def arrive(self, event: KVArrived, now_s: float) -> None:
        """A part landed: inserted where its bed still waits for it, dropped where it is late or came before."""
        transfer = event.transfer
        bed = self.beds.get(Owner(transfer.handoff, transfer.epoch))
        if bed is None or not bed.wants(transfer.part):
            self.out.put(DropKV(transfer))
            return
        bed.handoff.take(Signal.ARRIVE)
        bed.parts.add(transfer.part)
        self.out.put(InsertKV(transfer))
        self._admit_if_complete(bed, now_s)

    def commit_here(self, owner: Owner, first: Sampled, now_s: float) -> None:
        """The colocated handoff: the KV was computed in the bed's own pages."""
        bed = self.beds[owner]
        bed.handoff.take(Signal.COMMIT)
        bed.first, bed.num_tokens, bed.num_parts = first, len(bed.request.prompt), 0
        self._admit_if_complete(bed, now_s)

    def _admit_if_complete(self, bed: Bed, now_s: float) -> None:
        if bed.handoff.state is not State.COMMITTED or len(bed.parts) != bed.num_parts:
            return
        assert bed.first is not None, "COMMIT brings the first token"
        bed.handoff.take(Signal.COMPLETE)
        if bed.source is not None:
            self.out.send(bed.source, Ack(*bed.owner))
        bed.output.append(bed.first.token)
        bed.dispatched = 1
        self.pool.move(bed.pages, bed.owner, PageState.HELD)
        insort(self._ready, bed, key=lambda each: each.order)
        self.out.reach(bed.request.request_id, bed.owner, Mark.COMMITTED, now_s)

    def bed_waits(self, owner: Owner) -> bool:
        """Whether the bed is reserved and nothing has come for it yet."""
        bed = self.beds.get(owner)
        return bed is not None and bed.handoff.state is State.RESERVED

    def pages_of(self, owner: Owner) -> tuple[int, ...]:
        return tuple(self.beds[owner].pages)

    def end(self, owner: Owner, signal: Signal) -> bool:
        """Gives back all that the bed holds; False where there is none, or where the signal is not for its state."""
        bed = self.beds.get(owner)
        if bed is None or not bed.handoff.can_take(signal):
            return False
        bed.handoff.take(signal)
        del self.beds[owner]
        if bed.drained:
            self._drained -= 1
        self._strip(bed)
        return True

    def expire(self, owner: Owner, now_s: float) -> bool:
        bed = self.beds.get(owner)
        if bed is None or not bed.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < bed.handoff.deadline_s:
            self.out.arm(bed.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)

    def _strip(self, bed: Bed) -> None:
        if bed.slot is not None:
            self.slots.clear(bed.slot, on_device=bed.on_device)
            bed.slot = None
        elif bed in self._ready:
            self._ready.remove(bed)
        self.pool.give_back(bed.pages, bed.owner)
        bed.pages.clear()

    # ------------------------------------------------------------ turns

    def seat_ready(self) -> None:
        """Sequences that wait take the slots that are free, best first."""
        while self._ready and (slot := self.slots.free_slot()) is not None:
            bed = self._ready.pop(0)
            bed.slot = slot
            self.slots.seat(slot, bed)

    def plan_turn(self) -> bool:
        """Dispatches the next turn of the next microbatch that has one; False where none has."""
        return any(self._plan_turn(microbatch) for microbatch in self.slots.due())

    def _plan_turn(self, microbatch: int) -> bool:
        seated = self.slots.seated(microbatch)
        if self.pool.free_pages < len(seated):
            seated.sort(key=lambda each: each[1].order)  # the best takes pages first: it is never its inferiors' victim
        grants: list[PageGrant] = []
        active = [(slot, bed) for slot, bed in seated if self._has_room(slot, bed, grants)]
        if not active:
            return False
        active.sort(key=lambda each: each[0])
        self._dispatch(microbatch, active, grants)
        return True

    def _dispatch(self, microbatch: int, active: list[tuple[int, Bed]], grants: list[PageGrant]) -> None:
        longest = max(bed.num_tokens + bed.dispatched for _, bed in active)
        plan = DecodePlan(
            plan_id=self.new_plan_id(),
            microbatch=microbatch,
            active=tuple(slot for slot, _ in active),
            table_pages=bucket(self.config.pages_for(longest), self.config.table_buckets),
            admit=tuple(_admission(slot, bed) for slot, bed in active if not bed.on_device),
            grants=tuple(grants),
            retire=self.slots.begin_turn(microbatch),
        )
        self.turns[plan.plan_id] = Turn(microbatch, dict(active), plan.retire)
        self.out.put(RunDecode(plan))
        for _, bed in active:
            bed.on_device = True
            bed.dispatched += 1
            if bed.drained:
                self._drained += 1
                self._strip(bed)

    def _has_room(self, slot: int, bed: Bed, grants: list[PageGrant]) -> bool:
        """Whether the bed may take this turn: it has, or gets, a page for the token that the turn feeds."""
        if bed.slot != slot:
            return False  # it was a victim a moment ago
        if self.config.pages_for(bed.num_tokens + bed.dispatched) <= len(bed.pages):
            return True
        while (page := self.pool.take(1, bed.owner, PageState.HELD)) is None:
            victim = choose_victim(each for each in self.beds.values() if each.pages and _admitted(each))
            assert victim is not None, "whoever grows is admitted"
            if victim is bed and self._alone(bed):
                return False  # alone among beds that are still to be filled: those will end, or run out
            self._preempt(victim)
            if victim is bed:
                return False
        if bed.on_device:
            grants.append(PageGrant(slot, len(bed.pages), page[0]))
        bed.pages.append(page[0])
        return True

    def _alone(self, bed: Bed) -> bool:
        """Whether `bed` is the only admitted sequence with pages."""
        return not any(each.pages and _admitted(each) for each in self.beds.values() if each is not bed)

    def _preempt(self, bed: Bed) -> None:
        detail = f"no free page of {self.pool.num_pages} for a request of higher rank"
        self.out.tell_router(Preempted(bed.request.request_id, bed.owner.epoch, tuple(bed.output), detail))
        self.end(bed.owner, Signal.RELEASE)

    # ------------------------------------------------------------ results

    def decode_done(self, event: DecodeDone, now_s: float) -> None:
        turn = self.turns.pop(event.plan_id)
        self.slots.end_turn(turn.microbatch)
        draws: list[Draw] = []
        over: list[tuple[Bed, FinishReason]] = []
        for slot, sampled in event.sampled:
            bed = turn.beds[slot]
            if bed.handoff.over:
                continue  # it stopped, was preempted or aborted while this turn was in flight
            assert sampled is not None, f"slot {slot} masked itself though its sequence goes on"
            self._first_step(bed, now_s)
            index = bed.num_output + len(bed.output)
            bed.output.append(sampled.token)
            draws.append(Draw(bed.request.request_id, bed.owner.epoch, index, (sampled,)))
            reason = end_of(bed.request, sampled, len(bed.output))
            if reason is not None:
                over.append((bed, reason))
        self.out.draw(draws)
        for bed, reason in over:
            self.out.end(bed.request.request_id, bed.owner, reason, bed.num_output + len(bed.output), now_s)
            self.end(bed.owner, Signal.RELEASE)

    def _first_step(self, bed: Bed, now_s: float) -> None:
        if not bed.stepped:
            bed.stepped = True
            self.out.reach(bed.request.request_id, bed.owner, Mark.FIRST_STEP, now_s)

    def turn_failed(self, plan_id: int, reason: str) -> None:
        turn = self.turns.pop(plan_id)
        self.slots.end_turn(turn.microbatch)
        self.slots.retire_again(turn.microbatch, turn.retired)
        for bed in turn.beds.values():
            if self.end(bed.owner, Signal.ABORT):
                self.out.abort(bed.owner, reason)


def _admitted(bed: Bed) -> bool:
    return bed.handoff.state is State.ADMITTED


def _admission(slot: int, bed: Bed) -> Admission:
    assert bed.first is not None, "an admitted bed has its first token"
    return Admission(
        slot=slot,
        request_id=bed.request.request_id,
        token=bed.first.token,
        position=bed.num_tokens,
        pages=tuple(bed.pages),
        sampling=bed.request.sampling,
        num_output=bed.num_output + 1,
        history=history_of(bed.request, bed.num_output, (bed.first.token,)),
    )


def end_of(request: Request, sampled: Sampled, num_output: int) -> FinishReason | None:
    """Why a request is over with this token, its `num_output`th of this attempt; None where it goes on."""
    if sampled.token in request.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= request.sampling.max_tokens else None
