"""An abstract machine: who owns each page by the order of the program, what is in it, and what each slot decodes.

Kept pages belong to the prefix cache: nobody writes them, and whoever reads one must have the text that it holds.
A page holds, for each layer group, which of its token places were written, by which attempt at which request, and as
which page of that sequence. Every read is checked against that, every write against the owner at that place of the
program. What a page held is forgotten when it is given back, so that nobody is right by luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jdisagg.core.events import StepDone
from jdisagg.core.request import Attempt, Request, RequestId, Sampled
from jdisagg.core.steps import Admission, DecodeRows, Gate, KVTransfer, PrefillChunk, StepPlan
from jdisagg.core.tiers import PageMove, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.page_pool import KEEPER


class Violation(Exception):
    """A law does not hold; the message says which, of whom, and what was found."""


class Content(NamedTuple):
    """What is in a page: `written` has a bit a token place, one number a layer group."""

    owner: Attempt
    ordinal: int  # the page's place in its sequence
    written: tuple[int, ...]


class Seat(NamedTuple):
    """A decode slot as the device knows it."""

    owner: Attempt
    position: int
    table: tuple[int, ...]
    num_output: int
    stopped: bool
    recalled: int  # output tokens that its grammar's place was made of


class Held(NamedTuple):
    """Rows that have come to a stage: the layer group of that number. They go on when that one's gate is open."""

    step_id: int
    rows: DecodeRows
    stage: int
    gates: tuple[Gate, ...]  # with the parts that are still to come
    void: frozenset[Attempt] = frozenset()  # whose gates were opened for good: what is read for them counts nothing


class Device(NamedTuple):
    """Pages by id (0 is the null page), slots by number, and steps that wait."""

    owners: tuple[Attempt | None, ...]
    contents: tuple[Content | None, ...]
    slots: tuple[Seat | None, ...]
    held: tuple[Held, ...] = ()
    below: tuple[tuple[Tier, int, Content], ...] = ()  # what its tiers hold
    coming: tuple[PageMove, ...] = ()  # from other workers


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

    def take(self, device: Device, owner: Attempt, pages: Sequence[int]) -> Device:
        owners = list(device.owners)
        for page in pages:
            need(owners[page] is None, f"{self._page(page)} is taken by {name(owner)}, and {owners[page]} has it")
            owners[page] = owner
        return device._replace(owners=tuple(owners))

    def give_back(self, device: Device, owner: Attempt, pages: Sequence[int]) -> Device:
        owners, contents = list(device.owners), list(device.contents)
        for page in pages:
            need(owners[page] == owner, f"{self._page(page)} is given back by {name(owner)}, and {owners[page]} has it")
            owners[page] = contents[page] = None
        return device._replace(owners=tuple(owners), contents=tuple(contents))

    def hand_over(self, device: Device, owner: Attempt, to: Attempt, pages: Sequence[int]) -> Device:
        owners = list(device.owners)
        for page in pages:
            need(owners[page] == owner, f"{self._page(page)} is kept by {name(owner)}, and {owners[page]} has it")
            owners[page] = to
        return device._replace(owners=tuple(owners))

    def _owner_of(self, device: Device, pages: Sequence[int], request_id: RequestId) -> Attempt:
        holders = {device.owners[page] for page in pages} - {KEEPER}
        owner = next(iter(holders), None)
        alone = len(holders) == 1 and owner is not None and owner.request_id == request_id
        need(
            alone, f"a plan of {self.config.worker} uses pages {list(pages)} for {request_id}; they belong to {holders}"
        )
        assert owner is not None
        return owner

    # ------------------------------------------------------------ plans

    def step(self, device: Device, plan: StepPlan, *_: Any) -> tuple[Device, list[StepDone]]:
        """Chunks are computed beside the rows: neither reads what the other writes in this step."""
        if plan.decode is None:
            return self._chunks(device, StepDone(plan.step_id), plan)
        device, done = self._decode(device, plan)
        if plan.prefill is None:
            return device, done
        need(len(done) == 1, f"mixed step {plan.step_id} waits at a gate")
        return self._chunks(device, done[0], plan)

    def _chunks(self, device: Device, done: StepDone, plan: StepPlan) -> tuple[Device, list[StepDone]]:
        assert plan.prefill is not None, "a step holds something"
        drawn = []
        for chunk in plan.prefill.chunks:
            device = self._compute(device, chunk)
            if chunk.last:
                drawn.append((chunk.request_id, Sampled(self.outputs[chunk.request_id][chunk.num_output])))
        return device, [replace(done, first=tuple(drawn))]

    def _compute(self, device: Device, chunk: PrefillChunk) -> Device:
        owner, end = self._owner_of(device, chunk.pages, chunk.request_id), chunk.start + len(chunk.tokens)
        request = self.requests[chunk.request_id]
        whole = (*request.prompt, *self.outputs[chunk.request_id])
        need(chunk.tokens == whole[chunk.start : end], f"a chunk of {name(owner)} holds the wrong tokens")
        self._read(device, owner, chunk.pages, chunk.start)
        for position in range(chunk.start, end):
            device = self._write(device, owner, chunk.pages, position)
        return device

    def _decode(self, device: Device, plan: StepPlan) -> tuple[Device, list[StepDone]]:
        slots, rows = list(device.slots), plan.decode
        assert rows is not None
        for slot in rows.retire:
            slots[slot] = None
        for admission in rows.admit:
            need(slots[admission.slot] is None, f"slot {admission.slot} of {self.config.worker} was not retired")
            slots[admission.slot] = self._seat(device, admission)
        for read in rows.read:
            slots[read.slot] = self._recalls(slots[read.slot], read.tokens)
        for grant in rows.grants:
            seat = slots[grant.slot]
            assert seat is not None and grant.index == len(seat.table)
            slots[grant.slot] = seat._replace(table=(*seat.table, grant.page))
        device, busy = device._replace(slots=tuple(slots)), {each.rows.microbatch for each in device.held}
        need(rows.microbatch not in busy, f"microbatch {rows.microbatch} takes a step while one of its own waits")
        return self._go_on(device, Held(plan.step_id, rows, 0, rows.gates))

    def _go_on(self, device: Device, held: Held) -> tuple[Device, list[StepDone]]:
        """Stage after stage, as far as gates are open; the last one draws."""
        for stage in range(held.stage, self.num_groups):
            if any(gate.stage == stage and gate.parts for gate in held.gates):
                return device._replace(held=(*device.held, held._replace(stage=stage))), []
            for slot in held.rows.active:
                device = self._step(device, device.slots[slot], stage, held.void)
        sampled = []
        for slot, width in zip(held.rows.active, held.rows.widths or (1,) * len(held.rows.active), strict=True):
            device, tokens = self._draw(device, slot, width, held.void, turns=held.rows.turns)
            sampled.append((slot, tokens))
        return device, [StepDone(held.step_id, tuple(sampled))]

    def _seat(self, device: Device, admission: Admission) -> Seat:
        owner = self._owner_of(device, admission.pages, admission.request_id)
        expected = self.outputs[admission.request_id][admission.num_output - 1]
        need(admission.token == expected, f"{name(owner)} is fed token {admission.token}, not {expected}")
        told = self.requests[admission.request_id].sampling.grammar and admission.history.output
        seat = Seat(owner, admission.position, admission.pages, admission.num_output, False, 0)
        return self._recalls(seat, told) if told else seat

    def _recalls(self, seat: Seat | None, tokens: tuple[int, ...]) -> Seat:
        """The seat, whose grammar's place is told of these."""
        assert seat is not None, "an empty slot is told tokens"
        drawn = self.outputs[seat.owner.request_id][seat.recalled : seat.num_output]
        need(tokens == drawn, f"{name(seat.owner)} is told that it drew {tokens}, not {drawn}")
        return seat._replace(recalled=seat.num_output)

    def _step(self, device: Device, seat: Seat | None, stage: int, void: frozenset[Attempt]) -> Device:
        """One stage writes the token that is fed, and reads all up to it."""
        assert seat is not None, "an active slot is empty"
        if seat.stopped:
            return device
        device = self._write(device, seat.owner, seat.table, seat.position, range(stage, stage + 1))
        if seat.owner not in void:
            self._read(device, seat.owner, seat.table, seat.position + 1, range(stage, stage + 1))
        return device

    def _draw(
        self, device: Device, slot: int, width: int, void: frozenset[Attempt], *, turns: bool
    ) -> tuple[Device, tuple[Sampled, ...] | None]:
        """A token; of a row that may draw more, one a turn, or as many of a draft as its position says; each is fed."""
        seat, drawn = device.slots[slot], []
        assert seat is not None, "an active slot is empty"
        held = self.requests[seat.owner.request_id].sampling.grammar
        need(not held or seat.recalled == seat.num_output, f"{name(seat.owner)} draws before its grammar knows where")
        accepted = width - 1 if turns else (seat.position + 1) % width
        while not seat.stopped and len(drawn) <= accepted:
            if drawn:
                for stage in range(self.num_groups):
                    device = self._step(device, seat, stage, void)
            request_id = seat.owner.request_id
            token = self.outputs[request_id][seat.num_output]
            stopped = token in self.requests[request_id].sampling.stop_token_ids
            seat = seat._replace(position=seat.position + 1, num_output=seat.num_output + 1, stopped=stopped)
            drawn.append(Sampled(token))
        slots = (*device.slots[:slot], seat, *device.slots[slot + 1 :])
        return device._replace(slots=slots), tuple(drawn) or None

    def open_gates(self, device: Device, owner: Attempt) -> tuple[Device, list[StepDone]]:
        held = [each._replace(void=each.void | {owner}) for each in device.held]
        return self._pump(device._replace(held=tuple(held)), owner, None)

    def _pump(self, device: Device, owner: Attempt, part: int | None) -> tuple[Device, list[StepDone]]:
        """The part (None: any) is waited for no longer."""
        waiting, done = device.held, []
        device = device._replace(held=())
        for held in waiting:
            gates = tuple(_without(gate, part) if gate.attempt == owner else gate for gate in held.gates)
            device, drawn = self._go_on(device, held._replace(gates=gates))
            done += drawn
        return device, done

    # ------------------------------------------------------------ transfers

    def groups_of(self, transfer: KVTransfer) -> range:
        """The layer groups of a part: a model of this world has one layer a group."""
        layers = getattr(transfer, "layers", None)
        return range(self.num_groups) if layers is None else range(*layers)

    def pack(self, device: Device, transfer: KVTransfer) -> tuple[Content, ...]:
        """What leaves: it must be the owner's, and whole."""
        owner, packed = transfer.attempt, []
        need(len(transfer.source_pages) == len(transfer.destination_pages), f"{name(owner)} ships uneven page lists")
        for index, page in enumerate(transfer.source_pages):
            holder, content = device.owners[page], device.contents[page]
            theirs = holder == KEEPER and content is not None and self._same_text(content, owner, content.ordinal)
            need(holder == owner or theirs, f"{name(owner)} ships {self._page(page)}, which belongs to {holder}")
            tokens = min(self.config.page_size, transfer.num_tokens - index * self.config.page_size)
            full = content is not None and self._holds(content, self.groups_of(transfer), tokens)
            need(full, f"{name(owner)} ships {self._page(page)} before it is computed")
            assert content is not None
            kept = tuple(bits if group in self.groups_of(transfer) else 0 for group, bits in enumerate(content.written))
            packed.append(content._replace(written=kept))
        return tuple(packed)

    def insert(
        self, device: Device, transfer: KVTransfer, shipment: tuple[Content, ...]
    ) -> tuple[Device, list[StepDone]]:
        owner, contents = transfer.attempt, list(device.contents)
        for page, come in zip(transfer.destination_pages, shipment, strict=True):
            holder, there = device.owners[page], contents[page]
            need(holder == owner, f"a late write: KV of {name(owner)} into {self._page(page)}, which {holder} has")
            old = there.written if there is not None and there[:2] == come[:2] else (0,) * self.num_groups
            contents[page] = come._replace(written=tuple(a | b for a, b in zip(old, come.written, strict=True)))
        return self._pump(device._replace(contents=tuple(contents)), owner, transfer.part)

    # ------------------------------------------------------------ pages

    def _page(self, page: int) -> str:
        return f"page {page} of {self.config.worker}"

    def _same_text(self, content: Content, owner: Attempt, ordinal: int) -> bool:
        """Whether this is that page of the owner's sequence: its own, or with prefix caching one of equal text."""
        if content[:2] == (owner, ordinal):
            return True
        known = content.ordinal == ordinal and content.owner.request_id in self.requests
        if not self.config.prefix_caching or not known:
            return False  # broken KV is nobody's
        end = (ordinal + 1) * self.config.page_size
        return self._text(owner)[:end] == self._text(content.owner)[:end]

    def _text(self, owner: Attempt) -> tuple[int, ...]:
        request_id = owner.request_id
        return (*self.requests[request_id].prompt, *self.outputs[request_id])

    def _holds(self, content: Content, groups: range, tokens: int) -> bool:
        mask = (1 << tokens) - 1
        return all(content.written[group] & mask == mask for group in groups)

    def _write(
        self, device: Device, owner: Attempt, table: Sequence[int], position: int, groups: range | None = None
    ) -> Device:
        ordinal, place = divmod(position, self.config.page_size)
        page = table[ordinal]
        holder, there = device.owners[page], device.contents[page]
        need(holder == owner, f"a late write: {name(owner)} writes {self._page(page)}, which {holder} has")
        same = there is not None and there.owner == owner and there.ordinal == ordinal
        old = there.written if there is not None and same else (0,) * self.num_groups
        groups = range(self.num_groups) if groups is None else groups
        written = tuple(bits | (group in groups) << place for group, bits in enumerate(old))
        content = Content(owner, ordinal, written)
        return device._replace(contents=(*device.contents[:page], content, *device.contents[page + 1 :]))

    def _read(
        self, device: Device, owner: Attempt, table: Sequence[int], tokens: int, groups: range | None = None
    ) -> None:
        size, groups = self.config.page_size, range(self.num_groups) if groups is None else groups
        for ordinal in range(self.config.pages_for(tokens)):
            page = table[ordinal]
            content = device.contents[page]
            here = min(size, tokens - ordinal * size)
            right = content is not None and self._same_text(content, owner, ordinal)
            right = right and content is not None and self._holds(content, groups, here)
            need(right, f"{name(owner)} reads {self._page(page)}, which holds {told(content)}")


def _without(gate: Gate, part: int | None) -> Gate:
    return replace(gate, parts=tuple(each for each in gate.parts if part not in (None, each)))


def name(owner: Attempt | None) -> str:
    return "nobody" if owner is None else f"{owner.request_id}#{owner.epoch}"


def told(content: Content | None) -> str:
    """A page's content in words."""
    if content is None:
        return "nothing"
    groups = ", ".join(f"{bits:b}" for bits in content.written)
    return f"page {content.ordinal} of {name(content.owner)} (token places by layer group: {groups})"
