"""Layers of a stage that are alike, period by period: what a device program goes round in place of writing out.

A program whose layers are a loop is compiled as fast as one period of them, whatever the depth. What the loop holds is
one array for all its turns: every matrix of the period, stacked by turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
LONGEST_PERIOD = 8  # layers; the longest that a known family has is six
FEWEST_TURNS = 4  # below it a loop saves nothing worth its stacked arrays


@dataclass(frozen=True, slots=True)
class Repeat:
    """Places `first` to `stop` of a stage are `turns` times the same `period` kinds of layers.

    What is *compact* holds the first period in place of all of them.
    """

    first: int
    period: int
    turns: int

    @property
    def stop(self) -> int:
        return self.first + self.period * self.turns

    def compact(self, layers: Sequence[Item]) -> list[Item]:
        """Those before the loop, one period of it, and those behind it."""
        return [*layers[: self.first + self.period], *layers[self.stop :]]

    def places(self, compact: int) -> range:
        """All places of the stage that a place of the compact one stands for."""
        if compact < self.first:
            return range(compact, compact + 1)
        if compact < self.first + self.period:
            return range(compact, self.stop, self.period)
        place = compact + self.period * (self.turns - 1)
        return range(place, place + 1)


def repeating(kinds: Sequence[Hashable]) -> Repeat | None:
    """The loop that leaves the fewest layers to write out; None where none is worth it. Of two the shorter period."""
    found = [_longest(kinds, period) for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1)]
    best = max(found, key=lambda each: (each.turns - 1) * each.period, default=None)
    return best if best is not None and best.turns >= FEWEST_TURNS else None


def _longest(kinds: Sequence[Hashable], period: int) -> Repeat:
    """The longest run of this period, the first of equals."""
    best, run = Repeat(0, period, 1), 0
    for place in range(period, len(kinds)):
        run = run + 1 if kinds[place] == kinds[place - period] else 0
        turns = run // period + 1
        if turns > best.turns:
            best = Repeat(place + 1 - period * turns, period, turns)
    return best
