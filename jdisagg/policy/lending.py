"""Pages that other workers ask for: what this one holds of them is read, and sent as records.

The asker has its reservation, its deadline and its second source, so that nothing here waits for anybody: what is not
held, or too much at once, is said at once (NoPages). Pages of HBM are packed in program order, before whatever might
write them, and need no lock; those below are locked for as long as it takes to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from jdisagg.core.messages import FetchPages, NoPages
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.tiers import MovePages, PageMove, PagesMoved, Tier
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefix_cache import PageHash, packed, unpacked
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.tier_pool import TierPool

MOST_PAGES = 512  # read for others at once; who asks for more meanwhile is told that there are none


class Lending:
    """Of one worker. `tiers` are its own below HBM, the upper one first."""

    def __init__(self, shared: SharedPages, tiers: dict[Tier, TierPool], out: Outbox) -> None:
        self.shared, self.tiers, self.out = shared, tiers, out
        self.under_way: dict[Attempt, PageMove] = {}
        self._owners = count(1)

    def asked(self, message: FetchPages, asker: WorkerId) -> None:
        if any((each.peer, each.asked) == (asker, message.attempt) for each in self.under_way.values()):
            return  # said twice
        names = unpacked(message.names)
        wanted = len(names) - message.first
        room = MOST_PAGES - sum(len(unpacked(each.names)) for each in self.under_way.values())
        found = self._found(names, message.first) if wanted <= room else None
        if found is None:
            self.out.send(asker, NoPages(message.attempt))
            return
        tier, pages = found
        owner = Attempt(RequestId(f"lent by {self.shared.config.worker}"), next(self._owners))
        lent = packed(names[message.first : message.first + len(pages)])
        move = PageMove(owner, tier, Tier.PEER, lent, pages, peer=asker, asked=message.attempt)
        self.under_way[owner] = move
        self.out.put(MovePages(move))

    def _found(self, names: Sequence[PageHash], first: int) -> tuple[Tier, tuple[int, ...]] | None:
        """The tier that has the first of them, and where they lie there."""
        if self.shared.cache.match(names) > first:
            held = self.shared.hold(names)
            self.shared.release(held)
            return Tier.HBM, held.pages[first:]
        for tier, pool in self.tiers.items():
            size = pool.match(names[first:])
            if size:
                return tier, pool.lock(names[first : first + size])
        return None

    def moved(self, event: PagesMoved) -> None:
        """They were read, and are on their way, or never will be."""
        move = self.under_way.pop(event.move.owner)
        pool = self.tiers.get(move.source)
        if pool is not None:
            for name, good in zip(unpacked(move.names), event.good, strict=True):
                pool.unlock(name, good=good or bool(event.failed), used=good)
        if not any(event.good) and move.asked is not None:
            self.out.send(move.peer, NoPages(move.asked, event.failed))
