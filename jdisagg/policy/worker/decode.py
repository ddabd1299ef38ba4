"""The decode phase of a worker: reservations, arriving KV, admission to slots, and the tokens of finished steps.

A reservation gets its pages at once, or when a fetch from lower tiers has ended. Parts of KV and COMMIT arrive in any
order; a part that is lost or corrupt is requested again. A complete sequence waits for a slot.

Pages are granted before the step that may need them. A sequence's slot and pages are free once its last step is
dispatched, because later steps run later on the device. The worker learns of a stop late: steps dispatched in the
meantime find the slot masked. `scheduler.py` chooses the rows of each step.

Early admission: stage s of a pipeline needs the KV of its layers only s stages after the step began. A sequence may
therefore take a slot when COMMIT and the parts of the first stage have arrived; the later stages of its first step wait
at gates for the parts that follow. It takes a slot only in an empty microbatch, which runs no other step until the KV
is complete, so that only the sequence itself waits. It gives the slot up to the first complete sequence that finds no
other.
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
from jdisagg.policy.worker.sequence import DecodeSequence, Step, end_of
from jdisagg.policy.worker.slots import DecodeSlots, TurnTimes


class DecodePhase:
    """All sequences that one worker decodes, from their reservation to their last token."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer, tiers: Tiers) -> None:
        self.config, self.shared, self.out, self.tiers = config, shared, out, tiers
        self.slots: DecodeSlots[DecodeSequence] = DecodeSlots(config)
        self.sequences: dict[Attempt, DecodeSequence] = {}
        self.steps: dict[int, Step] = {}  # in flight
        self.awaiting_fetch: dict[Attempt, Reserve] = {}  # reservations that wait for pages of lower tiers
        self.draft_controller, self.turn_times = make_draft_controller(config), TurnTimes(config)
        self.is_quiet = False  # the last finished step gave each of its sequences tokens, and changed nothing else
        self._ready: list[DecodeSequence] = []  # complete, waiting for a slot, in order
        self._drained: set[Attempt] = set()  # sequences whose last step is dispatched: they need no slot any more
        self.has_early_admission = (
            config.stage_admission and config.role is Role.DECODE and len(config.layer_groups) > 1
        )
        self._early: dict[int, DecodeSequence] = {}  # by microbatch: incomplete sequences with a slot, each alone there
        self._incomplete: list[DecodeSequence] = []  # the other committed sequences that lack parts, in order

    # ------------------------------------------------------------ free slots and pages

    @property
    def free_slots(self) -> int:
        """Slots that new reservations may take; negative if more are reserved than the configuration allows."""
        held = len(self.sequences) - len(self._drained)
        return self.config.num_slots + self.config.reservations_ahead - held

    @property
    def num_ready(self) -> int:
        """Number of complete sequences that wait for a slot."""
        return len(self._ready)

    @property
    def expects(self) -> bool:
        """True if the KV of some reserved sequence has still to arrive."""
        if len(self.sequences) == self.slots.num_taken and not self.has_early_admission:
            return False  # every sequence with a slot has its KV
        return any(not sequence.is_admitted for sequence in self.sequences.values())

    @property
    def reservable_pages(self) -> int:
        """Available pages, less one for each sequence that may still grow."""
        growing = sum(self._may_grow(sequence) for sequence in self.sequences.values())
        return max(0, self.shared.available - growing)

    def _may_grow(self, sequence: DecodeSequence) -> bool:
        return not sequence.is_drained and len(sequence.pages) < self.config.pages_for(full_tokens(sequence.asked))

    # ------------------------------------------------------------ reservations

    def reserve(self, message: Reserve, now_s: float) -> None:
        """Answers at once, or when the pages of the prompt that lower tiers hold have arrived."""
        owner = message.attempt
        if owner in self.awaiting_fetch:
            return  # a repeated message
        if owner not in self.sequences and self._has_room(message):
            names = self._readable(message)
            if self.tiers.fetch(owner, names, self.reservable_pages, now_s, message.holders):
                self.awaiting_fetch[owner] = message
                return
        self._answer(message, now_s)

    def on_fetched(self, owners: Sequence[Attempt], now_s: float) -> None:
        """Answers the reservations among `owners`, whose fetches have ended; prompts go on with the next step."""
        for owner in owners:
            message = self.awaiting_fetch.pop(owner, None)
            if message is not None:
                self._answer(message, now_s)

    def forget(self, owner: Attempt) -> None:
        """Drops an attempt that ends while its fetch is under way."""
        self.awaiting_fetch.pop(owner, None)
        self.tiers.fetches.forget(owner)

    def _readable(self, message: Reserve) -> tuple[PageHash, ...]:
        return self.shared.to_read(message, here=message.prefill_worker == self.config.worker)

    def _has_room(self, message: Reserve) -> bool:
        _, cost = self.shared.room_for(self._readable(message), predicted_pages(message, self.config))
        return self.free_slots >= 1 and cost <= self.reservable_pages

    def _answer(self, message: Reserve, now_s: float) -> None:
        owner = message.attempt
        sequence = self.sequences.get(owner)
        if sequence is None and self._has_room(message):
            sequence = self._make_sequence(message, now_s)
        if sequence is None:
            detail = f"{max(0, self.free_slots)} slots and {self.reservable_pages} pages are free"
            self.out.tell_router(Refused(owner, detail))
        elif sequence.handoff.state is State.RESERVED:
            self.out.tell_router(Reserved(owner, tuple(sequence.pages), sequence.cached_pages, self.config.page_size))

    def _make_sequence(self, message: Reserve, now_s: float) -> DecodeSequence:
        """Locks the cached pages of the prompt, takes the other pages and starts the lease."""
        handoff = Handoff(message.attempt, HandoffRole.DESTINATION, now_s + message.lease_s)
        self.out.arm(handoff)
        held = self.shared.lock(self._readable(message))
        found = len(held.pages)
        pages = self.shared.take(predicted_pages(message, self.config) - found, handoff.owner, PageState.IN_FLIGHT)
        assert pages is not None, "a reservation takes no more pages than are reservable"
        handoff.take(Signal.RESERVE)
        sequence = DecodeSequence(handoff, message, order_of(message), [*held.pages, *pages], found, held)
        self.sequences[handoff.owner] = sequence
        return sequence

    def is_reserved(self, owner: Attempt) -> bool:
        """Returns True if the sequence is reserved and none of its KV has arrived."""
        sequence = self.sequences.get(owner)
        return sequence is not None and sequence.handoff.state is State.RESERVED

    def pages_of(self, owner: Attempt) -> tuple[int, ...]:
        return tuple(self.sequences[owner].pages)

    # ------------------------------------------------------------ arriving KV

    def on_renew(self, message: Renew, source: WorkerId, now_s: float) -> None:
        """Renews the lease. A source that still waits although the sequence is complete missed the Ack."""
        sequence = self.sequences.get(message.attempt)
        if sequence is None:
            self.out.send(source, Abort(message.attempt, "no such reservation"))
        elif sequence.is_admitted:
            self.out.send(source, Ack(sequence.owner, sequence.arrivals.wire_s))
        else:
            sequence.renew(now_s)

    def on_commit(self, message: Commit, source: WorkerId, now_s: float) -> None:
        owner = message.attempt
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.source != source:
            self.out.send(source, Abort(owner, "no such reservation"))
        elif sequence.is_admitted:
            self.out.send(source, Ack(owner, sequence.arrivals.wire_s))  # a repeated COMMIT: the Ack may be lost
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
        if not self.admit_if_complete(sequence, now_s):
            if self.has_early_admission:
                insort(self._incomplete, sequence, key=lambda each: each.order)
            self._watch_parts(sequence, now_s)

    def on_kv_arrived(self, event: KVArrived, now_s: float) -> None:
        """Inserts a part that its sequence still lacks; drops one that is late, repeated or not for it."""
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
        self.admit_if_complete(sequence, now_s)

    def _ask_again(self, sequence: DecodeSequence, parts: list[int], what: str, reason: FinishReason) -> None:
        """Requests parts again, whose pages the source still holds; too many tries of one part end the handoff."""
        tried = max(sequence.arrivals.asked[part] for part in parts)
        if tried >= self.config.part_tries:
            self._give_up(sequence, f"part {parts[0]} {what} {tried + 1} times", reason)
            return
        for part in parts:
            sequence.arrivals.asked[part] += 1
            self.out.send(sequence.source, Resend(sequence.owner, part))

    def _give_up(self, sequence: DecodeSequence, detail: str, reason: FinishReason = FinishReason.ERROR) -> None:
        self.end(sequence.owner, Signal.ABORT)
        self.out.abort(sequence.owner, detail, reason)

    def _watch_parts(self, sequence: DecodeSequence, now_s: float) -> None:
        sequence.arrivals.moved_s = now_s
        self.out.set_timer(now_s + self.config.part_timeout_s, timer_of(Timer.PARTS, sequence.owner))

    def on_parts_late(self, owner: Attempt, now_s: float) -> None:
        """Requests the parts that COMMIT counts and that are missing, once none has arrived for `part_timeout_s`."""
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

    # ------------------------------------------------------------ admission

    def commit_here(self, owner: Attempt, manifest: Commit, now_s: float) -> None:
        """Completes the handoff of a colocated worker, whose KV was computed in the sequence's own pages."""
        sequence = self.sequences[owner]
        needed = tail_tokens(sequence.asked, self.config)
        assert len(manifest.tail) == needed, f"{len(manifest.tail)} last tokens of a prompt where {needed} are needed"
        sequence.commit(manifest)
        self.admit_if_complete(sequence, now_s)

    def admit_if_complete(self, sequence: DecodeSequence, now_s: float) -> bool:
        """Admits the sequence if all parts that COMMIT counts have arrived; returns True if it did."""
        if sequence.handoff.state is not State.COMMITTED or sequence.arrivals.missing:
            return False
        sequence.handoff.take(Signal.COMPLETE)
        if sequence.source != self.config.worker:
            self.out.send(sequence.source, Ack(sequence.owner, sequence.arrivals.wire_s))
        self.shared.pool.move(sequence.own_pages, sequence.owner, PageState.LIVE)
        if not self._leave_early_admission(sequence):
            insort(self._ready, sequence, key=lambda each: each.order)
        elif sequence.is_drained:
            self.drain(sequence)
        cached_tokens = sequence.cached_pages * self.config.page_size
        self.out.reach(sequence.owner, Mark.COMMITTED, now_s, sequence.arrivals.wire_s, cached_tokens)
        return True

    def seat_ready(self) -> None:
        """Gives free slots to complete sequences in order; if none waits, to sequences whose KV may follow."""
        while self._ready and (slot := self._slot_for_complete()) is not None:
            self._seat(self._ready.pop(0), slot)
        while not self._ready and self._seat_early():
            continue

    def _seat(self, sequence: DecodeSequence, slot: int) -> None:
        sequence.slot = slot
        self.slots.seat(slot, sequence)

    def _slot_for_complete(self) -> int | None:
        """Returns a slot for a complete sequence; if need be the one of the last early-admitted sequence."""
        slot = self.slots.free_slot(self._early)
        if slot is None and self._early:
            self._unseat_early(max(self._early.values(), key=lambda each: each.order))
            slot = self.slots.free_slot(self._early)
        return slot

    # ------------------------------------------------------------ early admission

    def gates(self, microbatch: int) -> tuple[Gate, ...]:
        """Returns the gates at which the stages of the microbatch's next step have to wait."""
        sequence = self._early.get(microbatch)
        return () if sequence is None else gates_of(sequence, self.config.layer_groups)

    @property
    def gated_microbatches(self) -> list[int]:
        """Microbatches whose step may wait at a gate: they take no other step."""
        return [microbatch for microbatch, sequence in self._early.items() if sequence.is_on_device]

    def _seat_early(self) -> bool:
        """Gives a slot of an empty microbatch to the first sequence whose first stage lacks no part."""
        stages = self.config.layer_groups
        able = (each for each in self._incomplete if all(gate.stage for gate in gates_of(each, stages)))
        sequence = next(able, None)
        slot = self.slots.slot_of_an_empty_microbatch() if sequence else None
        if sequence is None or slot is None:
            return False
        self._incomplete.remove(sequence)
        self._seat(sequence, slot)
        self._early[self.slots.microbatch_of(slot)] = sequence
        return True

    def _unseat_early(self, sequence: DecodeSequence) -> None:
        """Takes the slot from an early-admitted sequence, which later decodes again from its first token."""
        assert sequence.slot is not None, "an early-admitted sequence has a slot"
        self._cancel_early_steps(sequence)
        self.slots.clear(sequence.slot, on_device=sequence.is_on_device)
        sequence.step_back()
        insort(self._incomplete, sequence, key=lambda each: each.order)

    def _cancel_early_steps(self, sequence: DecodeSequence) -> None:
        """Discards the tokens of its steps in flight. The step waits no longer: it runs before its pages are reused."""
        if not self._leave_early_admission(sequence) or not sequence.is_on_device:
            return
        self.out.put(OpenGates(sequence.owner))
        for step in self.steps.values():
            for slot in [slot for slot, each in step.sequences.items() if each is sequence]:
                del step.sequences[slot]

    def _leave_early_admission(self, sequence: DecodeSequence) -> bool:
        """Returns True if the sequence had a slot before its KV was complete."""
        if not self.has_early_admission:
            return False
        if sequence in self._incomplete:
            self._incomplete.remove(sequence)
        found = [microbatch for microbatch, each in self._early.items() if each is sequence]
        for microbatch in found:
            del self._early[microbatch]
        return bool(found)

    # ------------------------------------------------------------ results of steps

    def on_step_done(self, event: StepDone, now_s: float) -> None:
        """Sends the tokens of a finished step to the router and ends the sequences that are complete with them."""
        step = self.steps.pop(event.step_id)
        self.slots.end_step(step.microbatch)
        self.turn_times.done(event.step_id, now_s)
        controller = self.draft_controller
        if controller is not None:
            controller.on_done(event.step_id, [len(drawn) for _, drawn in event.decode if drawn], now_s)
        draws: list[TokenDelta] = []
        first_steps = 0
        over: list[tuple[DecodeSequence, FinishReason]] = []
        for slot, drawn in event.decode:
            sequence = step.sequences.get(slot)
            if sequence is None or sequence.handoff.over:
                continue  # stopped, preempted, aborted or unseated while this step was in flight
            assert drawn, f"slot {slot} masked itself though its sequence goes on"
            if not sequence.has_stepped:
                sequence.has_stepped = True
                first_steps += 1
                self.out.reach(sequence.owner, Mark.FIRST_STEP, now_s)
            kept, reason = tokens_until_end(sequence, drawn)
            if controller is not None and not step.turns:
                controller.on_row_read(sequence, step.widths[slot], len(drawn))
            sequence.read(step.widths[slot], step.least(slot), len(drawn))
            if kept:
                index = sequence.num_output + len(sequence.output)
                sequence.output.extend(sampled.token for sampled in kept)
                draws.append(TokenDelta(sequence.owner, index, kept))
            if reason is not None:
                over.append((sequence, reason))
            elif sequence.is_drained and sequence.slot is not None:
                self.drain(sequence)  # more of a draft was accepted than was certain
        self.out.draw(draws)
        self.is_quiet = not over and len(draws) == len(event.decode) == len(step.sequences) and not first_steps
        for sequence, reason in over:
            num_output = sequence.num_output + len(sequence.output)
            self.out.end(sequence.owner, reason, num_output, now_s, sequence.sampling)
            self.end(sequence.owner, Signal.RELEASE, good=reason is not FinishReason.ERROR)

    def on_step_failed(self, step_id: int, reason: str) -> None:
        step = self.steps.pop(step_id)
        self.slots.end_step(step.microbatch)
        self.turn_times.failed(step_id)
        if self.draft_controller is not None:
            self.draft_controller.on_failed(step_id)
        self.slots.retire_again(step.microbatch, step.retired)
        for sequence in step.sequences.values():
            if self.end(sequence.owner, Signal.ABORT):
                self.out.abort(sequence.owner, reason)

    # ------------------------------------------------------------ ends

    def end(self, owner: Attempt, signal: Signal, *, good: bool = False) -> bool:
        """Releases everything that the sequence holds; False if there is none or its state cannot take the signal.

        good: no step or transfer of it failed, so its full pages stay in the prefix cache.
        """
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.handoff.can_take(signal):
            return False
        self._drained.discard(owner)
        if self.draft_controller is not None:
            self.draft_controller.forget(sequence)
        good = good and (sequence.is_admitted or signal is Signal.RELEASE)
        sequence.handoff.take(signal)
        del self.sequences[owner]
        self._leave_slot(sequence)
        self._release_pages(sequence, good=good)
        return True

    def renew(self, owner: Attempt, now_s: float) -> None:
        """Renews the lease of a sequence, if there is one."""
        if owner in self.sequences:
            self.sequences[owner].renew(now_s)

    def expire(self, owner: Attempt, now_s: float) -> bool:
        """Ends a sequence whose deadline is over; returns True if it did."""
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < sequence.handoff.deadline_s:
            self.out.arm(sequence.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)

    def drain(self, sequence: DecodeSequence) -> None:
        """Frees the slot and pages of a sequence whose last step is dispatched, for the steps behind that one.

        Pages that may enter the prefix cache wait for the last tokens, which name them, or until pages run out.
        """
        self._drained.add(sequence.owner)
        self._leave_slot(sequence)
        if not self.config.prefix_caching:
            self._release_pages(sequence, good=False)

    def _leave_slot(self, sequence: DecodeSequence) -> None:
        self._cancel_early_steps(sequence)
        if sequence.slot is not None:
            self.slots.clear(sequence.slot, on_device=sequence.is_on_device)
            sequence.slot = None
        elif sequence in self._ready:
            self._ready.remove(sequence)

    def _release_pages(self, sequence: DecodeSequence, *, good: bool) -> None:
        """Releases its pages; full pages of `good` KV enter the prefix cache, but for the last token, never fed."""
        names = ()
        if good and sequence.pages:
            names = self.shared.names_with(sequence.asked, sequence.tail, sequence.output[:-1])
        self.shared.keep(names, sequence.pages, sequence.own_pages, sequence.owner)
        self.shared.release(sequence.held)
        sequence.held = NOTHING
        sequence.pages.clear()

    # ------------------------------------------------------------ preemption

    def take_page(self, sequence: DecodeSequence) -> int | None:
        """Returns a page, if need be by preempting the sequence of lowest rank; None if there is no other to preempt.

        A sequence that waits for KV preempts none, and one alone among sequences that are not complete waits for them.
        """
        while (page := self.shared.take(1, sequence.owner, PageState.LIVE)) is None:
            if self._release_drained():
                continue
            if not sequence.is_admitted:
                return None
            holding = [each for each in self.sequences.values() if each.pages and each.is_admitted]
            victim = max(holding, key=lambda each: each.order)
            if victim is sequence and len(holding) == 1:
                return None  # the incomplete sequences will end, or expire
            self.preempt(victim)
            if victim is sequence:
                return None
        return page[0]

    def _release_drained(self) -> bool:
        """Releases the pages of one sequence that only waits for its last tokens; False if there is none."""
        found = next((each for each in self.sequences.values() if each.pages and each.is_drained), None)
        if found is not None:
            self._release_pages(found, good=False)
        return found is not None

    def preempt(self, sequence: DecodeSequence) -> None:
        """Releases all that the sequence holds; the router starts it again with the tokens that it has."""
        detail = f"no free page of {self.shared.pool.num_pages} for a request of higher rank"
        self.out.tell_router(Preempted(sequence.owner, tuple(sequence.output), detail))
        self.park(sequence)
        self.end(sequence.owner, Signal.RELEASE, good=True)

    def park(self, sequence: DecodeSequence) -> None:
        """Copies its full pages to the tiers below, from which the sequence resumes here or on another worker."""
        if self.tiers.demotions is not None and sequence.is_admitted and sequence.pages:
            names = self.shared.names_with(sequence.asked, sequence.tail, sequence.output[:-1])
            self.tiers.demotions.park(names, sequence.pages[: len(names)])


def gates_of(sequence: DecodeSequence, stages: tuple[tuple[int, int], ...]) -> tuple[Gate, ...]:
    """Returns for each stage that lacks KV of its layers a gate with the parts that it has to wait for."""
    arrivals = sequence.arrivals
    waits = [tuple(part for part in arrivals.missing if arrivals.part_holds(part, layers)) for layers in stages]
    return tuple(Gate(stage, sequence.owner, parts) for stage, parts in enumerate(waits) if parts)


def check_manifest(manifest: Commit, sequence: DecodeSequence, config: WorkerConfig) -> None:
    """Raises PeerMismatch or SenselessWord if the Commit does not fit the reservation."""
    ours, theirs, source = config.kv_layout, manifest.layout, sequence.source
    if ours and theirs and ours != theirs:
        raise PeerMismatch(f"{source} shipped pages of {theirs}, {config.worker} holds {ours}")
    if manifest.num_tokens != sequence.num_tokens:
        raise SenselessWord(f"{source} commits {manifest.num_tokens} tokens of {sequence.num_tokens}")
    needed = tail_tokens(sequence.asked, config)
    if len(manifest.tail) != needed:
        raise SenselessWord(f"{source} commits a tail of {len(manifest.tail)} tokens, {config.worker} needs {needed}")


def tokens_until_end(
    sequence: DecodeSequence, drawn: tuple[Sampled, ...]
) -> tuple[tuple[Sampled, ...], FinishReason | None]:
    """Returns the tokens that belong to the answer, and why it ends with them; None if it goes on."""
    if len(drawn) > 1 and not _may_end(sequence, drawn):
        return drawn, None
    for count, sampled in enumerate(drawn, 1):
        reason = end_of(sequence.sampling, sampled, len(sequence.output) + count)
        if reason is not None:
            return drawn[: count - sampled.broken], reason
    return drawn, None


def _may_end(sequence: DecodeSequence, drawn: tuple[Sampled, ...]) -> bool:
    """Returns False only if the sequence goes on after all of these tokens: a fast test for the usual case."""
    sampling, tokens = sequence.sampling, [sampled.token for sampled in drawn]
    if drawn[0].logprob is not None or len(sequence.output) + len(tokens) >= sampling.max_tokens:
        return True
    return BROKEN in tokens or any(stop in tokens for stop in sampling.stop_token_ids)
