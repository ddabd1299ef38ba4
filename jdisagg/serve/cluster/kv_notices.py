"""KV between this process and workers of others: packed for the other's shape, offered, pulled, laid ready to insert.

The source packs as for a stage of its own process and offers the pieces as they are cut; the *notice* (transfer,
ticket, and which pieces belong to which pages) goes by the control link; the destination pulls the pieces onto the
devices that want them. Nothing is reshaped on the way. A pull that fails is a part that arrived broken: the worker asks
for it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from jdisagg.core.codec import decode_as, shown
from jdisagg.core.errors import BadTicket, ConfigError, DecodeError, PeerMismatch, SenselessWord, TransportError
from jdisagg.core.events import KVArrived
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.layout.reshard import Holders, StageShape, plan_heads, senders, shards_held
from jdisagg.core.protocol import MOST_LAYERS, check_transfer
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import MOST, WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.shipping import DestinationDevices, HeadSlices, PackedMove, ReceivedSlices
from jdisagg.kv.transport.choose import Capability, choose, open_transport, read_capability
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.ticket import Ticket, TransferId, Transport, read_ticket
from jdisagg.parallel.submesh import Device
from jdisagg.serve.driver.kv_moves import Lent

# What this process has offered and is not known to be over, so that whoever ends a handoff ends its offers as
# well.


@dataclass(frozen=True, slots=True)
class _Given:
    ticket: Ticket
    destination: WorkerId
    until_s: float  # then the offer ends by itself


class Tickets:
    """By attempt. Any thread may call; to end what is over already changes nothing."""

    def __init__(self, cancel: Callable[[Ticket], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._cancel, self._clock = cancel, clock
        self._lock = threading.Lock()
        self._given: dict[Attempt, list[_Given]] = {}

    def add(self, ticket: Ticket, destination: WorkerId, until_s: float) -> None:
        with self._lock:
            self._forget_old()
            key = Attempt(RequestId(ticket.transfer.handoff), ticket.transfer.epoch)
            self._given.setdefault(key, []).append(_Given(ticket, destination, until_s))

    def end(self, attempt: Attempt) -> None:
        with self._lock:
            given = self._given.pop(attempt, [])
        self._cancel_all(given)

    def end_for(self, destination: WorkerId) -> None:
        """The destination has gone: it pulls nothing any more, and will not say that it has pulled."""
        with self._lock:
            given = [each for rows in self._given.values() for each in rows if each.destination == destination]
        self._cancel_all(given)

    def end_all(self) -> None:
        with self._lock:
            given = [each for rows in self._given.values() for each in rows]
            self._given.clear()
        self._cancel_all(given)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(rows) for rows in self._given.values())

    def _cancel_all(self, given: list[_Given]) -> None:
        for each in given:
            self._cancel(each.ticket)

    def _forget_old(self) -> None:
        """Handoffs in the order of their first offer: those before the first that may still be open have ended."""
        now_s = self._clock()
        while self._given:
            first = next(iter(self._given))
            if self._given[first][-1].until_s >= now_s:
                return
            del self._given[first]


log = logging.getLogger("jdisagg.cluster")

MOST_PROCESSES = 1024  # of one worker


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A worker as those of other processes must know it."""

    config: WorkerConfig
    stages: tuple[StageShape, ...]
    capabilities: tuple[Capability, ...]  # of its processes, by rank
    holders: Holders  # [stage][shard]: the rank of the process that has it

    @property
    def worker(self) -> WorkerId:
        return self.config.worker

    @property
    def capability(self) -> Capability:
        """Of the process that speaks for it."""
        return self.capabilities[0]

    def to_json(self) -> dict[str, Any]:
        stages = [stage_json(stage) for stage in self.stages]
        return {
            "config": self.config,
            "stages": stages,
            "capabilities": [each.to_json() for each in self.capabilities],
            "holders": [list(each) for each in self.holders],
        }


def read_peer(record: dict[str, Any]) -> PeerRecord:
    """Of a peer's JSON. Raises SenselessWord where it is none."""
    try:
        config = decode_as(WorkerConfig, record["config"])
        config.check()
        stages = tuple(read_stage(each) for each in record["stages"])
        capabilities = tuple(read_capability(each) for each in record["capabilities"])
        return PeerRecord(config, stages, capabilities, _read_holders(record["holders"], stages, len(capabilities)))
    except (KeyError, TypeError, ValueError, DecodeError, ConfigError, PeerMismatch) as error:
        raise SenselessWord(f"a peer describes no worker: {type(error).__name__}: {str(error)[:300]}") from error


def stage_json(stage: StageShape) -> list[Any]:
    held = stage.layers.start, stage.layers.stop, stage.tp, stage.page_size, stage.dtype
    return [*held, stage.draft, stage.draft_heads]


def read_stage(record: Any) -> StageShape:
    """Of `stage_json`. Raises ValueError, TypeError where it is none."""
    first, stop, tp, page_size, dtype, draft, heads = record
    texts, numbers = (dtype, draft), (first, stop, tp, page_size, heads)
    if not (all(isinstance(each, str) for each in texts) and all(type(each) is int for each in numbers)):
        raise ValueError(f"{str(record)[:80]} is no stage")
    if not (0 <= first < stop <= MOST_LAYERS and 1 <= tp <= MOST and 1 <= page_size <= MOST and 0 <= heads <= MOST):
        raise ValueError(f"a stage of layers {first} to {stop}, tp {tp}, pages of {page_size} and {heads} heads")
    return StageShape(range(first, stop), tp, page_size, dtype, draft, heads)


def _read_holders(record: Any, stages: Sequence[StageShape], processes: int) -> Holders:
    holders = tuple(tuple(each) for each in record)
    if [len(each) for each in holders] != [stage.tp for stage in stages] or not 1 <= processes <= MOST_PROCESSES:
        raise ValueError(f"{processes} processes hold shards as {str(record)[:80]}")
    if not all(type(rank) is int and 0 <= rank < processes for each in holders for rank in each):
        raise ValueError(f"shards are held by ranks {str(record)[:80]} of {processes} processes")
    return holders


def id_of(transfer: KVTransfer) -> TransferId:
    return TransferId(transfer.attempt.request_id, transfer.attempt.epoch, transfer.part)


def read_notice(notice: Any, sender: WorkerConfig, to: WorkerConfig) -> KVTransfer:
    """The transfer of a notice that `sender` gives `to`. Raises SenselessWord, BadTicket."""
    try:
        transfer = decode_as(KVTransfer, notice["transfer"])
        tickets = [_read_piece(each)[2] for each in notice["pieces"]]
        rows = [_pages_of(each) for each in notice["moves"]]
    except (KeyError, TypeError, ValueError, DecodeError) as error:
        raise SenselessWord(f"a notice that cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
    check_transfer(transfer, sender, to)
    request_id = transfer.attempt.request_id
    for ticket in tickets:
        if ticket.transfer != id_of(transfer):
            raise SenselessWord(f"a notice of part {transfer.part} of {request_id!r} offers another: {ticket.transfer}")
    for pages in rows:
        if not {NULL_PAGE, *transfer.destination_pages}.issuperset(pages):
            raise SenselessWord(f"a notice of {request_id!r} is for pages that are not the transfer's")
    return transfer


def _read_piece(piece: Any) -> tuple[int, int, Ticket]:
    """The ranks of the process that offers and of the one that is to pull, and the offer. Raises BadTicket."""
    source, destination, ticket = piece
    if not all(type(each) is int and 0 <= each < MOST_PROCESSES for each in (source, destination)):
        raise ValueError(f"a piece from {str(source)[:40]} to {str(destination)[:40]}")
    return source, destination, read_ticket(ticket)


def _pages_of(move: Any) -> list[int]:
    """The pages that one move of a notice goes to."""
    stage, first, stop, pages, width, kinds = move
    numbers = (stage, first, stop, width, *pages)
    if not all(type(each) is int and 0 <= each <= MOST for each in numbers) or not first < stop:
        raise ValueError(f"{str(move)[:80]} is no move")
    if "values" not in kinds or len(set(kinds) & set(HeadSlices._fields)) != len(kinds) or width % len(kinds):
        raise ValueError(f"{width} arrays of {str(kinds)[:80]} are no head slices")
    return pages


@dataclass(frozen=True)
class RemoteShipment:
    """A part that came from another process; see `executor.Shipment`."""

    transfer: KVTransfer
    landed: list[ReceivedSlices]  # where a stage is on other processes' devices alone, nothing of it
    came: bool = True

    def wait_packed(self) -> None:
        """It was pulled: it has been packed."""

    def wait(self) -> None:
        """It was pulled: it is here."""


class RemoteKV:
    """This process's transports, opened when first used. Any thread may call."""

    def __init__(
        self,
        config: TransportConfig,
        mine: Capability,
        wanted: str = "auto",
        timeout_s: float = 30.0,
        rank: int = 0,
    ) -> None:
        """`wanted` names the transport to use with everybody; offers and pulls end after `timeout_s`.

        rank: of this process in its worker's group.
        """
        self.config, self.mine, self.wanted, self.timeout_s = config, mine, wanted, timeout_s
        self.rank = rank
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._tickets = Tickets(lambda ticket: self._transports[ticket.transport].cancel(ticket))

    # ------------------------------------------------------------ source

    def ship(
        self,
        machine: MeshExecutor,
        transfer: KVTransfer,
        peer: PeerRecord,
        tell: Callable[[dict[str, Any]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Packs now, in program order, and offers; `tell` is called with the notice. Raises TransportError.

        Where others offer pieces as well (`serve/group/kv.py`), that is later and on another thread, or `failed` is.
        """
        moves, pieces = self.offers(machine, transfer, peer)
        tell(notice_of(transfer, moves, pieces))

    def offers(self, machine: MeshExecutor, transfer: KVTransfer, peer: PeerRecord) -> tuple[list[Any], list[Any]]:
        """Packs, and offers to each process of the peer what it needs of the shards that are here.

        The notice's moves, and its pieces of this process. Raises TransportError.
        """
        packed = machine.pack(transfer, peer.stages)
        pieces = list[Any]()
        for rank in range(len(peer.capabilities)):
            held = [(each, shard) for each in packed for shard in shards_held(peer.holders[each.stage], rank)]
            arrays = [array for each, shard in held for array in each.arrays_for(shard) if array is not None]
            if arrays:
                ticket = self.offer(id_of(transfer), arrays, peer, rank)
                pieces.append([self.rank, rank, ticket.to_json()])
        return [_move_json(each) for each in packed], pieces

    def offer(self, transfer: TransferId, arrays: Sequence[Array], peer: PeerRecord, rank: int = 0) -> Ticket:
        """To this process of the peer, until it has them or time is up. Raises TransportError."""
        until_s = time.monotonic() + self.timeout_s
        transport = self._open(choose(self.mine, peer.capabilities[rank], self.wanted))
        ticket = transport.offer(transfer, arrays, until_s)
        self._tickets.add(ticket, peer.worker, until_s)
        return ticket

    def withdraw(self, attempt: Attempt) -> None:
        """It was given up: what is still offered for it is let go."""
        self._tickets.end(attempt)

    def withdraw_for(self, destination: WorkerId) -> None:
        self._tickets.end_for(destination)

    def withdraw_all(self) -> None:
        self._tickets.end_all()

    def met(self, peer: PeerRecord) -> None:
        """A worker of another process is there."""

    # ------------------------------------------------------------ destination

    def fetch(
        self, machine: MeshExecutor, notice: dict[str, Any], peer: PeerRecord
    ) -> tuple[RemoteShipment, KVArrived]:
        """Pulls what the notice offers; blocks. A failed pull is a part that is not intact."""
        transfer = decode_as(KVTransfer, notice["transfer"])
        began_s = time.monotonic()
        shipment = self.pull(machine, transfer, notice, peer)
        return shipment, KVArrived(transfer, shipment.came, time.monotonic() - began_s)

    def pull(
        self, machine: MeshExecutor, transfer: KVTransfer, notice: dict[str, Any], peer: PeerRecord
    ) -> RemoteShipment:
        """What this process's shards need of it; empty where it did not come. Blocks."""
        try:
            return RemoteShipment(transfer, self._pull(machine, notice, peer, time.monotonic() + self.timeout_s))
        except TransportError as error:
            log.warning("part %d of %s did not come: %s", transfer.part, transfer.attempt.request_id, error)
            return RemoteShipment(transfer, [], came=False)

    def _pull(
        self, machine: MeshExecutor, notice: dict[str, Any], peer: PeerRecord, deadline_s: float
    ) -> list[ReceivedSlices]:
        moves = notice["moves"]
        seats = [DestinationDevices.of(machine.pages[stage], width, len(kinds)) for stage, *_, width, kinds in moves]
        sources = [_sources(machine, peer, each, move) for each, move in zip(seats, moves, strict=True)]
        came = dict[int, Iterator[Array]]()
        for source, rank, ticket in map(_read_piece, notice["pieces"]):
            if rank == self.rank:
                rows = zip(seats, sources, strict=True)
                pairs = [pair for each, ranks in rows for pair in zip(each.devices, ranks, strict=True)]
                came[source] = self._pull_piece(ticket, [device for device, of in pairs if of == source], deadline_s)
        lacking = {rank for ranks in sources for rank in ranks} - came.keys()
        if lacking:
            raise BadTicket(f"nothing is offered by rank {min(lacking)} of {peer.worker}, which holds some of it")
        landed = []
        for each, ranks, (stage, first, stop, pages, _, kinds) in zip(seats, sources, moves, strict=True):
            if not each.shards:
                continue
            slices = each.joined([next(came[rank]) for rank in ranks], kinds)
            landed.append(ReceivedSlices(stage, range(first, stop), slices, np.array(pages, np.int32)))
        return landed

    def _pull_piece(self, ticket: Ticket, devices: Sequence[Device], deadline_s: float) -> Iterator[Array]:
        if len(devices) != len(ticket.arrays):
            raise BadTicket(f"{len(ticket.arrays)} arrays are offered, the notice's moves take {len(devices)}")
        return iter(self.pull_offer(ticket, devices, deadline_s))

    def pull_offer(self, ticket: Ticket, devices: Sequence[Device], deadline_s: float | None = None) -> list[Array]:
        """Its arrays, each on its device; blocks. Raises TransportError."""
        transport = self._open(ticket.transport)
        until_s = time.monotonic() + self.timeout_s if deadline_s is None else deadline_s
        arrays = transport.pull(ticket, devices, until_s)
        transport.ack(ticket)
        return arrays

    # ------------------------------------------------------------ both

    def _open(self, name: str) -> Transport:
        with self._lock:
            if name not in self._transports:
                self._transports[name] = open_transport(name, self.config)
                log.info("KV crosses by %s, offered at %s", name, self._transports[name].address)
            return self._transports[name]

    def held_bytes(self) -> tuple[int, int]:
        """Of offers that have not ended, and of pulls that are under way or still read by a program."""
        with self._lock:
            held = [transport.held() for transport in self._transports.values()]
        return sum(each.offer_bytes for each in held), sum(each.pull_bytes for each in held)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


def notice_of(transfer: KVTransfer, moves: list[Any], pieces: list[Any]) -> dict[str, Any]:
    return {"transfer": transfer, "moves": moves, "pieces": pieces}


def _sources(machine: MeshExecutor, peer: PeerRecord, seats: DestinationDevices, move: Any) -> list[int]:
    """The rank of the peer's process that sends each array of a move that comes here. Raises BadTicket."""
    stage, first, stop, _, width, kinds = move
    found = next((each for each, shape in enumerate(peer.stages) if first in shape.layers), None)
    if found is None or stop > peer.stages[found].layers.stop:
        raise BadTicket(f"no stage of {peer.worker} has layers {first} to {stop}")
    held = machine.pages[stage]
    heads = plan_heads(held.layout.num_kv_heads, peer.stages[found].tp, held.submesh.tp)
    if heads.slices_per_destination * len(kinds) != width:
        raise BadTicket(f"a move of {width} arrays a shard, where {heads.slices_per_destination} slices belong")
    rows = senders(heads, peer.holders[found])
    return [rank for shard in seats.shards for _ in kinds for rank in rows[shard]]


def _move_json(packed: PackedMove) -> list[Any]:
    layers, kinds = packed.layers, list(packed.slices.kinds)
    return [packed.stage, layers.start, layers.stop, packed.pages.tolist(), packed.width, kinds]


def records(peers: Iterable[PeerRecord]) -> list[dict[str, Any]]:
    return [peer.to_json() for peer in peers]


# Records of pages that workers of different processes lend each other: offered as KV is, announced, and pulled.
#
# The notice (who lends, which question it answers, the ticket) goes by the control link; whoever does not wait
# for it any longer pulls nothing, and the offer ends by itself.

LONGEST_FINGERPRINT = 64


@dataclass(frozen=True, slots=True)
class LentNotice:
    """That records are offered to who asked for them."""

    asked: Attempt
    fingerprint: str
    ticket: Ticket


def offer_records(kv: RemoteKV, lent: Lent, peer: PeerRecord) -> dict[str, Any]:
    """The notice of what is offered now. Raises TransportError."""
    transfer = TransferId(f"{lent.asker} {lent.asked.request_id}", lent.asked.epoch, 0)
    ticket = kv.offer(transfer, [jax.device_put(lent.records, _host())], peer)
    return {"asked": lent.asked, "fingerprint": lent.fingerprint, "ticket": ticket.to_json()}


def read_lent(record: Any) -> LentNotice:
    """Raises SenselessWord, BadTicket."""
    try:
        asked, fingerprint = decode_as(Attempt, record["asked"]), record["fingerprint"]
        ticket = read_ticket(record["ticket"])
    except (KeyError, TypeError, DecodeError) as error:
        raise SenselessWord(f"a notice of pages that cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(fingerprint, str) or len(fingerprint) > LONGEST_FINGERPRINT:
        raise SenselessWord(f"a notice of pages of {shown(fingerprint)}")
    if [(each.dtype, len(each.shape)) for each in ticket.arrays] != [("uint8", 2)]:
        raise BadTicket(f"a notice of pages offers {shown(str(ticket.arrays))}, records are one array of bytes")
    return LentNotice(asked, fingerprint, ticket)


def pull_records(kv: RemoteKV, notice: LentNotice, lender: WorkerId, asker: WorkerId) -> Lent:
    """Blocks. Raises TransportError."""
    (array,) = kv.pull_offer(notice.ticket, [_host()])
    return Lent(lender, asker, notice.asked, np.asarray(array), notice.fingerprint)


def _host() -> Device:
    """Where records lie: the host's memory, as far as JAX knows it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
