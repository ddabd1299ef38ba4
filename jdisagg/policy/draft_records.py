"""What is known of drafts: how often their tokens are those drawn, by how a sequence's end stood in it before.

Of n-grams that is seen of every sequence, verified or not (`shadow_drafts.py`); of a model's drafts, and of those that
a grammar forces, only of steps that verified them. It is kept beyond a request, for those like it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jdisagg.core.request import Attempt, SamplingParams
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.shadow_drafts import KNOWN, Outcome, ShadowDrafts

FADE = 0.985  # of what was learnt, with each step that is
BELIEF = 16.0  # trials that what others' drafts came to is worth
KINDS = 64  # of requests, that are told apart
TRIED = 8.0  # tokens of drafts, after which what they come to is known
LEAST = 0.02  # chance of a guess below which a row takes no further one
AT_FIRST = (0.0, 0.5, 0.8)  # how often a token of a draft is thought to be drawn, by its place
LATE = 1.0  # plain steps by which a sequence that is later than another counts e times as much
DOUBTED = 30.0  # tokens of drafts, by which what was thought of them is known to have been right
FADE_OF_STEPS = 0.98  # of what was thought and of what came, with each step
AHEAD = -1.0  # and at least so late does one count that drafts have brought forward
MOST_LATE = 32.0  # and at most, whatever happened to it: an exponential soon knows no number


@dataclass(slots=True)
class Acceptance:
    """How often a token of a draft is what is drawn; late steps count for more than early ones."""

    tried: float = 0.0
    taken: float = 0.0

    def learn(self, drafts: int, taken: int) -> None:
        """Of a draft of so many tokens, the first `taken` were drawn; what stood behind the next one says nothing."""
        self.tried = FADE * self.tried + (taken + 1 if taken < drafts else drafts)
        self.taken = FADE * self.taken + taken

    def rate(self, others: float) -> float:
        """Where little is known, that of `others`."""
        return (self.taken + BELIEF * others) / (self.tried + BELIEF)


def expected_tokens(rate: float, drafts: int) -> float:
    """That a row draws which verifies so many, each taken as often as `rate` if those before it were
    (Leviathan et al. 2023, equation 1)."""
    tokens = 1.0
    for _ in range(drafts):
        tokens = 1.0 + rate * tokens
    return tokens


def acceptances() -> tuple[Acceptance, Acceptance, Acceptance]:
    """At each place."""
    return Acceptance(), Acceptance(), Acceptance()


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Of one sequence: what its drafts came to, and those of others like it."""

    others: tuple[Acceptance, ...]  # of requests like it
    shadow: ShadowDrafts | None  # None where only steps that verify tell
    read: int = 0  # tokens of its output that `shadow` has
    own: tuple[Acceptance, ...] = field(default_factory=acceptances)
    lateness: float = 0.0  # plain steps: by so much it is later than without drafts


class Thought:
    """What drafts were thought to come to, beside what they did: of many that seem to pay those are taken of which too
    much was thought."""

    def __init__(self) -> None:
        self._more, self._came = 0.0, 0.0

    @property
    def right(self) -> float:
        return min(1.0, (DOUBTED + self._came) / (DOUBTED + self._more))

    def learn(self, more: float, came: float) -> None:
        """Tokens beyond the first, of a row in the mean: as thought, and as drawn."""
        self._more, self._came = FADE_OF_STEPS * self._more + more, FADE_OF_STEPS * self._came + came


class DraftRecords:
    """Of one worker: what drafts came to, in all, of requests alike and of each sequence."""

    def __init__(self, drafts: int, *, by_ngrams: bool, late: int = 0) -> None:
        """drafts: tokens of the longest. by_ngrams: they are what stood behind an end before, so that where none did,
        there is none. late: tokens of a row that are drawn before what is chosen."""
        self.drafts, self.by_ngrams, self.late, self._all = drafts, by_ngrams, late, acceptances()
        self._kinds: dict[tuple[str, bool, bool], tuple[Acceptance, ...]] = {}
        self._records: dict[Attempt, DraftRecord] = {}
        self.thought = Thought()

    # ------------------------------------------------------------ what is known

    def width(self, sequence: DecodeSequence, most: int) -> int:
        """Tokens that its row may draw of a step whose rows draw up to so many: its own drafts say how far they go."""
        record = self._records.get(sequence.owner)
        tried = sum(each.tried for each in record.own) if record else 0.0
        if tried < TRIED:
            return most
        chance = rate = self.rate(sequence)
        width = min(2, most)
        while width < most and chance * rate >= LEAST:
            width, chance = width + 1, chance * rate
        return width

    def rate(self, sequence: DecodeSequence) -> float:
        """How often a token of its draft is thought to be what it draws, 0 where there is no draft."""
        if not sequence.sampling.speculative:
            return 0.0
        record = self._records.get(sequence.owner) or self._begin(sequence)
        place = self._place(sequence, record)
        others = record.others[place].rate(self._all[place].rate(AT_FIRST[place]))
        return record.own[place].rate(others)

    def weight(self, sequence: DecodeSequence) -> float:
        """What its tokens count for: the later it is already, the more. So what is gained is not taken of a few whose
        drafts are wrong while others' are right: the sum that is kept low is one of the latenesses' exponentials
        (Freund and Schapire 1997), which is as low as the latest lets it be."""
        record = self._records.get(sequence.owner)
        return math.exp(record.lateness / LATE) if record else 1.0

    # ------------------------------------------------------------ what is learnt

    def learn(self, sequence: DecodeSequence, drafts: int, taken: int) -> None:
        """A step verified so many tokens of its draft, of which so many were drawn."""
        record = self._records.get(sequence.owner) or self._begin(sequence)
        if record.shadow is None:
            self._note(record, Outcome(KNOWN, drafts, taken))

    def delay(self, sequence: DecodeSequence, steps: float) -> None:
        """It is later now by so many plain steps."""
        record = self._records.get(sequence.owner)
        if record is not None:
            record.lateness = min(max(AHEAD, record.lateness + steps), MOST_LATE)

    def forget(self, sequence: DecodeSequence) -> None:
        """It is over: what it drew last is still learnt of."""
        record = self._records.pop(sequence.owner, None)
        if record is not None:
            self._place(sequence, record)

    def _place(self, sequence: DecodeSequence, record: DraftRecord) -> int:
        """As far as its tokens have been read."""
        shadow = record.shadow
        if shadow is None:
            return KNOWN  # whatever its end is
        if record.read < len(sequence.output):
            for outcome in shadow.drew(sequence.output[record.read :]):
                self._note(record, outcome)
            record.read = len(sequence.output)
        return shadow.place

    def _note(self, record: DraftRecord, outcome: Outcome) -> None:
        place, drafts, taken = outcome
        for each in (self._all, record.others, record.own):
            each[place].learn(drafts, taken)

    def _begin(self, sequence: DecodeSequence) -> DraftRecord:
        shadowed = self.by_ngrams and not sequence.sampling.grammar  # only the engine knows what a grammar forces
        shadow = ShadowDrafts(self.drafts, self.late) if shadowed else None
        if shadow is not None:
            shadow.read(sequence.tail)
        record = self._records[sequence.owner] = DraftRecord(self._like(sequence.sampling), shadow)
        return record

    def _like(self, sampling: SamplingParams) -> tuple[Acceptance, ...]:
        """What drafts of requests for the same model came to, drawn alike."""
        kind = sampling.adapter.name if sampling.adapter else "", sampling.greedy, bool(sampling.grammar)
        found = self._kinds.pop(kind, None) or acceptances()
        self._kinds[kind] = found  # the last one used
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        return found
