"""What crosses between the devices of one program: its collectives, the bytes of each, and over which links.

Bytes are those that the busiest device must send, by the algorithm that sends the fewest over the slow links: within
each host first, then between hosts, each device its own share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One instruction. `groups`: places among the program's devices, of a permute (from, to); (): all of them."""

    kind: str
    size_bytes: int  # of the whole array that a device sends or ends up with, whichever is more
    groups: Groups
    depth: int  # loops that it is in, one within the other

    def sent(self, hosts: Sequence[int]) -> Sent:
        """By the busiest device, once. hosts: of each of the program's devices."""
        if self.kind == "collective-permute":
            across = [hosts[one] != hosts[other] for one, other in self.groups]
            return Sent(self.size_bytes * (not all(across)), self.size_bytes * any(across))
        found = [self._group_sent([hosts[place] for place in group]) for group in self.groups or (range(len(hosts)),)]
        return Sent(max(each.inside for each in found), max(each.between for each in found))

    def _group_sent(self, hosts: Sequence[int]) -> Sent:
        number, size = len(set(hosts)), self.size_bytes
        most = max(Counter(hosts).values())
        inside, between = size * (most - 1) / most, size / most * (number - 1) / number
        if self.kind == "all-to-all":
            return Sent(size * (most - 1) / len(hosts), size * (len(hosts) - most) / len(hosts))
        if self.kind == "collective-broadcast":
            return Sent(size * (most > 1), size * (number > 1))
        return Sent(2 * inside, 2 * between) if self.kind == "all-reduce" else Sent(inside, between)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of one device: within its host (NVLink), or slice (ICI), and to other hosts."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.between + other.between)

    def times(self, number: int) -> Sent:
        return Sent(self.inside * number, self.between * number)


def sent_by(collectives: Sequence[Collective], hosts: Sequence[int], loops: Sequence[int] = ()) -> Sent:
    """All of a program. loops: how often each goes round, from the outermost in."""
    found = [each.sent(hosts).times(prod(loops[: each.depth])) for each in collectives]
    return sum(found, Sent())


def counted(collectives: Sequence[Collective]) -> dict[str, int]:
    """By kind."""
    return dict(Counter(each.kind for each in collectives))
