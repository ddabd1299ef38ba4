"""What a worker keeps when its router is gone: the sequences that it decodes, for its grace, until a router asks.

All else goes at once, handoffs above all, for their words went by the router. What is kept goes on as ever, draws its
tokens and ends, and nobody hears of it. A router that is found is told what there is (Kept); what it adopts is told
from where it says, and what nobody has adopted when the grace is over is given up.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.events import Effect, Send
from jdisagg.core.messages import Abort, Adopt, Drawn, Ended, Kept, Preempted, TokenDelta
from jdisagg.core.request import Attempt, Sampled
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.sequence import DecodeSequence, admitted

GRACE_TIMER = "router"
SPARE = 16  # sequences that have ended whose tokens are still remembered, before they are looked for


class OrphanedSequences:
    """Of one worker. Without a grace it keeps nothing, and remembers nothing."""

    def __init__(self, grace_s: float, decode_side: DecodePhase, out: EffectBuffer) -> None:
        self.grace_s, self.decode_side, self.out = grace_s, decode_side, out
        self.kept: dict[Attempt, DecodeSequence] = {}  # that no router has asked for
        self._drawn: dict[Attempt, list[Sampled]] = {}  # by decoding, in order
        self._ended: dict[Attempt, Ended] = {}  # of those that are kept
        self._until_s = 0.0

    def noted(self, effects: list[Effect]) -> list[Effect]:
        """After every event: what is said to the router, and might not reach it."""
        if self.grace_s:
            self._note(effects)
        return effects

    def _note(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, Drawn(deltas)):
                    for delta in deltas:
                        self._note_drawn(delta)
                case Send(_, Ended() as ended) if ended.attempt in self.kept:
                    self._ended[ended.attempt] = ended
                case Send(_, Preempted(attempt)) | Send(_, Abort(attempt)):
                    self._forget(attempt)
                case _:
                    continue
        if len(self._drawn) > len(self.decode_side.sequences) + len(self.kept) + SPARE:
            living = self.decode_side.sequences.keys() | self.kept.keys()
            self._drawn = {attempt: drawn for attempt, drawn in self._drawn.items() if attempt in living}

    def _note_drawn(self, delta: TokenDelta) -> None:
        sequence = self.kept.get(delta.attempt) or self.decode_side.sequences.get(delta.attempt)
        if sequence is not None:
            drawn = self._drawn.setdefault(delta.attempt, [])
            known = sequence.num_output + 1 + len(drawn)  # the first comes with COMMIT; what is told again is known
            drawn.extend(delta.sampled[max(0, known - delta.index) :])

    def router_lost(self, now_s: float) -> set[Attempt]:
        """What is kept from now on; the rest is to be given up."""
        if not self.grace_s:
            return set()
        self.kept |= {owner: each for owner, each in self.decode_side.sequences.items() if admitted(each)}
        self._wait(now_s)
        return set(self.kept)

    def router_found(self, now_s: float) -> None:
        for owner, sequence in self.kept.items():
            self.out.tell_router(Kept(owner, sequence.num_output))
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        if self.kept:
            self._until_s = now_s + self.grace_s
            self.out.set_timer(self._until_s, GRACE_TIMER)

    def adopt(self, message: Adopt) -> None:
        owner = message.attempt
        sequence = self.kept.pop(owner, None)
        if sequence is None or sequence.first is None:
            self.out.abort(owner, "it was kept for a router no longer")
            return
        drawn = (sequence.first, *self._drawn.get(owner, ()))[max(0, message.index - sequence.num_output) :]
        if drawn:
            self.out.draw([TokenDelta(owner, max(message.index, sequence.num_output), drawn)])
        ended = self._ended.pop(owner, None)
        if ended is not None:
            self.out.tell_router(ended)

    def run_out(self, now_s: float) -> list[Attempt]:
        """The timer fired: what is to be given up now."""
        if now_s < self._until_s:
            return []
        given_up = [*self.kept]
        for owner in given_up:
            self._forget(owner)
        return given_up

    def aborted(self, owner: Attempt) -> None:
        """A router does not want it."""
        self._forget(owner)

    def _forget(self, owner: Attempt) -> None:
        for book in (self.kept, self._drawn, self._ended):
            book.pop(owner, None)
