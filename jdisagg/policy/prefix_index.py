"""Who keeps each page, so that of very many workers only those that hold a prompt's beginning are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jdisagg.core.request import WorkerId
from jdisagg.policy.prefix_cache import PageHash


class PrefixIndex:
    """Pages by name, in tuples: nearly all have one keeper, and a set of one takes four times the room."""

    def __init__(self) -> None:
        self._keepers: dict[PageHash, tuple[WorkerId, ...]] = {}

    def keepers(self, name: PageHash) -> tuple[WorkerId, ...]:
        return self._keepers.get(name, ())

    def add(self, worker: WorkerId, names: Iterable[PageHash]) -> None:
        keepers, alone = self._keepers, (worker,)
        for name in names:
            before = keepers.get(name)
            if before is None:
                keepers[name] = alone
            elif worker not in before:
                keepers[name] = (*before, worker)

    def drop(self, worker: WorkerId, names: Iterable[PageHash]) -> None:
        for name in names:
            rest = tuple(each for each in self._keepers.get(name, ()) if each != worker)
            if rest:
                self._keepers[name] = rest
            else:
                self._keepers.pop(name, None)

    def nearest(self, names: Sequence[PageHash], most: int, turn: int) -> list[WorkerId]:
        """Up to `most` workers that keep a beginning of these pages, the longest beginnings first; where too many keep
        the same, those from place `turn` on, round and round.

        Looked for are the longest beginning that anybody keeps, half of it, a quarter, and so on: who keeps a page
        keeps those before it, which are evicted later.
        """
        found, depth = dict[WorkerId, None](), self._longest(names)
        while depth and len(found) < most:
            keepers = self._keepers.get(names[depth - 1], ())
            first = turn % len(keepers) if len(keepers) > most else 0
            for worker in (*keepers[first:], *keepers[:first])[:most]:
                found[worker] = None
            depth //= 2
        return list(found)[:most]

    def _longest(self, names: Sequence[PageHash]) -> int:
        """Leading pages that anybody keeps, by halving."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] in self._keepers else (low, middle - 1)
        return low
