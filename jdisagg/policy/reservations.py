"""Reservations of a worker's decode side: who gets pages and a place in line, at once or when a fetch has ended."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.messages import Refused, Reserve, Reserved
from jdisagg.core.request import Attempt
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.handoff import End, Handoff, Signal, State
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.planning import order_of, predicted_pages
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.tiers import Tiers


class Reservations:
    """Makes sequences; what becomes of them is the decode side's."""

    def __init__(self, side: DecodeSide, tiers: Tiers) -> None:
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
        handoff = Handoff(owner, End.DESTINATION, now_s + message.lease_s)
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
