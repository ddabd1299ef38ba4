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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.core.codec import decode_as, encode
from jdisagg.core.errors import BadTicket, ConfigError, DecodeError, PeerMismatch, SenselessWord, TransportError
from jdisagg.core.events import KVArrived
from jdisagg.core.kv_layout import NULL_PAGE
from jdisagg.core.protocol import MOST_LAYERS, check_transfer
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.reshard import StageShape
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import MOST, WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.packing import HeadSlices
from jdisagg.kv.shipping import LandedKV, PackedKV, Seats
from jdisagg.kv.transport.choose import Capability, choose, open_transport, read_capability
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.protocol import Transport
from jdisagg.kv.transport.ticket import TransferId, read_ticket
from jdisagg.serve.cluster.tickets import Tickets

log = logging.getLogger("jdisagg.cluster")


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A worker as those of other processes must know it."""

    config: WorkerConfig
    stages: tuple[StageShape, ...]
    capability: Capability

    @property
    def worker(self) -> WorkerId:
        return self.config.worker

    def to_json(self) -> dict[str, Any]:
        stages = [
            [stage.layers.start, stage.layers.stop, stage.tp, stage.page_size, stage.dtype] for stage in self.stages
        ]
        return {"config": encode(self.config), "stages": stages, "capability": self.capability.to_json()}


def read_peer(record: dict[str, Any]) -> PeerRecord:
    """Of a peer's JSON. Raises SenselessWord where it is none."""
    try:
        config = decode_as(WorkerConfig, record["config"])
        config.check()
        stages = tuple(_read_stage(each) for each in record["stages"])
        return PeerRecord(config, stages, read_capability(record["capability"]))
    except (KeyError, TypeError, ValueError, DecodeError, ConfigError, PeerMismatch) as error:
        raise SenselessWord(f"a peer describes no worker: {type(error).__name__}: {str(error)[:300]}") from error


def _read_stage(record: Any) -> StageShape:
    first, stop, tp, page_size, dtype = record
    if not isinstance(dtype, str) or not all(type(each) is int for each in (first, stop, tp, page_size)):
        raise ValueError(f"{str(record)[:80]} is no stage")
    if not (0 <= first < stop <= MOST_LAYERS and 1 <= tp <= MOST and 1 <= page_size <= MOST):
        raise ValueError(f"a stage of layers {first} to {stop}, tp {tp} and pages of {page_size}")
    return StageShape(range(first, stop), tp, page_size, dtype)


def id_of(transfer: KVTransfer) -> TransferId:
    return TransferId(transfer.attempt.request_id, transfer.attempt.epoch, transfer.part)


def read_notice(notice: Any, sender: WorkerConfig, to: WorkerConfig) -> KVTransfer:
    """The transfer of a notice that `sender` gives `to`. Raises SenselessWord, BadTicket."""
    try:
        transfer = decode_as(KVTransfer, notice["transfer"])
        ticket = read_ticket(notice["ticket"])
        rows = [_pages_of(each) for each in notice["moves"]]
    except (KeyError, TypeError, ValueError, DecodeError) as error:
        raise SenselessWord(f"a notice that cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
    check_transfer(transfer, sender, to)
    request_id = transfer.attempt.request_id
    if ticket.transfer != id_of(transfer):
        raise SenselessWord(f"a notice of part {transfer.part} of {request_id!r} offers another: {ticket.transfer}")
    for pages in rows:
        if not {NULL_PAGE, *transfer.destination_pages}.issuperset(pages):
            raise SenselessWord(f"a notice of {request_id!r} is for pages that are not the transfer's")
    return transfer


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
    landed: list[LandedKV]

    def wait_packed(self) -> None:
        """It was pulled: it has been packed."""

    def wait(self) -> None:
        """It was pulled: it is here."""

    @property
    def came(self) -> bool:
        return bool(self.landed)


class RemoteKV:
    """This process's transports, opened when first used. Any thread may call."""

    def __init__(
        self, config: TransportConfig, mine: Capability, wanted: str = "auto", timeout_s: float = 30.0
    ) -> None:
        """`wanted` names the transport to use with everybody; offers and pulls end after `timeout_s`."""
        self.config, self.mine, self.wanted, self._timeout_s = config, mine, wanted, timeout_s
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._tickets = Tickets(lambda ticket: self._transports[ticket.transport].cancel(ticket))

    # ------------------------------------------------------------ source

    def ship(self, machine: MeshExecutor, transfer: KVTransfer, peer: PeerRecord) -> dict[str, Any]:
        """Packs now, in program order, and offers; returns the notice. Raises TransportError."""
        packed = machine.pack(transfer, peer.stages)
        transport = self._open(choose(self.mine, peer.capability, self.wanted))
        transfer_id = id_of(transfer)
        arrays = [array for each in packed for array in each.device_arrays]
        until_s = time.monotonic() + self._timeout_s
        ticket = transport.offer(transfer_id, arrays, until_s)
        self._tickets.add(ticket, peer.worker, until_s)
        moves = [_move_json(each) for each in packed]
        return {"transfer": encode(transfer), "ticket": ticket.to_json(), "moves": moves}

    def withdraw(self, attempt: Attempt) -> None:
        """It was given up: what is still offered for it is let go."""
        self._tickets.end(attempt)

    def withdraw_for(self, destination: WorkerId) -> None:
        self._tickets.end_for(destination)

    def withdraw_all(self) -> None:
        self._tickets.end_all()

    # ------------------------------------------------------------ destination

    def fetch(self, machine: MeshExecutor, notice: dict[str, Any]) -> tuple[RemoteShipment, KVArrived]:
        """Pulls what the notice offers; blocks. A failed pull is a part that is not intact."""
        transfer = decode_as(KVTransfer, notice["transfer"])
        began_s = time.monotonic()
        try:
            shipment = RemoteShipment(transfer, self._pull(machine, notice, began_s + self._timeout_s))
        except TransportError as error:
            log.warning("part %d of %s did not come: %s", transfer.part, transfer.attempt.request_id, error)
            shipment = RemoteShipment(transfer, [])
        return shipment, KVArrived(transfer, shipment.came, time.monotonic() - began_s)

    def _pull(self, machine: MeshExecutor, notice: dict[str, Any], deadline_s: float) -> list[LandedKV]:
        ticket, moves = read_ticket(notice["ticket"]), notice["moves"]
        seats = [Seats.of(machine.pages[stage], width, len(kinds)) for stage, *_, width, kinds in moves]
        devices = [device for each in seats for device in each.devices]
        if len(devices) != len(ticket.arrays):
            raise BadTicket(f"{len(ticket.arrays)} arrays are offered, the notice's moves take {len(devices)}")
        transport = self._open(ticket.transport)
        arrays = iter(transport.pull(ticket, devices, deadline_s))
        landed = []
        for each, (stage, first, stop, pages, _, kinds) in zip(seats, moves, strict=True):
            slices = each.joined([next(arrays) for _ in each.devices], kinds)
            landed.append(LandedKV(stage, range(first, stop), slices, np.array(pages, np.int32)))
        transport.ack(ticket)
        return landed

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


def _move_json(packed: PackedKV) -> list[Any]:
    layers, kinds = packed.layers, list(packed.slices.kinds)
    return [packed.stage, layers.start, layers.stop, packed.pages.tolist(), packed.width, kinds]


def records(peers: Iterable[PeerRecord]) -> list[dict[str, Any]]:
    return [peer.to_json() for peer in peers]
