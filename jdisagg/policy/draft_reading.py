"""What a draft model has still to read of each sequence before it can guess, and what that takes.

A sequence is read when its row is asked for a guess (`engine/draft_reading.py`), so that a worker whose drafts pay
nowhere reads nothing. To choose, it must be known beforehand: here is the same arithmetic, of tokens that were
dispatched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jdisagg.core.request import Attempt
from jdisagg.core.worker_config import DRAFT_READS_LATELY, WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.program_times import DOUBT, usual

KEPT = 17  # last times
FADE = 0.9  # of how long answers were, with each that is over
LEFT = 0.25  # of that length, that one which is longer already is thought to go on


class Reads(NamedTuple):
    """What a step reads: whether anything, and whose rows have no guess of the model's as it does not do for them."""

    any: bool
    unguessed: frozenset[Attempt]


NOTHING_READ = Reads(any=False, unguessed=frozenset())


@dataclass
class ReadingTimes:
    """How long one chunk takes, beside the rows of its step."""

    _last: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT))
    _since: int = 0  # other steps, since there is one

    def learn(self, seconds: float) -> None:
        self._last.append(max(0.0, seconds))
        self._since = 0

    def step(self) -> None:
        """Another, that read nothing."""
        self._since += 1

    def seconds(self, plain_s: float) -> float:
        """As long as a plain step while nothing is known. An only time may have been the machine's doing: what it was
        longer is believed less and less."""
        if not self._last:
            return plain_s
        found = usual(self._last)
        return found if len(self._last) > 1 or found <= plain_s else plain_s + (found - plain_s) * DOUBT**self._since


class UnreadTokens:
    """Of one worker's sequences. `room`: tokens that one step reads; 0: what guesses needs to read nothing. kept: what
    reads them comes with the model's pages."""

    def __init__(self, room: int = 0, *, kept: bool = False) -> None:
        self.room, self.kept, self.times = room, kept, ReadingTimes()
        self._fed: dict[Attempt, int] = {}
        self._length: float | None = None  # tokens that answers had
        self._formed = NOTHING_READ
        self.unguessed = frozenset[Attempt]()  # of the step that ended last

    @classmethod
    def of(cls, config: WorkerConfig) -> UnreadTokens:
        return cls(config.draft_reads, kept=config.draft_layers > 0)

    def of_sequence(self, sequence: DecodeSequence) -> int:
        """Tokens that are to be read before it can be guessed; few are read with a guess."""
        if not self.room:
            return 0
        fed = self._fed.get(sequence.owner, sequence.num_tokens if self.kept else 0)
        unread = _position(sequence) - fed
        return unread if unread >= DRAFT_READS_LATELY else 0

    def chunks(self, sequences: Iterable[DecodeSequence]) -> int:
        """That all of these take: one a step."""
        return -(-sum(map(self.of_sequence, sequences)) // self.room) if self.room else 0

    def tokens_left(self, sequence: DecodeSequence) -> float:
        """That it is thought to draw, at least one."""
        left = float(sequence.sampling.max_tokens - sequence.dispatched)
        if self._length is not None:
            left = min(left, max(self._length - sequence.dispatched, LEFT * self._length))
        return max(1.0, left)

    def formed(self) -> Reads:
        """Of the step that was formed last, once."""
        found, self._formed = self._formed, NOTHING_READ
        return found

    def form(self, sequences: Sequence[DecodeSequence], widths: Sequence[int]) -> None:
        """A step is formed of these rows, that verifies drafts."""
        room, reads, unguessed = self.room, False, set[Attempt]()
        for sequence, width in zip(sequences, widths, strict=True):
            if width == 1 or not self.room:
                continue
            unread, position = self.of_sequence(sequence), _position(sequence)
            number = min(unread, room)
            room, reads = room - number, reads or number > 0
            if unread - number >= DRAFT_READS_LATELY:
                self._fed[sequence.owner] = position - unread + number
                unguessed.add(sequence.owner)
            else:
                self._fed[sequence.owner] = position + width - 1
        self._formed = Reads(reads, frozenset(unguessed))

    def took(self, sequence: DecodeSequence, missed: int) -> None:
        """Its row drew so many tokens fewer than it might have: what was guessed in their place is none of it."""
        if missed and sequence.owner in self._fed and sequence.owner not in self.unguessed:
            self._fed[sequence.owner] -= missed

    def forget(self, sequence: DecodeSequence) -> None:
        self._fed.pop(sequence.owner, None)
        if self.room and sequence.output:
            length = float(len(sequence.output))
            self._length = length if self._length is None else FADE * self._length + (1 - FADE) * length


def _position(sequence: DecodeSequence) -> int:
    """Of the token that its next step feeds, at most."""
    return sequence.num_tokens + sequence.dispatched - 1
