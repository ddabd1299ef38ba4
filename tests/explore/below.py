"""Pages below HBM and on their way between workers, as an abstract machine has them: whole, by tier and number.

What leaves HBM must be kept there and be whole; what comes goes into pages that are booked for just that move. Whether
it is the right text shows where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.policy.cache.page_pool import KEEPER
from jdisagg.policy.cache.prefix_cache import unpacked
from tests.explore.device import Content, Device, Machine, name, need


@dataclass(frozen=True, slots=True)
class PagesLent:
    """What one worker has read for another is at that one's process, which may wait for it no longer."""

    asked: Attempt
    lender: WorkerId


def begin(machine: Machine, device: Device, move: PageMove) -> tuple[Device, tuple[Content, ...]]:
    """Packs or reads now; what goes to a tier of this worker is there."""
    if move.source is Tier.PEER:
        return device._replace(coming=(*device.coming, move)), ()
    contents = tuple(_read(machine, device, move.source, page) for page in move.source_pages)
    if move.destination in (Tier.HBM, Tier.PEER):
        return device, contents
    kept = {(tier, page): content for tier, page, content in device.below}
    kept |= {(move.destination, page): each for page, each in zip(move.destination_pages, contents, strict=True)}
    return device._replace(below=tuple(sorted((*place, each) for place, each in kept.items()))), ()


def _read(machine: Machine, device: Device, tier: Tier, page: int) -> Content:
    if tier is not Tier.HBM:
        found = [content for of, at, content in device.below if (of, at) == (tier, page)]
        need(bool(found), f"page {page} of {tier} of {machine.config.worker} is read, and was never written")
        return found[0]
    content, holder, full = device.contents[page], device.owners[page], (1 << machine.config.page_size) - 1
    whole = content is not None and all(bits == full for bits in content.written)
    place = f"page {page} of {machine.config.worker}"
    need(holder == KEEPER and whole, f"{place} leaves HBM, which {holder} has: it holds {content}")
    assert content is not None
    return content


def insert(
    device: Device, move: PageMove, good: tuple[bool, ...], shipment: tuple[Content, ...], who: WorkerId
) -> Device:
    contents = list(device.contents)
    for page, come, fine in zip(move.destination_pages, shipment, good, strict=False):
        holder = device.owners[page]
        need(holder == move.owner, f"a late write: {name(move.owner)} into page {page} of {who}, which {holder} has")
        if fine:
            contents[page] = come
    return device._replace(contents=tuple(contents))


def forget(device: Device, move: PageMove) -> Device:
    return device._replace(coming=tuple(each for each in device.coming if each.owner != move.owner))


def landed(device: Device, lent: PagesLent, pages: int) -> tuple[Device, PagesMoved] | None:
    """What the asker is to hear of it; None where it waits for that no longer."""
    mine = next((each for each in device.coming if (each.owner, each.peer) == (lent.asked, lent.lender)), None)
    if mine is None:
        return None
    good = tuple(at < pages for at in range(len(unpacked(mine.names))))
    return forget(device, mine), PagesMoved(mine, good)
