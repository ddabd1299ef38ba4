"""Tiers below HBM of toy machines in virtual time: records by page number, in the pool by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.engine.toy import ToyExecutor, ToyShipment
from jdisagg.policy.cache.prefix_cache import unpacked

MOVE_S = {Tier.DRAM: (1e-4, 1e-5), Tier.DISK: (1e-3, 1e-4), Tier.POOL: (2e-3, 2e-4), Tier.PEER: (1e-3, 1e-4)}
Place = tuple[str, Tier, int]  # worker ("" for the pool), tier, page number or name


@dataclass
class TierYard:
    """`move_s`: seconds of a move and of each page, by its slower end."""

    move_s: dict[Tier, tuple[float, float]] = field(default_factory=lambda: dict(MOVE_S))
    records: dict[Place, np.ndarray] = field(default_factory=dict)
    lent: dict[tuple[WorkerId, PageMove], np.ndarray] = field(default_factory=dict)
    read: dict[tuple[WorkerId, PageMove], ToyShipment] = field(default_factory=dict)
    dead: set[Tier] = field(default_factory=set)  # tiers that do not answer
    lying: set[Tier] = field(default_factory=set)  # tiers whose pages come back broken, as their digests tell
    hung: set[Tier] = field(default_factory=set)  # tiers that never say anything
    coming: dict[tuple[WorkerId, Attempt], PageMove] = field(default_factory=dict)  # from peers, not here yet
    moved: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)  # pages that arrived

    def places(self, worker: WorkerId, tier: Tier, move: PageMove, pages: tuple[int, ...]) -> list[Place]:
        if tier is Tier.POOL:
            return [("", tier, name) for name in unpacked(move.names)]
        return [(worker, tier, page) for page in pages]

    def begin(self, worker: WorkerId, machine: ToyExecutor, move: PageMove) -> tuple[float, PagesMoved] | None:
        """How long it takes, and what comes of it; None where nothing ever does."""
        ends = {move.source, move.destination}
        number = len(unpacked(move.names))
        if ends & self.hung:
            return None
        if ends & self.dead:
            return 1e-3, PagesMoved(move, (False,) * number, failed="it does not answer")
        took_s = max(first + number * each for first, each in (self.move_s[end] for end in ends if end in self.move_s))
        records, good = self._source(worker, machine, move, number)
        if move.destination is Tier.PEER:
            self.lent[worker, move] = records
        elif move.destination is Tier.HBM:
            self.read[worker, move] = machine.land_pages(move, records, good)
        else:
            places = self.places(worker, move.destination, move, move.destination_pages)
            for place, record, fine in zip(places, records, good, strict=True):
                if fine:
                    self.records[place] = record.copy()
        self.moved[move.source, move.destination] += sum(good)
        return took_s, PagesMoved(move, good, took_s, sum(good) * machine.record_bytes)

    def arrive(self, lender: WorkerId, machine: ToyExecutor, move: PageMove, took_s: float) -> PagesMoved | None:
        """What a peer lent is at the asker, whose machine this is; None where that waits for it no longer."""
        records = self.lent.pop((lender, move))
        mine = self.coming.pop((move.peer, move.asked), None) if move.asked is not None else None
        if mine is None or mine.names[: len(move.names)] != move.names or mine.peer != lender:
            return None
        wanted = len(mine.destination_pages)
        good = tuple(at < len(records) for at in range(wanted))
        filled = np.zeros((wanted, machine.record_bytes), np.uint8)
        filled[: len(records)] = records
        self.read[move.peer, mine] = machine.land_pages(mine, filled, good)
        self.moved[Tier.PEER, Tier.HBM] += sum(good)
        return PagesMoved(mine, good, took_s, len(records) * machine.record_bytes)

    def _source(
        self, worker: WorkerId, machine: ToyExecutor, move: PageMove, number: int
    ) -> tuple[np.ndarray, tuple[bool, ...]]:
        if move.source is Tier.HBM:
            return machine.pack_pages(move.source_pages).read()[0], (True,) * number
        places = self.places(worker, move.source, move, move.source_pages)
        good = tuple(place in self.records and move.source not in self.lying for place in places)
        nothing = np.zeros(machine.record_bytes, np.uint8)
        return np.stack([self.records.get(place, nothing) for place in places]), good
