"""What drafts may lose against plain steps, booked in such steps; and when they are tried though nothing says that they
pay.

Whatever is thought of drafts may be wrong, and is when a text changes. So what they lost may never be more than a small
share of all steps, and what was gained long ago pays for nothing. A step counts as long as it usually takes: what a
machine does besides is no doing of drafts.
"""

from __future__ import annotations

import math

SHARE = 0.01  # of plain steps, that drafts may lose
START = 3.0  # plain steps that may be lost before anything is known
MOST = 6.0  # plain steps that may be in the account
MOST_SAVED = 64.0  # so, where a trial takes more than that: what it guesses by has to read first
OWED = 6.0  # that may be wanting in it where texts are seen: what a first time was longer may be the machine's doing
SEEN = 0.25  # of plain steps that guesses would have gained, as texts were seen to go on, and that count as gained
ROUND = 4  # steps of a trial that had to read first: so much is learnt for it
FIRST_WAIT, MOST_WAIT = 8.0, 256.0  # plain steps for each that a trial may lose: one that finds nothing doubles them


class DraftAccount:
    """Of one worker. `steps`: plain ones that are in it; None before the first has ended. owed: that may be wanting."""

    def __init__(self, owed: float = math.inf) -> None:
        self.steps: float | None = None
        self._owed, self._most = owed, MOST

    def save_for(self, steps: float) -> None:
        """So many are wanted of it one day."""
        self._most = max(MOST, min(steps, MOST_SAVED))

    def affords(self, steps: float) -> bool:
        return self.steps is not None and self.steps >= steps

    def stake(self, steps: float) -> None:
        """One is dispatched that may lose so many; they are given back when it has ended."""
        if self.steps is not None:
            self.steps -= steps

    def verified(self, stake: float, gained: float) -> None:
        """One ended that had staked so many, and gained or lost these."""
        self._put(stake + gained)

    def plain(self, steps: float) -> None:
        """So many turns ended that verified no drafts."""
        self._put(SHARE * steps)

    def missed(self, steps: float) -> None:
        """So many would have been gained just now by what is not afforded."""
        self._put(SEEN * min(steps, 1.0))

    def _put(self, steps: float) -> None:
        self.steps = max(-self._owed, min((START if self.steps is None else self.steps) + steps, self._most))


class Trials:
    """When drafts are tried of which nothing says that they pay: the seldomer, the oftener it was for nothing."""

    def __init__(self) -> None:
        self._wait, self._left = FIRST_WAIT, 0.0
        self._lost, self._more = 0.0, 0  # of a trial of several steps: plain ones that it may lose, and steps to come

    @property
    def due(self) -> bool:
        return self._left <= 0

    def step(self, tokens: int) -> None:
        """One was dispatched, of so many tokens a row at least."""
        self._left -= tokens

    def begun(self, steps: float, *, reads: bool = False) -> None:
        """A step of one, that may lose so many plain steps."""
        self._lost += steps
        self._more = ROUND - 1 if reads else max(0, self._more - 1)
        if self._more:
            return
        self._left, self._lost = self._wait * self._lost, 0.0
        self._wait = min(2 * self._wait, MOST_WAIT)

    def found(self) -> None:
        """Drafts pay: where they do no more, it is soon seen whether they do again."""
        self._wait, self._lost, self._more = FIRST_WAIT, 0.0, 0
