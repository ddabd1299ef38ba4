"""How long answers turn out, learnt from those that ended, by key: as quantiles, for a mean is silent on the long."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field

from jdisagg.core.request import Request

KEPT = 256  # lengths of one key, the latest
ENOUGH = 8  # from which on a key's own are asked
MOST_KEYS = 1024  # the one that learnt nothing for longest is forgotten first

Key = tuple[str, int]


def key_of(request: Request) -> Key:
    """Alike is what one tenant asks for with one limit."""
    return request.salt, request.sampling.max_tokens


@dataclass(slots=True)
class Lately:
    """The latest lengths of one key, in the order of time and of size."""

    latest: list[int] = field(default_factory=list[int])
    ordered: list[int] = field(default_factory=list[int])

    def learn(self, length: int) -> None:
        self.latest.append(length)
        insort(self.ordered, length)
        if len(self.latest) > KEPT:
            del self.ordered[bisect_right(self.ordered, self.latest.pop(0)) - 1]

    def quantile(self, share: float, over: int) -> int | None:
        """Of those longer than `over`; None where there are none."""
        first = bisect_right(self.ordered, over)
        longer = len(self.ordered) - first
        return self.ordered[first + min(longer - 1, int(share * longer))] if longer else None


@dataclass(slots=True)
class Lengths:
    """Of all keys, and of everybody together."""

    by_key: OrderedDict[Key, Lately] = field(default_factory=OrderedDict[Key, Lately])
    everybody: Lately = field(default_factory=Lately)

    def learn(self, key: Key, length: int) -> None:
        self.everybody.learn(length)
        self.by_key.setdefault(key, Lately()).learn(length)
        self.by_key.move_to_end(key)
        if len(self.by_key) > MOST_KEYS:
            self.by_key.popitem(last=False)

    def quantile(self, key: Key, share: float, over: int = 0) -> int:
        """Output tokens that the `share` of answers like this one, which have more than `over`, do not go beyond; the
        key's own limit where nothing is known. One that has outgrown all others is held to get as long again."""
        limit = key[1]
        own = self.by_key.get(key)
        lately = own if own is not None and len(own.latest) >= ENOUGH else self.everybody
        if len(lately.latest) < ENOUGH:
            return limit
        found = lately.quantile(share, over)
        return min(limit, 2 * over if found is None else found)
