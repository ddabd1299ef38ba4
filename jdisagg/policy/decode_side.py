"""The decode side of a worker: sequences held for requests, sequences in slots, steps dispatched ahead of their tokens.

A step draws a token of a sequence, or up to as many as its row is wide. Its pages are granted before the step that may
need them, its slot and pages are free once its last step is dispatched (later steps run later on the device), and a
stop is learnt late: steps dispatched meanwhile find the slot masked. Which rows a step holds says `scheduler.py`.
"""

from __future__ import annotations

from bisect import insort

from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Ack, Commit, Preempted
from jdisagg.core.request import Attempt
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence, Step, admitted
from jdisagg.policy.early_admission import EarlyAdmission
from jdisagg.policy.handoff import Signal, State
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.planning import full_tokens, tail_tokens
from jdisagg.policy.shared_pages import NOTHING, SharedPages
from jdisagg.policy.slots import Slots
from jdisagg.policy.speculation import make_draft_controller
from jdisagg.policy.turns import TurnTimes


class DecodeSide:
    """All sequences of one worker."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: Outbox) -> None:
        self.config, self.shared, self.out = config, shared, out
        self.pool = shared.pool
        self.slots: Slots[DecodeSequence] = Slots(config)
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
