"""An abstract machine: who owns each page by the order of the program, what is in it, and what each slot decodes.

A page holds, for each layer group, which of its token places were written, by which attempt at which request, and as
which page of that sequence. Every read is checked against that, every write against the owner at that place of the
program. What a page held is forgotten when it is given back, so that nobody is right by luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.events import DecodeDone, PrefillDone
from jdisagg.core.plans import Admission, DecodePlan, KVTransfer, PrefillChunk, PrefillPlan
from jdisagg.core.request import Request, RequestId, Sampled
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.page_pool import Owner


class Violation(Exception):
    """A law does not hold; the message says which, of whom, and what was found."""


class Content(NamedTuple):
    """What is in a page: `written` has a bit a token place, one number a layer group."""

    owner: Owner
    ordinal: int  # the page's place in its sequence
    written: tuple[int, ...]


class Seat(NamedTuple):
    """A decode slot as the device knows it."""

    owner: Owner
    position: int
    table: tuple[int, ...]
    num_output: int
    stopped: bool


class Device(NamedTuple):
    """Pages by id (0 is the null page) and slots by number."""

    owners: tuple[Owner | None, ...]
    contents: tuple[Content | None, ...]
    slots: tuple[Seat | None, ...]


def fresh_device(config: WorkerConfig) -> Device:
    pages = config.num_pages + 1
    return Device((None,) * pages, (None,) * pages, (None,) * config.num_slots)


def need(truth: bool, law: str) -> None:
    if not truth:
        raise Violation(law)


@dataclass(frozen=True)
class Machine:
    """What a device does, as functions from one to the next."""

    config: WorkerConfig
    requests: dict[RequestId, Request]
    outputs: dict[RequestId, tuple[int, ...]]  # what each request draws, were it to draw for ever
    num_groups: int = 2

    # ------------------------------------------------------------ who owns what

    def take(self, device: Device, owner: Owner, pages: Sequence[int]) -> Device:
        owners = list(device.owners)
        for page in pages:
            need(owners[page] is None, f"{self._page(page)} is taken by {name(owner)}, and {owners[page]} has it")
            owners[page] = owner
        return device._replace(owners=tuple(owners))

    def give_back(self, device: Device, owner: Owner, pages: Sequence[int]) -> Device:
        owners, contents = list(device.owners), list(device.contents)
        for page in pages:
            need(owners[page] == owner, f"{self._page(page)} is given back by {name(owner)}, and {owners[page]} has it")
            owners[page] = contents[page] = None
        return device._replace(owners=tuple(owners), contents=tuple(contents))

    def _owner_of(self, device: Device, pages: Sequence[int], request_id: RequestId) -> Owner:
        holders = {device.owners[page] for page in pages}
        owner = next(iter(holders))
        alone = len(holders) == 1 and owner is not None and owner.handoff == request_id
        need(
            alone, f"a plan of {self.config.worker} uses pages {list(pages)} for {request_id}; they belong to {holders}"
        )
        assert owner is not None
        return owner

    # ------------------------------------------------------------ plans

    def prefill(self, device: Device, plan: PrefillPlan) -> tuple[Device, PrefillDone]:
        drawn = []
        for chunk in plan.chunks:
            device = self._compute(device, chunk)
            if chunk.last:
                drawn.append((chunk.request_id, Sampled(self.outputs[chunk.request_id][chunk.num_output])))
        return device, PrefillDone(plan.plan_id, tuple(drawn))

    def _compute(self, device: Device, chunk: PrefillChunk) -> Device:
        owner, end = self._owner_of(device, chunk.pages, chunk.request_id), chunk.start + len(chunk.tokens)
        request = self.requests[chunk.request_id]
        whole = (*request.prompt, *self.outputs[chunk.request_id])
        need(chunk.tokens == whole[chunk.start : end], f"a chunk of {name(owner)} holds the wrong tokens")
        self._read(device, owner, chunk.pages, chunk.start)
        for position in range(chunk.start, end):
            device = self._write(device, owner, chunk.pages, position)
        return device

    def decode(self, device: Device, plan: DecodePlan) -> tuple[Device, DecodeDone]:
        slots = list(device.slots)
        for slot in plan.retire:
            slots[slot] = None
        for admission in plan.admit:
            need(slots[admission.slot] is None, f"slot {admission.slot} of {self.config.worker} was not retired")
            slots[admission.slot] = self._seat(device, admission)
        for grant in plan.grants:
            seat = slots[grant.slot]
            assert seat is not None and grant.index == len(seat.table)
            slots[grant.slot] = seat._replace(table=(*seat.table, grant.page))
        sampled = []
        for slot in plan.active:
            seat = slots[slot]
            assert seat is not None, f"slot {slot} is active and empty"
            device, slots[slot], token = self._step(device, seat)
            sampled.append((slot, token))
        return device._replace(slots=tuple(slots)), DecodeDone(plan.plan_id, tuple(sampled))

    def _seat(self, device: Device, admission: Admission) -> Seat:
        owner = self._owner_of(device, admission.pages, admission.request_id)
        expected = self.outputs[admission.request_id][admission.num_output - 1]
        need(admission.token == expected, f"{name(owner)} is fed token {admission.token}, not {expected}")
        return Seat(owner, admission.position, admission.pages, admission.num_output, False)

    def _step(self, device: Device, seat: Seat) -> tuple[Device, Seat, Sampled | None]:
        if seat.stopped:
            return device, seat, None
        device = self._write(device, seat.owner, seat.table, seat.position)
        self._read(device, seat.owner, seat.table, seat.position + 1)
        request_id = RequestId(seat.owner.handoff)
        token = self.outputs[request_id][seat.num_output]
        stopped = token in self.requests[request_id].sampling.stop_token_ids
        return device, Seat(seat.owner, seat.position + 1, seat.table, seat.num_output + 1, stopped), Sampled(token)

    # ------------------------------------------------------------ transfers

    def groups_of(self, transfer: KVTransfer) -> range:
        """The layer groups of a part: a model of this world has one layer a group."""
        layers = getattr(transfer, "layers", None)
        return range(self.num_groups) if layers is None else range(*layers)

    def pack(self, device: Device, transfer: KVTransfer) -> tuple[Content, ...]:
        """What leaves: it must be the owner's, and whole."""
        owner, packed = Owner(transfer.handoff, transfer.epoch), []
        need(len(transfer.source_pages) == len(transfer.destination_pages), f"{name(owner)} ships uneven page lists")
        for index, page in enumerate(transfer.source_pages):
            holder, content = device.owners[page], device.contents[page]
            need(holder == owner, f"{name(owner)} ships {self._page(page)}, which belongs to {holder}")
            tokens = min(self.config.page_size, transfer.num_tokens - index * self.config.page_size)
            full = content is not None and self._holds(content, self.groups_of(transfer), tokens)
            need(full, f"{name(owner)} ships {self._page(page)} before it is computed")
            assert content is not None
            kept = tuple(bits if group in self.groups_of(transfer) else 0 for group, bits in enumerate(content.written))
            packed.append(content._replace(written=kept))
        return tuple(packed)

    def insert(self, device: Device, transfer: KVTransfer, parcel: tuple[Content, ...]) -> Device:
        owner, contents = Owner(transfer.handoff, transfer.epoch), list(device.contents)
        for page, come in zip(transfer.destination_pages, parcel, strict=True):
            holder, there = device.owners[page], contents[page]
            need(holder == owner, f"a late write: KV of {name(owner)} into {self._page(page)}, which {holder} has")
            old = there.written if there is not None and there[:2] == come[:2] else (0,) * self.num_groups
            contents[page] = come._replace(written=tuple(a | b for a, b in zip(old, come.written, strict=True)))
        return device._replace(contents=tuple(contents))

    # ------------------------------------------------------------ pages

    def _page(self, page: int) -> str:
        return f"page {page} of {self.config.worker}"

    def _holds(self, content: Content, groups: range, tokens: int) -> bool:
        mask = (1 << tokens) - 1
        return all(content.written[group] & mask == mask for group in groups)

    def _write(self, device: Device, owner: Owner, table: Sequence[int], position: int) -> Device:
        ordinal, place = divmod(position, self.config.page_size)
        page = table[ordinal]
        holder, there = device.owners[page], device.contents[page]
        need(holder == owner, f"a late write: {name(owner)} writes {self._page(page)}, which {holder} has")
        same = there is not None and there.owner == owner and there.ordinal == ordinal
        old = there.written if there is not None and same else (0,) * self.num_groups
        content = Content(owner, ordinal, tuple(bits | 1 << place for bits in old))
        return device._replace(contents=(*device.contents[:page], content, *device.contents[page + 1 :]))

    def _read(self, device: Device, owner: Owner, table: Sequence[int], tokens: int) -> None:
        size = self.config.page_size
        for ordinal in range(self.config.pages_for(tokens)):
            page = table[ordinal]
            content = device.contents[page]
            whole, here = range(self.num_groups), min(size, tokens - ordinal * size)
            right = content is not None and content[:2] == (owner, ordinal) and self._holds(content, whole, here)
            need(right, f"{name(owner)} reads {self._page(page)}, which holds {told(content)}")


def name(owner: Owner | None) -> str:
    return "nobody" if owner is None else f"{owner.handoff}#{owner.epoch}"


def told(content: Content | None) -> str:
    """A page's content in words."""
    if content is None:
        return "nothing"
    groups = ", ".join(f"{bits:b}" for bits in content.written)
    return f"page {content.ordinal} of {name(content.owner)} (token places by layer group: {groups})"
