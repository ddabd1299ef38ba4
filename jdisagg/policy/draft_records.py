"""What is known of drafts: how often their tokens are those drawn, and whether a sequence's end stood in it before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jdisagg.core.worker_config import MIN_NGRAM

FADE = 0.97  # of what was learnt, with each step that is
BELIEF = 4.0  # trials that what others' drafts came to is worth


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
    """Whether the last tokens of a sequence stood in it before, so that n-grams have a guess."""

    def __init__(self) -> None:
        self.known = False
        self._end: tuple[int, ...] = ()
        self._before: set[tuple[int, ...]] = set()

    def note(self, tokens: Iterable[int]) -> None:
        """These follow."""
        for token in tokens:
            self._end = (*self._end, token)[-MIN_NGRAM:]
            whole = len(self._end) == MIN_NGRAM
            self.known = whole and self._end in self._before
            if whole:
                self._before.add(self._end)


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Of one sequence: what its drafts came to, apart where its end is known and where it is not."""

    repeats: Repeats = field(default_factory=Repeats)
    read: int = 0  # tokens of its output that `repeats` has
    likely: Acceptance = field(default_factory=Acceptance)
    unlikely: Acceptance = field(default_factory=Acceptance)

    def of(self, *, likely: bool) -> Acceptance:
        return self.likely if likely else self.unlikely
