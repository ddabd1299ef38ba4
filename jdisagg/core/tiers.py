"""Where KV may lie, and the words for bringing whole pages from one of a worker's tiers to another, or to a worker."""

from __future__ import annotations

from enum import StrEnum

from jdisagg.core.codec import Number, TaggedStruct, Whole
from jdisagg.core.request import Attempt, WorkerId

NOBODY = WorkerId("")


class Tier(StrEnum):
    """From the fastest down. Pages of HBM, DRAM and disk are a worker's own; those of the pool are everybody's; those
    of a peer are another worker's, in whichever tier of its own."""

    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"
    POOL = "pool"
    PEER = "peer"


class PageMove(TaggedStruct, frozen=True):
    """Full pages on their way between two tiers of one worker, or one half of their way between two workers: to the
    PEER at the one that lends them, from the PEER at the one that asked. In the pool, and at the other worker, pages
    have names alone, and no numbers."""

    owner: Attempt  # in whose name pages of HBM that are to be filled are booked: of this move alone
    source: Tier
    destination: Tier
    names: bytes  # of the pages, one behind the other, as in Reserve
    source_pages: tuple[Whole, ...] = ()
    destination_pages: tuple[Whole, ...] = ()
    peer: WorkerId = NOBODY  # the other worker
    asked: Attempt | None = None  # at the lender: the owner of the other half

    @property
    def from_where(self) -> str:
        """What its price is learnt by."""
        return self.peer if self.source is Tier.PEER else self.source.value


class MovePages(TaggedStruct, frozen=True):
    """Effect: begin to move pages. Those of HBM are packed now, in program order. `PagesMoved` follows, always; where
    they come from a peer, as soon as it has sent them, unless DropPages was asked for before."""

    move: PageMove


class InsertPages(TaggedStruct, frozen=True):
    """Effect: write what was read into pages of HBM, in program order; those marked False are left as they are."""

    move: PageMove
    good: tuple[bool, ...]


class DropPages(TaggedStruct, frozen=True):
    """Effect: forget what was read for pages of HBM, or what is still to come from a peer: they may be another's."""

    move: PageMove


class PagesMoved(TaggedStruct, frozen=True):
    """Event: a move is over. Where it goes to HBM its pages have been read and are in none yet: InsertPages or
    DropPages answers.

    `good`: whether each page has arrived, and is what was put there; `failed`: the tier did not answer at all.
    """

    move: PageMove
    good: tuple[bool, ...]
    seconds: Number = 0.0
    num_bytes: Whole = 0
    failed: str = ""


class PagesFound(TaggedStruct, frozen=True):
    """Event, before a worker's first request: its disk holds these pages since an earlier life."""

    pages: tuple[Whole, ...]
    names: bytes
