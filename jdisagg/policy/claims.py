"""Promised places on a decode worker: who has one holds no page, until the source claims what it is about to ship.

Claims are granted in the order of requests, nobody overtakes, and reservations that ask for pages at once wait behind
them. A claim that finds no room in time goes back to the router's line: what was predicted was wrong, and nothing is
lost but time. There it asks for pages before its prompt is computed again, so that nobody is sent back twice.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from jdisagg.core.messages import Abort, Claim, Granted, Preempted, Reserve, Reserved
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.policy.decode_sequence import DecodeSequence, promised
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.handoff import End, Handoff, Signal, Timer, timer_of
from jdisagg.policy.planning import order_of


@dataclass(slots=True, eq=False)
class Claimed:
    """A place whose prompt is about to be shipped, or would be."""

    sequence: DecodeSequence
    deadline_s: float = math.inf  # from when its prompt is computed


class Claims:
    """Of one worker. `take` gives a sequence its pages; False where there is no room."""

    def __init__(self, side: DecodeSide, take: Callable[[DecodeSequence], bool]) -> None:
        self.side, self.config, self.out, self._take = side, side.config, side.out, take
        self.waiting: list[Claimed] = []  # in order

    def promise(self, message: Reserve, now_s: float) -> None:
        """Keeps a place; asked again, it says so again."""
        owner = message.attempt
        if owner not in self.side.sequences:
            handoff = Handoff(owner, End.DESTINATION, now_s + message.lease_s)
            handoff.take(Signal.PROMISE)
            self.out.arm(handoff)
            self.side.sequences[owner] = DecodeSequence(handoff, message, order_of(message), [])
        if promised(self.side.sequences[owner]):
            self.out.tell_router(Reserved(owner, (), 0, self.config.page_size))

    def claim(self, message: Claim, source: WorkerId, now_s: float) -> None:
        owner = message.attempt
        sequence = self.side.sequences.get(owner)
        if sequence is None or sequence.source != source:
            self.out.send(source, Abort(owner, "no such reservation"))
            return
        if not promised(sequence):
            self._say(sequence)  # said twice: the answer may have been lost
            return
        sequence.renew(now_s)
        claimed = self._find(owner)
        if claimed is None:
            claimed = Claimed(sequence)
            insort(self.waiting, claimed, key=lambda each: each.sequence.order)
        if message.computed and claimed.deadline_s == math.inf:
            claimed.deadline_s = now_s + self.config.claim_timeout_s
            self.out.set_timer(claimed.deadline_s, timer_of(Timer.CLAIM, owner))

    def _find(self, owner: Attempt) -> Claimed | None:
        return next((each for each in self.waiting if each.sequence.owner == owner), None)

    def grant(self) -> None:
        """As many as there is room for, first come first."""
        while self.waiting and self._take(self.waiting[0].sequence):
            self._say(self.waiting.pop(0).sequence)

    def _say(self, sequence: DecodeSequence) -> None:
        self.out.send(sequence.source, Granted(sequence.owner, tuple(sequence.pages), sequence.cached_pages))

    def forget(self, owner: Attempt) -> None:
        self.waiting = [each for each in self.waiting if each.sequence.owner != owner]

    def late(self, owner: Attempt, now_s: float) -> None:
        """It has waited for long enough, and goes back to the line."""
        claimed = self._find(owner)
        if claimed is None or claimed.deadline_s == math.inf:
            return
        if now_s < claimed.deadline_s:
            self.out.set_timer(claimed.deadline_s, timer_of(Timer.CLAIM, owner))
            return
        self.forget(owner)
        self.side.end(owner, Signal.ABORT)
        detail = f"no room in {self.config.claim_timeout_s:g} s for KV that was computed: {self.side.free_slots} slots"
        self.out.tell_router(Preempted(owner, (), f"{detail} and {self.side.reservable_pages} pages are free"))
