"""What a worker tells the router of one of its tiers: all of it when it is asked, and then each change, by number.

One word an event, as names alone: a name tells of all pages before it, so that whoever holds the same names knows what
of a prompt is held. Nothing is noted until somebody has asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from jdisagg.core.messages import PAGES_A_WORD, CacheChanged, CacheHeld
from jdisagg.core.tiers import Tier
from jdisagg.policy.prefix_cache import PageHash, packed

CHECK_BITS = 64


def check_of(names: Iterable[PageHash], before: int = 0) -> int:
    """Of a set of names, or of what is left or added to one of the check `before`."""
    check = before
    for name in names:
        check ^= name & ((1 << CHECK_BITS) - 1)
    return check


class Kept(Protocol):
    """Pages that are kept for their content: the prefix cache, or a tier below it."""

    note: Callable[[PageHash, bool], None]

    def names(self) -> tuple[PageHash, ...]: ...


class CacheChanges:
    """Of one tier."""

    def __init__(self, cache: Kept, tier: Tier = Tier.HBM) -> None:
        self.followed, self.tier = False, tier
        self._cache, self._number, self._check = cache, 0, 0
        self._added: dict[PageHash, None] = {}  # since the last word, in order
        self._removed: dict[PageHash, None] = {}
        cache.note = self.noted

    def noted(self, name: PageHash, held: bool) -> None:
        if self.followed:
            more, less = (self._added, self._removed) if held else (self._removed, self._added)
            if name in less:
                del less[name]  # it came and went, or went and came: nothing happened
            else:
                more[name] = None

    def all_of_it(self) -> list[CacheHeld]:
        """The whole, in parts of a bounded size; from now on changes are noted."""
        self._forget_changes()
        self.followed, names = True, self._cache.names()
        self._check = check_of(names)
        parts = [names[start : start + PAGES_A_WORD] for start in range(0, len(names), PAGES_A_WORD)] or [()]
        return [CacheHeld(self._number, packed(part), index, len(parts), self.tier) for index, part in enumerate(parts)]

    def since_told(self) -> CacheChanged | None:
        """What has changed since the last word, as the next one; None where nothing has."""
        if not self._added and not self._removed:
            return None
        self._number += 1
        self._check = check_of(self._removed, check_of(self._added, self._check))
        word = CacheChanged(self._number, self._check, packed(self._added), packed(self._removed), self.tier)
        self._forget_changes()
        return word

    def stop(self) -> None:
        """Who asked is gone."""
        self.followed = False
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._added.clear()
        self._removed.clear()
