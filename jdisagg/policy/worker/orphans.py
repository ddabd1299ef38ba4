"""The sequences that a worker goes on decoding after its router is lost, for a grace time, until a router adopts them.

Everything else ends at once, handoffs above all, because their messages went through the router. An orphaned sequence
goes on drawing tokens and ends, and no client receives them. A router that is found receives the list (`Kept`). For
what it adopts, it receives the tokens from the index that it names. What no router has adopted when the grace time is
over is aborted.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.events import Effect, Send
from jdisagg.core.messages import Abort, Adopt, Drawn, Ended, Kept, Preempted, TokenDelta
from jdisagg.core.request import Attempt, Sampled
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.sequence import DecodeSequence

GRACE_TIMER = "router"
SPARE = 16  # ended sequences whose tokens are still remembered before they are searched for and dropped


class OrphanedSequences:
    """The orphaned sequences of one worker and their tokens. Without a grace time there are none."""

    def __init__(self, grace_s: float, decode: DecodePhase) -> None:
        self.grace_s, self.decode, self.out = grace_s, decode, decode.out
        self.orphans: dict[Attempt, DecodeSequence] = {}  # not adopted by a router
        self._drawn: dict[Attempt, list[Sampled]] = {}  # decoded tokens, in order
        self._ended: dict[Attempt, Ended] = {}  # of the orphans
        self._until_s = 0.0

    def record(self, effects: Sequence[Effect]) -> None:
        """Remembers after each event what was sent to the router, because it might not arrive there."""
        for effect in effects:
            match effect:
                case Send(_, Drawn(deltas)):
                    for delta in deltas:
                        self._record_tokens(delta)
                case Send(_, Ended() as ended) if ended.attempt in self.orphans:
                    self._ended[ended.attempt] = ended
                case Send(_, Preempted(attempt)) | Send(_, Abort(attempt)):
                    self.forget(attempt)
                case _:
                    continue
        if len(self._drawn) > len(self.decode.sequences) + len(self.orphans) + SPARE:
            living = self.decode.sequences.keys() | self.orphans.keys()
            self._drawn = {attempt: drawn for attempt, drawn in self._drawn.items() if attempt in living}

    def _record_tokens(self, delta: TokenDelta) -> None:
        sequence = self.orphans.get(delta.attempt) or self.decode.sequences.get(delta.attempt)
        if sequence is not None:
            drawn = self._drawn.setdefault(delta.attempt, [])
            known = sequence.num_output + 1 + len(drawn)  # the first token comes with COMMIT; repeats are known
            drawn.extend(delta.sampled[max(0, known - delta.index) :])

    def on_router_lost(self, now_s: float) -> set[Attempt]:
        """Returns the sequences that go on; everything else is to be aborted."""
        if not self.grace_s:
            return set()
        self.orphans |= {owner: each for owner, each in self.decode.sequences.items() if each.is_admitted}
        self._start_grace(now_s)
        return set(self.orphans)

    def on_router_found(self, now_s: float) -> None:
        for owner, sequence in self.orphans.items():
            self.out.tell_router(Kept(owner, sequence.num_output))
        self._start_grace(now_s)

    def _start_grace(self, now_s: float) -> None:
        if self.orphans:
            self._until_s = now_s + self.grace_s
            self.out.set_timer(self._until_s, GRACE_TIMER)

    def adopt(self, message: Adopt) -> None:
        """Sends the tokens from the index that the router names, and the end if the sequence is over."""
        owner = message.attempt
        sequence = self.orphans.pop(owner, None)
        if sequence is None or sequence.first is None:
            self.out.abort(owner, "it was kept for a router no longer")
            return
        drawn = (sequence.first, *self._drawn.get(owner, ()))[max(0, message.index - sequence.num_output) :]
        if drawn:
            self.out.draw([TokenDelta(owner, max(message.index, sequence.num_output), drawn)])
        ended = self._ended.pop(owner, None)
        if ended is not None:
            self.out.tell_router(ended)

    def expire(self, now_s: float) -> list[Attempt]:
        """Returns the sequences to abort now that the timer has fired."""
        if now_s < self._until_s:
            return []
        expired = [*self.orphans]
        for owner in expired:
            self.forget(owner)
        return expired

    def forget(self, owner: Attempt) -> None:
        for table in (self.orphans, self._drawn, self._ended):
            table.pop(owner, None)
