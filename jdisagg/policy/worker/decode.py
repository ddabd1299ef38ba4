"""The decode side of a worker: sequences held for requests, sequences in slots, steps dispatched ahead of their tokens.

A step draws a token of a sequence, or up to as many as its row is wide. Its pages are granted before the step that may
need them, its slot and pages are free once its last step is dispatched (later steps run later on the device), and a
stop is learnt late: steps dispatched meanwhile find the slot masked. Which rows a step holds says `scheduler.py`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from jdisagg.core.errors import PeerMismatch, SenselessWord
from jdisagg.core.events import DropKV, InsertKV, KVArrived, OpenGates, StepDone
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Commit, Preempted, Refused, Renew, Resend, Reserve, Reserved, TokenDelta
from jdisagg.core.request import BROKEN, Attempt, FinishReason, Sampled, WorkerId
from jdisagg.core.steps import Gate
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.page_pool import NOTHING, PageState, SharedPages
from jdisagg.policy.cache.prefix_cache import PageHash
from jdisagg.policy.cache.tiers import Tiers
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import full_tokens, order_of, predicted_pages, tail_tokens
from jdisagg.policy.speculation import make_draft_controller
from jdisagg.policy.worker.handoff import Handoff, HandoffRole, Signal, State, Timer, timer_of
from jdisagg.policy.worker.sequence import DecodeSequence, Step, admitted, end_of
from jdisagg.policy.worker.slots import DecodeSlots, TurnTimes

# Admission by stages: who may begin to decode before all of its KV is in, and what its first step waits for.
#
# Stage s of a pipeline needs the KV of its layers only s stages after the step began, so a sequence may be seated
# when COMMIT and its first stage's parts are in: its first step's later stages have gates, and the parts follow
# in time. Nobody waits for a gate but the sequence itself. It is seated only in a microbatch that is empty, which
# then takes no other step until its KV is whole; and it gives the place up to the first whole sequence that finds
# no other.


def gates_of(sequence: DecodeSequence, stages: tuple[tuple[int, int], ...]) -> tuple[Gate, ...]:
    """For each stage whose layers are not all in, the parts that it has to wait for."""
    arrivals = sequence.arrivals
    waits = [tuple(part for part in arrivals.missing if arrivals.part_holds(part, layers)) for layers in stages]
    return tuple(Gate(stage, sequence.owner, parts) for stage, parts in enumerate(waits) if parts)


class EarlyAdmission:
    """DecodeSide that COMMIT has reached before all of their parts, and those of them that are seated all the same."""

    def __init__(
        self, config: WorkerConfig, slots: DecodeSlots[DecodeSequence], steps: dict[int, Step], out: EffectBuffer
    ) -> None:
        self.config, self.slots, self.steps, self.out = config, slots, steps, out
        self.stages = config.layer_groups
        self.used = config.stage_admission and config.role is Role.DECODE and len(self.stages) > 1
        self.seated: dict[int, DecodeSequence] = {}  # by microbatch, each alone there
        self._waiting: list[DecodeSequence] = []  # the others, in order

    def wait(self, sequence: DecodeSequence) -> None:
        """The sequence has COMMIT and lacks parts."""
        if self.used:
            insort(self._waiting, sequence, key=lambda each: each.order)

    def seat_next(self) -> bool:
        """Seats the first in order that may be; False where none may, or no microbatch is empty."""
        sequence = next((sequence for sequence in self._waiting if self._may(sequence)), None)
        slot = self.slots.slot_of_an_empty_microbatch() if sequence else None
        if sequence is None or slot is None:
            return False
        self._waiting.remove(sequence)
        sequence.slot = slot
        self.slots.seat(slot, sequence)
        self.seated[self.slots.microbatch_of(slot)] = sequence
        return True

    def _may(self, sequence: DecodeSequence) -> bool:
        """Its first stage lacks nothing."""
        return all(gate.stage for gate in gates_of(sequence, self.stages))

    def gates(self, microbatch: int) -> tuple[Gate, ...]:
        """Of the microbatch's next step."""
        sequence = self.seated.get(microbatch)
        return () if sequence is None else gates_of(sequence, self.stages)

    @property
    def under_way(self) -> list[int]:
        """Microbatches whose step may wait at a gate: they take no other."""
        return [microbatch for microbatch, sequence in self.seated.items() if sequence.on_device]

    # ------------------------------------------------------------ ends

    def whole(self, sequence: DecodeSequence) -> bool:
        """The sequence lacks nothing any more; whether it was seated."""
        return self._forget(sequence)

    def free_slot(self) -> int | None:
        """For a whole sequence: where there is no other, who is seated ahead makes room."""
        slot = self.slots.free_slot(self.seated)
        if slot is None and self.seated:
            self._step_back(max(self.seated.values(), key=lambda each: each.order))
            slot = self.slots.free_slot(self.seated)
        return slot

    def _step_back(self, sequence: DecodeSequence) -> None:
        """It waits on, and then decodes from where it was."""
        assert sequence.slot is not None, "who is seated ahead has a slot"
        self.drop(sequence)
        self.slots.clear(sequence.slot, on_device=sequence.on_device)
        sequence.step_back()
        self.wait(sequence)

    def drop(self, sequence: DecodeSequence) -> None:
        """What its step draws is nobody's, and the step waits no longer: it runs before its pages can be another's."""
        if not self._forget(sequence) or not sequence.on_device:
            return
        self.out.put(OpenGates(sequence.owner))
        for step in self.steps.values():
            for slot in [slot for slot, each in step.sequences.items() if each is sequence]:
                del step.sequences[slot]

    def _forget(self, sequence: DecodeSequence) -> bool:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        found = [microbatch for microbatch, each in self.seated.items() if each is sequence]
        for microbatch in found:
            del self.seated[microbatch]
        return bool(found)


class DecodePhase:
    """All sequences of one worker."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer) -> None:
        self.config, self.shared, self.out = config, shared, out
        self.pool = shared.pool
        self.slots: DecodeSlots[DecodeSequence] = DecodeSlots(config)
        self.sequences: dict[Attempt, DecodeSequence] = {}
        self.steps: dict[int, Step] = {}
        self._ready: list[DecodeSequence] = []  # admitted, waiting for a slot, in order
        self.draft_controller, self.turn_times = make_draft_controller(config), TurnTimes(config)
        self.ahead = EarlyAdmission(config, self.slots, self.steps, out)
        self._drained: set[Attempt] = set()  # whose last step is dispatched: they take no slot any more

    # ------------------------------------------------------------ what is free

    @property
    def free_slots(self) -> int:
        held = len(self.sequences) - len(self._drained)
        return self.config.num_slots + self.config.reservations_ahead - held

    @property
    def num_ready(self) -> int:
        """Whole sequences that wait for a slot."""
        return len(self._ready)

    @property
    def expects(self) -> bool:
        """Whether a sequence is held for whose KV is still to come."""
        if len(self.sequences) == self.slots.num_taken and not self.ahead.used:
            return False  # whoever sits has its KV
        return any(not admitted(sequence) for sequence in self.sequences.values())

    @property
    def reservable_pages(self) -> int:
        """Pages to be had, less one for each sequence that may still grow."""
        growing = sum(self._may_grow(sequence) for sequence in self.sequences.values())
        return max(0, self.shared.available - growing)

    def _may_grow(self, sequence: DecodeSequence) -> bool:
        return not sequence.drained and len(sequence.pages) < self.config.pages_for(full_tokens(sequence.asked))

    # ------------------------------------------------------------ admission

    def commit_here(self, owner: Attempt, manifest: Commit, now_s: float) -> None:
        """The colocated handoff: the KV was computed in the sequence's own pages."""
        sequence = self.sequences[owner]
        needed = tail_tokens(sequence.asked, self.config)
        assert len(manifest.tail) == needed, f"{len(manifest.tail)} last tokens of a prompt where {needed} are needed"
        sequence.commit(manifest)
        self.admit_if_complete(sequence, now_s)

    def admit_if_complete(self, sequence: DecodeSequence, now_s: float) -> bool:
        """Whether all that COMMIT counted has come: then it waits for a slot, or has one."""
        if sequence.handoff.state is not State.COMMITTED or sequence.arrivals.missing:
            return False
        sequence.handoff.take(Signal.COMPLETE)
        if sequence.source != self.config.worker:
            self.out.send(sequence.source, Ack(sequence.owner, sequence.arrivals.wire_s))
        self.pool.move(sequence.own_pages, sequence.owner, PageState.HELD)
        if not self.ahead.whole(sequence):
            insort(self._ready, sequence, key=lambda each: each.order)
        elif sequence.drained:
            self.drain(sequence)
        cached_tokens = sequence.cached_pages * self.config.page_size
        self.out.reach(sequence.owner, Mark.COMMITTED, now_s, sequence.arrivals.wire_s, cached_tokens)
        return True

    def reservation_waits(self, owner: Attempt) -> bool:
        """Whether the sequence is reserved and nothing has come for it yet."""
        sequence = self.sequences.get(owner)
        return sequence is not None and sequence.handoff.state is State.RESERVED

    def pages_of(self, owner: Attempt) -> tuple[int, ...]:
        return tuple(self.sequences[owner].pages)

    def end(self, owner: Attempt, signal: Signal, *, good: bool = False) -> bool:
        """Gives back all that the sequence holds; False where there is none, or the signal is not for its state.

        Where its KV is `good`, nothing having failed, its full pages are kept for their content.
        """
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.handoff.can_take(signal):
            return False
        self._drained.discard(owner)
        if self.draft_controller is not None:
            self.draft_controller.forget(sequence)
        good = good and (admitted(sequence) or signal is Signal.RELEASE)
        sequence.handoff.take(signal)
        del self.sequences[owner]
        self._leave_slot(sequence)
        self._give_back(sequence, good=good)
        return True

    def keep(self, owner: Attempt, now_s: float) -> None:
        """Renews the lease of a sequence, where there is one."""
        if owner in self.sequences:
            self.sequences[owner].renew(now_s)

    def expire(self, owner: Attempt, now_s: float) -> bool:
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < sequence.handoff.deadline_s:
            self.out.arm(sequence.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)

    def drain(self, sequence: DecodeSequence) -> None:
        """Its last step is dispatched: its slot and pages are free for steps behind that one.

        Pages that may be kept for their content wait for its last tokens, which name them, or for somebody in need.
        """
        self._drained.add(sequence.owner)
        self._leave_slot(sequence)
        if not self.config.prefix_caching:
            self._give_back(sequence, good=False)

    def _leave_slot(self, sequence: DecodeSequence) -> None:
        self.ahead.drop(sequence)
        if sequence.slot is not None:
            self.slots.clear(sequence.slot, on_device=sequence.on_device)
            sequence.slot = None
        elif sequence in self._ready:
            self._ready.remove(sequence)

    def _give_back(self, sequence: DecodeSequence, *, good: bool) -> None:
        """Where its KV is `good`, full pages are kept: of all its tokens but the last, which is never fed."""
        names = ()
        if good and sequence.pages:
            names = self.shared.names_with(sequence.asked, sequence.tail, sequence.output[:-1])
        self.shared.keep(names, sequence.pages, sequence.own_pages, sequence.owner)
        self.shared.release(sequence.held)
        sequence.held = NOTHING
        sequence.pages.clear()

    # ------------------------------------------------------------ room

    def seat_ready(self) -> None:
        """Sequences that wait take the slots that are free, best first; where none does, those whose KV follows."""
        while self._ready and (slot := self.ahead.free_slot()) is not None:
            sequence = self._ready.pop(0)
            sequence.slot = slot
            self.slots.seat(slot, sequence)
        while not self._ready and self.ahead.seat_next():
            continue

    def take_from_drained(self) -> bool:
        """Gives back the pages of one that only waits for its last tokens; False where nobody does."""
        found = next((each for each in self.sequences.values() if each.pages and each.drained), None)
        if found is not None:
            self._give_back(found, good=False)
        return found is not None

    def preempt(self, sequence: DecodeSequence) -> None:
        """It gives back all it holds; the router begins it again with the tokens that are out."""
        detail = f"no free page of {self.pool.num_pages} for a request of higher rank"
        self.out.tell_router(Preempted(sequence.owner, tuple(sequence.output), detail))
        self.park(sequence)
        self.end(sequence.owner, Signal.RELEASE, good=True)

    def park(self, sequence: DecodeSequence) -> None:
        """What is full of it is copied below, where there is a below: it goes on from there, here or elsewhere."""
        if self.config.has_tiers and admitted(sequence) and sequence.pages:
            names = self.shared.names_with(sequence.asked, sequence.tail, sequence.output[:-1])
            self.shared.parking(names, sequence.pages[: len(names)])


# Reservations of a worker's decode side: who gets pages and a place in line, at once or when a fetch has ended.


class Reservations:
    """Makes sequences; what becomes of them is the decode side's."""

    def __init__(self, side: DecodePhase, tiers: Tiers) -> None:
        self.side, self.tiers = side, tiers
        self.config, self.shared, self.out = side.config, side.shared, side.out
        self.waiting: dict[Attempt, Reserve] = {}  # for pages of lower tiers

    def reserve(self, message: Reserve, now_s: float) -> None:
        """Answers at once, or when what lower tiers hold of the prompt has come."""
        owner = message.attempt
        if owner in self.waiting:
            return  # said twice
        if owner not in self.side.sequences and self._has_room(message) and self._fetch(message, now_s):
            self.waiting[owner] = message
        else:
            self._answer(message, now_s)

    def all_fetched(self, owners: Sequence[Attempt], now_s: float) -> None:
        """What these waited for is there, or will not be. Prompts that did are looked at with the next step."""
        for owner in owners:
            message = self.waiting.pop(owner, None)
            if message is not None:
                self._answer(message, now_s)

    def forget(self, owner: Attempt) -> None:
        """It is over before it began."""
        self.waiting.pop(owner, None)
        self.tiers.fetches.forget(owner)

    def _fetch(self, message: Reserve, now_s: float) -> bool:
        names = self._readable(message)
        return self.tiers.fetch(message.attempt, names, self.side.reservable_pages, now_s, message.holders)

    def _readable(self, message: Reserve) -> tuple[PageHash, ...]:
        return self.shared.to_read(message, here=message.prefill_worker == self.config.worker)

    @property
    def free_slots(self) -> int:
        """Slots that a new reservation may take."""
        return max(0, self.side.free_slots)

    @property
    def free_pages(self) -> int:
        return self.side.reservable_pages

    def _has_room(self, message: Reserve) -> bool:
        _, cost = self.shared.room_for(self._readable(message), predicted_pages(message, self.config))
        return self.free_slots >= 1 and cost <= self.free_pages

    def _answer(self, message: Reserve, now_s: float) -> None:
        owner = message.attempt
        sequence = self.side.sequences.get(owner)
        if sequence is None and self._has_room(message):
            sequence = self._make_sequence(owner, message, now_s)
        if sequence is None:
            detail = f"{self.free_slots} slots and {self.free_pages} pages are free"
            self.out.tell_router(Refused(owner, detail))
        elif sequence.handoff.state is State.RESERVED:
            self.out.tell_router(Reserved(owner, tuple(sequence.pages), sequence.cached_pages, self.config.page_size))

    def _make_sequence(self, owner: Attempt, message: Reserve, now_s: float) -> DecodeSequence:
        handoff = Handoff(owner, HandoffRole.DESTINATION, now_s + message.lease_s)
        self.out.arm(handoff)
        sequence = self.side.sequences[owner] = DecodeSequence(handoff, message, order_of(message), [])
        self._fill(sequence)
        return sequence

    def _fill(self, sequence: DecodeSequence) -> None:
        """What is kept of its prompt is locked, and the rest of its pages are taken."""
        held = self.shared.lock(self._readable(sequence.asked))
        found = len(held.pages)
        total = predicted_pages(sequence.asked, self.config)
        pages = self.shared.take(total - found, sequence.owner, PageState.IN_FLIGHT)
        assert pages is not None, "reservable pages are there to be taken"
        sequence.handoff.take(Signal.RESERVE)
        sequence.pages, sequence.cached_pages, sequence.held = [*held.pages, *pages], found, held


# How KV comes to its decode worker: what COMMIT says of it, part by part, and again where one was lost.


def check_manifest(manifest: Commit, sequence: DecodeSequence, config: WorkerConfig) -> None:
    """Raises PeerMismatch, or SenselessWord, unless the Commit fits what was reserved."""
    ours, theirs, source = config.kv_layout, manifest.layout, sequence.source
    if ours and theirs and ours != theirs:
        raise PeerMismatch(f"{source} shipped pages of {theirs}, {config.worker} holds {ours}")
    if manifest.num_tokens != sequence.num_tokens:
        raise SenselessWord(f"{source} commits {manifest.num_tokens} tokens of {sequence.num_tokens}")
    needed = tail_tokens(sequence.asked, config)
    if len(manifest.tail) != needed:
        raise SenselessWord(f"{source} commits a tail of {len(manifest.tail)} tokens, {config.worker} needs {needed}")


class KVArrivals:
    """Of all sequences of one worker, from their reservation to their admission."""

    def __init__(self, decode_side: DecodePhase) -> None:
        self.decode_side = decode_side
        self.config, self.out, self.sequences = decode_side.config, decode_side.out, decode_side.sequences

    def renew(self, message: Renew, source: WorkerId, now_s: float) -> None:
        """The source is at it still; one that waits for an Ack though the sequence is complete has missed it."""
        sequence = self.sequences.get(message.attempt)
        if sequence is None:
            self.out.send(source, Abort(message.attempt, "no such reservation"))
        elif admitted(sequence):
            self.out.send(source, Ack(sequence.owner, sequence.arrivals.wire_s))
        else:
            sequence.renew(now_s)

    def commit(self, message: Commit, source: WorkerId, now_s: float) -> None:
        owner = message.attempt
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.source != source:
            self.out.send(source, Abort(owner, "no such reservation"))
        elif admitted(sequence):
            self.out.send(source, Ack(owner, sequence.arrivals.wire_s))  # said twice: the Ack may have been lost
        elif sequence.handoff.can_take(Signal.COMMIT):
            self._commit(sequence, message, now_s)

    def _commit(self, sequence: DecodeSequence, message: Commit, now_s: float) -> None:
        try:
            check_manifest(message, sequence, self.config)
        except (PeerMismatch, SenselessWord) as error:
            self._give_up(sequence, f"{type(error).__name__}: {error}")
            return
        sequence.commit(message)
        sequence.renew(now_s)
        if not self.decode_side.admit_if_complete(sequence, now_s):
            self.decode_side.ahead.wait(sequence)
            self._watch_parts(sequence, now_s)

    def arrive(self, event: KVArrived, now_s: float) -> None:
        """A part landed: inserted where its sequence still waits for it, dropped where it is late or came before."""
        transfer = event.transfer
        sequence = self.sequences.get(transfer.attempt)
        if sequence is None or not sequence.wants(transfer.part) or not sequence.is_for(transfer):
            self.out.put(DropKV(transfer))
            return
        sequence.renew(now_s)
        sequence.arrivals.moved_s = now_s
        sequence.arrivals.wire.append((now_s - event.wire_s, now_s))
        if not event.intact:
            self.out.put(DropKV(transfer))
            self._ask_again(sequence, [transfer.part], "came broken", FinishReason.ERROR)
            return
        sequence.handoff.take(Signal.ARRIVE)
        sequence.arrivals.parts.add(transfer.part)
        self.out.put(InsertKV(transfer))
        self.decode_side.admit_if_complete(sequence, now_s)

    # ------------------------------------------------------------ repair

    def _ask_again(self, sequence: DecodeSequence, parts: list[int], what: str, reason: FinishReason) -> None:
        """The source still holds these pages; a part that was asked for often enough ends the handoff."""
        tried = max(sequence.arrivals.asked[part] for part in parts)
        if tried >= self.config.part_tries:
            self._give_up(sequence, f"part {parts[0]} {what} {tried + 1} times", reason)
            return
        for part in parts:
            sequence.arrivals.asked[part] += 1
            self.out.send(sequence.source, Resend(sequence.owner, part))

    def _give_up(self, sequence: DecodeSequence, detail: str, reason: FinishReason = FinishReason.ERROR) -> None:
        self.decode_side.end(sequence.owner, Signal.ABORT)
        self.out.abort(sequence.owner, detail, reason)

    def _watch_parts(self, sequence: DecodeSequence, now_s: float) -> None:
        sequence.arrivals.moved_s = now_s
        self.out.set_timer(now_s + self.config.part_timeout_s, timer_of(Timer.PARTS, sequence.owner))

    def parts_late(self, owner: Attempt, now_s: float) -> None:
        """Asks for what COMMIT counted and did not come, once nothing has come for a while."""
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.handoff.state is not State.COMMITTED:
            return
        due_s = sequence.arrivals.moved_s + self.config.part_timeout_s
        if now_s < due_s:
            self.out.set_timer(due_s, timer_of(Timer.PARTS, owner))
            return
        self._ask_again(sequence, sequence.arrivals.missing, "did not come", FinishReason.TIMEOUT)
        if not sequence.handoff.over:
            self._watch_parts(sequence, now_s)


# What the ends of steps make of the sequences whose rows they held: tokens told, answers over, or failures.


class StepResults:
    """Of the decode rows of one worker."""

    def __init__(self, decode_side: DecodePhase) -> None:
        self.config, self.decode_side, self.out = decode_side.config, decode_side, decode_side.out
        self.quiet = False  # whether the last step's end gave each of its sequences tokens, and did nothing else

    def done(self, event: StepDone, now_s: float) -> None:
        step = self.decode_side.steps.pop(event.step_id)
        self.decode_side.slots.end_step(step.microbatch)
        self.decode_side.turn_times.done(event.step_id, now_s)
        controller = self.decode_side.draft_controller
        if controller is not None:
            controller.on_done(event.step_id, [len(drawn) for _, drawn in event.decode if drawn], now_s)
        draws: list[TokenDelta] = []
        first_steps = 0
        over: list[tuple[DecodeSequence, FinishReason]] = []
        for slot, drawn in event.decode:
            sequence = step.sequences.get(slot)
            if sequence is None or sequence.handoff.over:
                continue  # it stopped, was preempted or aborted, or stepped back, while this step was in flight
            assert drawn, f"slot {slot} masked itself though its sequence goes on"
            first_steps += self._first_step(sequence, now_s)
            kept, reason = self._until_end(sequence, drawn)
            if controller is not None and not step.turns:
                controller.on_row_read(sequence, step.widths[slot], len(drawn))
            sequence.read(step.widths[slot], step.least(slot), len(drawn))
            if kept:
                index = sequence.num_output + len(sequence.output)
                sequence.output.extend(sampled.token for sampled in kept)
                draws.append(TokenDelta(sequence.owner, index, kept))
            if reason is not None:
                over.append((sequence, reason))
            elif sequence.drained and sequence.slot is not None:
                self.decode_side.drain(sequence)  # more of a draft was accepted than was certain
        self.out.draw(draws)
        self.quiet = not over and len(draws) == len(event.decode) == len(step.sequences) and not first_steps
        for sequence, reason in over:
            num_output = sequence.num_output + len(sequence.output)
            self.out.end(sequence.owner, reason, num_output, now_s, sequence.sampling)
            self.decode_side.end(sequence.owner, Signal.RELEASE, good=reason is not FinishReason.ERROR)

    def _until_end(
        self, sequence: DecodeSequence, drawn: tuple[Sampled, ...]
    ) -> tuple[tuple[Sampled, ...], FinishReason | None]:
        """The tokens that are the client's, and why it is over with them; None where it goes on."""
        if len(drawn) > 1 and not _may_end(sequence, drawn):
            return drawn, None
        for count, sampled in enumerate(drawn, 1):
            reason = end_of(sequence.sampling, sampled, len(sequence.output) + count)
            if reason is not None:
                return drawn[: count - sampled.broken], reason
        return drawn, None

    def _first_step(self, sequence: DecodeSequence, now_s: float) -> bool:
        """Whether it was."""
        if sequence.stepped:
            return False
        sequence.stepped = True
        self.out.reach(sequence.owner, Mark.FIRST_STEP, now_s)
        return True

    def failed(self, step_id: int, reason: str) -> None:
        step = self.decode_side.steps.pop(step_id)
        self.decode_side.slots.end_step(step.microbatch)
        self.decode_side.turn_times.failed(step_id)
        if self.decode_side.draft_controller is not None:
            self.decode_side.draft_controller.on_failed(step_id)
        self.decode_side.slots.retire_again(step.microbatch, step.retired)
        for sequence in step.sequences.values():
            if self.decode_side.end(sequence.owner, Signal.ABORT):
                self.out.abort(sequence.owner, reason)


def _may_end(sequence: DecodeSequence, drawn: tuple[Sampled, ...]) -> bool:
    """False only where it goes on after all of these: seen at once, for one in hundreds of its tokens is the last."""
    sampling, tokens = sequence.sampling, [sampled.token for sampled in drawn]
    if drawn[0].logprob is not None or len(sequence.output) + len(tokens) >= sampling.max_tokens:
        return True
    return BROKEN in tokens or any(stop in tokens for stop in sampling.stop_token_ids)
