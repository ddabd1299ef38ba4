"""Where KV may lie, and the words for bringing whole pages of one worker from one of its tiers to another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jdisagg.core.request import Attempt


class Tier(StrEnum):
    """From the fastest down. Pages of HBM, DRAM and disk are a worker's own; those of the pool are everybody's."""

    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class PageMove:
    """Full pages on their way between two tiers of one worker. In the pool pages have names alone, and no numbers."""

    owner: Attempt  # in whose name pages of HBM that are to be filled are booked: of this move alone
    source: Tier
    destination: Tier
    names: bytes  # of the pages, one behind the other, as in Reserve
    source_pages: tuple[int, ...] = ()
    destination_pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MovePages:
    """Effect: begin to move pages. Those of HBM are packed now, in program order. `PagesMoved` follows, always."""

    move: PageMove


@dataclass(frozen=True, slots=True)
class InsertPages:
    """Effect: write what was read into pages of HBM, in program order; those marked False are left as they are."""

    move: PageMove
    good: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class DropPages:
    """Effect: forget what was read for pages of HBM: they may be another's."""

    move: PageMove


@dataclass(frozen=True, slots=True)
class PagesMoved:
    """Event: a move is over. Where it goes to HBM its pages have been read and are in none yet: InsertPages or
    DropPages answers.

    `good`: whether each page has arrived, and is what was put there; `failed`: the tier did not answer at all.
    """

    move: PageMove
    good: tuple[bool, ...]
    seconds: float = 0.0
    num_bytes: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class PagesFound:
    """Event, before a worker's first request: its disk holds these pages since an earlier life."""

    pages: tuple[int, ...]
    names: bytes
