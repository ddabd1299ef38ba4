"""The reservation calendar of one decode worker: how much of it is predicted to be free at each moment to come.

A stay is one sequence's: what it holds when it comes, growing evenly to what it holds when it leaves. What is there now
has come already. Pure arithmetic: where the times come from is said in `promises.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Stay(NamedTuple):
    """Times are of the router's clock; those in the past are as now. It may never leave (inf): then it is full-grown at
    once."""

    comes_s: float
    leaves_s: float
    first: float  # that it holds when it comes
    last: float  # when it leaves
    here: bool = False  # it has come: what it holds is not free now


class _Turn(NamedTuple):
    """What changes at a moment: so much less, and from then on so much less each second."""

    at_s: float
    taken: float
    slope: float


def least_free(free: float, stays: Iterable[Stay], now_s: float, from_s: float, until_s: float) -> float:
    """The least that is free at any moment from `from_s` to `until_s`, of which there is `free` now. Who leaves makes
    room for who comes at the same moment."""
    least, slope, at_s = math.inf, 0.0, now_s
    for turn_s, turns in groupby(
        sorted(turn for stay in stays for turn in _turns(stay, now_s)), lambda each: each.at_s
    ):
        if turn_s > from_s:  # nobody shrinks: between two turns it is least at the end
            least = min(least, free - slope * (min(turn_s, until_s) - at_s))
        if turn_s > until_s:
            return least
        free, at_s = free - slope * (turn_s - at_s), turn_s
        for turn in turns:
            free, slope = free - turn.taken, slope + turn.slope
        if turn_s >= from_s:
            least = min(least, free)
    return min(least, free)  # all that grow have left


def _turns(stay: Stay, now_s: float) -> list[_Turn]:
    comes_s, leaves_s = max(now_s, stay.comes_s), max(now_s, stay.leaves_s)
    first = 0.0 if stay.here else stay.first
    if leaves_s == math.inf:
        return [_Turn(comes_s, first + stay.last - stay.first, 0.0)]
    if leaves_s <= comes_s:
        return [_Turn(comes_s, first - stay.last, 0.0)] if stay.here else []
    slope = (stay.last - stay.first) / (leaves_s - comes_s)
    return [_Turn(comes_s, first, slope), _Turn(leaves_s, -stay.last, -slope)]


def fits(free: float, stays: Iterable[Stay], new: Stay, now_s: float) -> bool:
    """Whether there is room for one more at every moment of its stay, beside all others."""
    from_s = max(now_s, new.comes_s)
    return least_free(free, [*stays, new], now_s, from_s, new.leaves_s) >= 0.0
