"""The decode side of a worker: beds held for requests, sequences in slots, turns dispatched ahead of their tokens.

A sequence is assumed to advance one token a turn. Its pages are granted before the turn that needs them, its slot and
pages are free once its last turn is dispatched (later plans run later on the device), and a stop is learnt late: turns
dispatched meanwhile find the slot masked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from jdisagg.core.events import DecodeDone, DropKV, InsertKV, KVArrived, RunDecode
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Commit, Draw, Preempted, Refused, Renew, Resend, Reserve, Reserved
from jdisagg.core.plans import DecodePlan, PageGrant
from jdisagg.core.request import FinishReason, Request, Sampled, WorkerId
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.policy.ahead import Ahead
from jdisagg.policy.bed import Bed, Turn, admission, admitted, end_of
from jdisagg.policy.handoff import End, Handoff, Signal, State, Timer, timer_of
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import Owner, PagePool, PageState
from jdisagg.policy.planning import choose_victim, full_tokens, order_of, predicted_pages
from jdisagg.policy.slots import Slots

HeldPrefix = Callable[[Request], tuple[int, ...]]  # pages, in order, that hold the KV of the prompt's first tokens


def no_prefix(_: Request) -> tuple[int, ...]:
    """Nothing is held of any prompt."""
    return ()


class Beds:
    """All beds of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        pool: PagePool,
        out: Outbox,
        new_plan_id: Callable[[], int],
        held_prefix: HeldPrefix = no_prefix,
    ) -> None:
        self.config, self.pool, self.out, self.new_plan_id = config, pool, out, new_plan_id
        self.held_prefix = held_prefix
        self.slots: Slots[Bed] = Slots(config)
        self.beds: dict[Owner, Bed] = {}
        self.turns: dict[int, Turn] = {}
        self._ready: list[Bed] = []  # admitted, waiting for a slot, in order
        self.ahead = Ahead(config, self.slots, self.turns, out)
        self._drained = 0

    # ------------------------------------------------------------ what is free

    @property
    def free_slots(self) -> int:
        return self.config.num_slots + self.config.beds_ahead - (len(self.beds) - self._drained)

    @property
    def num_ready(self) -> int:
        """Whole sequences that wait for a slot."""
        return len(self._ready)

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
            self.out.tell_router(Reserved(*owner, tuple(bed.pages), bed.cached_pages, self.config.page_size))

    def _make_bed(self, owner: Owner, message: Reserve, now_s: float) -> Bed | None:
        cached = self.held_prefix(message.request)[: len(message.request.prompt) // self.config.page_size]
        need = predicted_pages(message.request, self.config) - len(cached)
        if self.free_slots < 1 or need > self.reservable_pages:
            return None
        pages = self.pool.take(need, owner, PageState.IN_FLIGHT)
        assert pages is not None, "reservable pages are free"
        handoff = Handoff(owner, End.DESTINATION, now_s + message.lease_s)
        handoff.take(Signal.RESERVE)
        self.out.arm(handoff)
        bed = Bed(
            handoff=handoff,
            request=message.request,
            order=order_of(message.request),
            num_output=message.num_output,
            source=message.prefill_worker,
            lease_s=message.lease_s,
            pages=[*cached, *pages],
            cached_pages=len(cached),
        )
        self.beds[owner] = bed
        return bed

    def renew(self, message: Renew, source: WorkerId, now_s: float) -> None:
        """The source is at it still; one that waits for an Ack though the bed is complete has missed it."""
        bed = self.beds.get(Owner(message.handoff, message.epoch))
        if bed is None:
            self.out.send(source, Abort(message.handoff, message.epoch, "no such bed"))
        elif admitted(bed):
            self.out.send(source, Ack(*bed.owner, bed.wire_s))
        else:
            bed.renew(now_s)

    def commit(self, message: Commit, source: WorkerId, now_s: float) -> None:
        owner = Owner(message.handoff, message.epoch)
        bed = self.beds.get(owner)
        if bed is None or bed.source != source:
            self.out.send(source, Abort(*owner, "no such bed"))
        elif admitted(bed):
            self.out.send(source, Ack(*owner, bed.wire_s))  # it was said twice: the Ack may have been lost
        elif bed.handoff.can_take(Signal.COMMIT):
            self._commit(bed, message, now_s)

    def _commit(self, bed: Bed, message: Commit, now_s: float) -> None:
        ours, theirs = self.config.kv_layout, message.layout
        if ours and theirs and ours != theirs:
            self._give_up(bed, f"{bed.source} shipped pages of {theirs}, {self.config.worker} holds {ours}")
            return
        if message.num_tokens != len(bed.request.prompt):
            self._give_up(bed, f"{bed.source} commits {message.num_tokens} tokens of {len(bed.request.prompt)}")
            return
        bed.commit(message.first, message.num_tokens, message.num_parts, message.layers)
        bed.renew(now_s)
        if not self._admit_if_complete(bed, now_s):
            self.ahead.wait(bed)
            self._watch_parts(bed, now_s)

    def arrive(self, event: KVArrived, now_s: float) -> None:
        """A part landed: inserted where its bed still waits for it, dropped where it is late or came before."""
        transfer = event.transfer
        bed = self.beds.get(Owner(transfer.handoff, transfer.epoch))
        if bed is None or not bed.wants(transfer.part) or not bed.is_for(transfer):
            self.out.put(DropKV(transfer))
            return
        bed.renew(now_s)
        bed.moved_s = now_s
        bed.wire.append((now_s - event.wire_s, now_s))
        if not event.intact:
            self.out.put(DropKV(transfer))
            self._ask_again(bed, [transfer.part], "came broken", FinishReason.ERROR)
            return
        bed.handoff.take(Signal.ARRIVE)
        bed.parts.add(transfer.part)
        self.out.put(InsertKV(transfer))
        self._admit_if_complete(bed, now_s)

    # ------------------------------------------------------------ repair

    def _ask_again(self, bed: Bed, parts: list[int], what: str, reason: FinishReason) -> None:
        """The source still holds these pages; a part that was asked for often enough ends the handoff."""
        tried = max(bed.asked[part] for part in parts)
        if tried >= self.config.part_tries:
            self._give_up(bed, f"part {parts[0]} {what} {tried + 1} times", reason)
            return
        for part in parts:
            bed.asked[part] += 1
            self.out.send(bed.source, Resend(*bed.owner, part))

    def _give_up(self, bed: Bed, detail: str, reason: FinishReason = FinishReason.ERROR) -> None:
        self.end(bed.owner, Signal.ABORT)
        self.out.abort(bed.owner, detail, reason)

    def _watch_parts(self, bed: Bed, now_s: float) -> None:
        bed.moved_s = now_s
        self.out.set_timer(now_s + self.config.part_timeout_s, timer_of(Timer.PARTS, bed.owner))

    def parts_late(self, owner: Owner, now_s: float) -> None:
        """Asks for what COMMIT counted and did not come, once nothing has come for a while."""
        bed = self.beds.get(owner)
        if bed is None or bed.handoff.state is not State.COMMITTED:
            return
        due_s = bed.moved_s + self.config.part_timeout_s
        if now_s < due_s:
            self.out.set_timer(due_s, timer_of(Timer.PARTS, owner))
            return
        self._ask_again(bed, bed.missing, "did not come", FinishReason.TIMEOUT)
        if not bed.handoff.over:
            self._watch_parts(bed, now_s)

    # ------------------------------------------------------------ admission

    def commit_here(self, owner: Owner, first: Sampled, now_s: float) -> None:
        """The colocated handoff: the KV was computed in the bed's own pages."""
        bed = self.beds[owner]
        bed.commit(first, len(bed.request.prompt), 0)
        self._admit_if_complete(bed, now_s)

    def _admit_if_complete(self, bed: Bed, now_s: float) -> bool:
        if bed.handoff.state is not State.COMMITTED or bed.missing:
            return False
        bed.handoff.take(Signal.COMPLETE)
        if bed.source != self.config.worker:
            self.out.send(bed.source, Ack(*bed.owner, bed.wire_s))
        self.pool.move(bed.own_pages, bed.owner, PageState.HELD)
        if not self.ahead.whole(bed):
            insort(self._ready, bed, key=lambda each: each.order)
        elif bed.drained:
            self._drain(bed)
        self.out.reach(bed.request.request_id, bed.owner, Mark.COMMITTED, now_s, bed.wire_s)
        return True

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
        self._drained -= bed.drained
        bed.handoff.take(signal)
        del self.beds[owner]
        self._strip(bed)
        return True

    def keep(self, owner: Owner, now_s: float) -> None:
        """Renews the lease of a bed, where there is one."""
        if owner in self.beds:
            self.beds[owner].renew(now_s)

    def expire(self, owner: Owner, now_s: float) -> bool:
        bed = self.beds.get(owner)
        if bed is None or not bed.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < bed.handoff.deadline_s:
            self.out.arm(bed.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)

    def _drain(self, bed: Bed) -> None:
        """Its last turn is dispatched: its slot and pages are free for turns behind that one."""
        self._drained += 1
        self._strip(bed)

    def _strip(self, bed: Bed) -> None:
        self.ahead.drop(bed)
        if bed.slot is not None:
            self.slots.clear(bed.slot, on_device=bed.on_device)
            bed.slot = None
        elif bed in self._ready:
            self._ready.remove(bed)
        self.pool.give_back(bed.own_pages, bed.owner)
        bed.pages.clear()

    # ------------------------------------------------------------ turns

    def seat_ready(self) -> None:
        """Sequences that wait take the slots that are free, best first; where none does, those whose KV follows."""
        while self._ready and (slot := self.ahead.free_slot()) is not None:
            bed = self._ready.pop(0)
            bed.slot = slot
            self.slots.seat(slot, bed)
        while not self._ready and self.ahead.seat_next():
            continue

    def plan_turn(self) -> bool:
        """Dispatches the next turn of the next microbatch that has one; False where none has."""
        return any(self._plan_turn(microbatch) for microbatch in self.slots.due(self.ahead.under_way))

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
            admit=tuple(admission(slot, bed) for slot, bed in active if not bed.on_device),
            grants=tuple(grants),
            retire=self.slots.begin_turn(microbatch),
            gates=self.ahead.gates(microbatch),
        )
        self.turns[plan.plan_id] = Turn(microbatch, dict(active), plan.retire)
        self.out.put(RunDecode(plan))
        for _, bed in active:
            bed.on_device = True
            bed.dispatched += 1
            if bed.drained:
                self._drain(bed)

    def _has_room(self, slot: int, bed: Bed, grants: list[PageGrant]) -> bool:
        """Whether the bed may take this turn: it has, or gets, a page for the token that the turn feeds."""
        if bed.slot != slot:
            return False  # it was a victim a moment ago
        if self.config.pages_for(bed.num_tokens + bed.dispatched) <= len(bed.pages):
            return True
        while (page := self.pool.take(1, bed.owner, PageState.HELD)) is None:
            if not admitted(bed):
                return False  # nobody gives way to who waits for KV
            victim = choose_victim(each for each in self.beds.values() if each.pages and admitted(each))
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
        return not any(each.pages and admitted(each) for each in self.beds.values() if each is not bed)

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
            bed = turn.beds.get(slot)
            if bed is None or bed.handoff.over:
                continue  # it stopped, was preempted or aborted, or stepped back, while this turn was in flight
            assert sampled is not None, f"slot {slot} masked itself though its sequence goes on"
            self._first_step(bed, now_s)
            if not sampled.broken:
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
