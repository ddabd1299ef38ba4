"""What is known of drafts: how often their tokens are those drawn, by how a sequence's end stood in it before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jdisagg.core.request import Attempt, SamplingParams
from jdisagg.core.worker_config import MIN_NGRAM
from jdisagg.policy.decode_sequence import DecodeSequence

FADE = 0.97  # of what was learnt, with each step that is
BELIEF = 4.0  # trials that what others' drafts came to is worth
TOKEN_BITS = 31
END = (1 << TOKEN_BITS * MIN_NGRAM) - 1
KINDS = 64  # of requests, that are told apart
TRIED = 8.0  # tokens of drafts, after which what they come to is known
LEAST = 0.02  # chance of a guess below which a row takes no further one
LONG = 4  # ends in a row that stood there before: the sequence says something again
UNKNOWN, KNOWN, AGAIN = range(3)  # an end that never stood there, one that did, one behind LONG that did
AT_FIRST = (0.0, 0.5, 0.8)  # how often a token of a draft is thought to be drawn behind each


@dataclass(slots=True)
class Acceptance:
    """How often a token of a draft is what is drawn; late steps count for more than early ones."""

    tried: float = 0.0
    taken: float = 0.0

    def learn(self, drafts: int, taken: int) -> None:
        """Of a draft of so many tokens, the first `taken` were drawn; what stood behind the next one says nothing."""
        self.tried = FADE * self.tried + min(taken + 1, drafts)
        self.taken = FADE * self.taken + taken

    def rate(self, others: float) -> float:
        """Where little is known, that of `others`."""
        return (self.taken + BELIEF * others) / (self.tried + BELIEF)


def expected_tokens(rate: float, drafts: int) -> float:
    """That a row draws which verifies so many, each taken as often as `rate` if those before it were
    (Leviathan et al. 2023, equation 1)."""
    return sum(rate**taken for taken in range(drafts + 1))


class Repeats:
    """For how many of its last tokens a sequence's end stood in it before each time, so that n-grams have a guess."""

    def __init__(self) -> None:
        self.run = 0
        self._end, self._held = 0, 0
        self._before: set[int] = set()

    @property
    def place(self) -> int:
        return AGAIN if self.run >= LONG else KNOWN if self.run else UNKNOWN

    def note(self, tokens: Iterable[int]) -> None:
        """These follow."""
        for token in tokens:
            self._end = (self._end << TOKEN_BITS | token) & END
            self._held += 1
            if self._held >= MIN_NGRAM:
                self.run = self.run + 1 if self._end in self._before else 0
                self._before.add(self._end)


def acceptances() -> tuple[Acceptance, Acceptance, Acceptance]:
    """Behind an end of each kind."""
    return Acceptance(), Acceptance(), Acceptance()


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Of one sequence: what its drafts came to, and those of others like it."""

    others: tuple[Acceptance, ...]  # of requests like it
    repeats: Repeats = field(default_factory=Repeats)
    read: int = 0  # tokens of its output that `repeats` has
    own: tuple[Acceptance, ...] = field(default_factory=acceptances)


class DraftRecords:
    """Of one worker: what drafts came to, in all, of requests alike and of each sequence. by_ngrams: drafts are an end
    that stood in the sequence before, so that where none did, there is none."""

    def __init__(self, *, by_ngrams: bool) -> None:
        self.by_ngrams, self._all = by_ngrams, acceptances()
        self._kinds: dict[tuple[str, bool, bool], tuple[Acceptance, ...]] = {}
        self._records: dict[Attempt, DraftRecord] = {}

    @property
    def knows_none(self) -> bool:
        """Whether it has been seen often enough that behind an end which never stood there before nothing is drawn."""
        unknown = self._all[UNKNOWN]
        return unknown.tried > TRIED and unknown.rate(0.0) < LEAST

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
        record = self._record(sequence)
        place = self._place(sequence, record)
        if place == UNKNOWN and self.knows_none:
            return 0.0
        others = record.others[place].rate(self._all[place].rate(AT_FIRST[place]))
        return record.own[place].rate(others)

    def _place(self, sequence: DecodeSequence, record: DraftRecord) -> int:
        """Whether there is a draft for it at all, as far as its tokens have been read."""
        if not self.by_ngrams or sequence.sampling.grammar:
            return KNOWN  # only the engine knows what a grammar forces
        if record.read < len(sequence.output):
            record.repeats.note(sequence.output[record.read :])
            record.read = len(sequence.output)
        return record.repeats.place

    def _record(self, sequence: DecodeSequence) -> DraftRecord:
        record = self._records.get(sequence.owner)
        if record is None:
            record = self._records[sequence.owner] = DraftRecord(self._like(sequence.sampling))
            if self.by_ngrams:
                record.repeats.note(sequence.tail)
        return record

    def _like(self, sampling: SamplingParams) -> tuple[Acceptance, ...]:
        """What drafts of requests for the same model came to, drawn alike."""
        kind = sampling.adapter.name if sampling.adapter else "", sampling.greedy, bool(sampling.grammar)
        found = self._kinds.pop(kind, None) or acceptances()
        self._kinds[kind] = found  # the last one used
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        return found

    def forget(self, owner: Attempt) -> None:
        """Its sequence is over."""
        self._records.pop(owner, None)

    def learn(self, sequence: DecodeSequence, drafts: int, taken: int) -> None:
        """Of a draft of so many of its tokens, so many were drawn."""
        record = self._record(sequence)
        place = self._place(sequence, record)
        for each in (self._all, record.others, record.own):
            each[place].learn(drafts, taken)
