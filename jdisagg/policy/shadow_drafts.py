"""What n-grams would have guessed of a sequence, beside what it drew: known without verifying a single guess.

A draft of n-grams is a function of tokens, and whether it would have been taken is seen as soon as they are there,
whatever steps drew them. The guesses are those of `engine/ngrams.py` and of `drafting.guessed` on the devices; where an
end stood before is found by chains, as Deutsch's LZ77 does (RFC 1951, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jdisagg.core.worker_config import MAX_NGRAM, MIN_NGRAM

TOKEN_BITS = 31
END = (1 << TOKEN_BITS * MIN_NGRAM) - 1
CHAIN = 16  # places of one end that are looked at for the longest that is alike
APART = 4  # tokens from the beginning of a draft that is followed to that of the next: a sample, for the host's sake
LONG = 4  # ends in a row that stood there before: the sequence says something again
UNKNOWN, KNOWN, AGAIN = range(3)  # an end that never stood there, one that did, one behind LONG that did


class Outcome(NamedTuple):
    """Of a draft that nobody verified."""

    place: int  # where it began, as the host saw it then: UNKNOWN, KNOWN or AGAIN
    drafts: int  # its tokens
    taken: int  # the first ones, that were drawn


class ShadowDrafts:
    """Of one sequence, of as many tokens each as `drafts`, that begin `late` tokens behind what the host has read."""

    def __init__(self, drafts: int, late: int = 0) -> None:
        self.drafts, self.late = drafts, late
        self._tokens: list[int] = []
        self._end = 0
        self._last: dict[int, int] = {}  # where each end stood last
        self._earlier: list[int] = []  # of each place, where its end stood before; -1: nowhere
        self._runs: list[int] = []  # of each place, for how many of the last ones their ends stood there before
        self._began, self._source = -APART, -1  # of the draft that is followed: its token's place, and what it repeats

    @property
    def place(self) -> int:
        return self._place(0)

    def _place(self, late: int) -> int:
        """So many tokens ago."""
        run = self._runs[-1 - late] if late < len(self._runs) else 0
        return AGAIN if run >= LONG else KNOWN if run else UNKNOWN

    def read(self, tokens: Iterable[int]) -> None:
        """These follow, and were not drawn: the prompt's."""
        for token in tokens:
            self._append(token)

    def drew(self, tokens: Iterable[int]) -> Iterator[Outcome]:
        """These follow: what drafts that began before them, or among them, came to. Where no end stood there before,
        a draft has no token that is right."""
        for token in tokens:
            taken = len(self._tokens) - 1 - self._began
            if self._source >= 0:
                right = self._tokens[self._source + 1 + taken % (self._began - self._source)] == token
                if not right or taken + 1 == self.drafts:
                    self._source = -1
                    yield Outcome(self._of, self.drafts, taken + right)
            self._append(token)
            if self._source < 0 and taken + 1 >= APART:
                self._began, self._of = len(self._tokens) - 1, self._place(self.late)
                if self._runs[-1]:
                    self._source = self._longest()
                else:
                    yield Outcome(self._of, self.drafts, 0)

    def guess(self) -> list[int]:
        """What is guessed to follow; nothing where its end never stood there."""
        if not self._runs or not self._runs[-1]:
            return []
        last, source = len(self._tokens) - 1, self._longest()
        return [self._tokens[source + 1 + ahead % (last - source)] for ahead in range(self.drafts)]

    def _append(self, token: int) -> None:
        self._end = (self._end << TOKEN_BITS | token) & END
        at = len(self._tokens)
        self._tokens.append(token)
        if at + 1 < MIN_NGRAM:
            self._earlier.append(-1)
            self._runs.append(0)
            return
        before = self._last.get(self._end, -1)
        self._last[self._end] = at
        self._earlier.append(before)
        self._runs.append(self._runs[-1] + 1 if before >= 0 else 0)

    def _longest(self) -> int:
        """Where the longest end that stood there before stood last."""
        tokens, last = self._tokens, len(self._tokens) - 1
        found, most, place = -1, 0, self._earlier[last]
        for _ in range(CHAIN):
            alike = MIN_NGRAM
            while alike < MAX_NGRAM and place >= alike and tokens[place - alike] == tokens[last - alike]:
                alike += 1
            if alike > most:
                found, most = place, alike
            place = self._earlier[place]
            if most == MAX_NGRAM or place < 0:
                break
        return found
