"""By NIXL: the destination reads the source's registered memory, one-sided, over whatever UCX finds (RDMA, else TCP).

Optional: `pip install --no-deps nixl-cu12` (its declared dependency on torch is not used). What one-sided reads bring
with them, and what is done about it here:
- nobody at the source notices a read, so after it the destination asks whether the offer still stood: bytes of a
  buffer that may have been written anew in the meantime are thrown away;
- a read that was given up may still land: its buffer is leased to nobody until NIXL has let go of the request;
- memory that a peer may still read must stay mapped: buffers are registered once, used again and kept to the end.
Descriptors travel as plain numbers; NIXL's own serialisation of them is pickle, and is not used.
"""

from __future__ import annotations

import base64
import logging
import mmap
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from nixl_cu12 import nixl_agent, nixl_agent_config, nixl_thread_sync_t  # pyright: ignore[reportMissingImports]

from jdisagg.core.errors import BadTicket, PeerDead, TransferRefused
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Connection, Deadline
from jdisagg.kv.transport.endpoint import Endpoint, exchange
from jdisagg.kv.transport.listener import Ended, Offer, listen_tcp
from jdisagg.kv.transport.memory import BufferLease, Buffers, offsets_of
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.ticket import Ticket

POLL_S = 0.0002
logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to stdout


def nixl(config: TransportConfig) -> Endpoint:
    """Between two processes that both have the wheel."""
    return Endpoint(config, NixlBackend(config))


@dataclass(eq=False, slots=True)
class Room:
    """A receive buffer; `lease` is None where a read may still land in it."""

    lease: BufferLease | None


class NixlBackend:
    name = "nixl"

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._agent = nixl_agent(
            f"jdisagg-{secrets.token_hex(8)}",  # new with every life of the process
            nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT),
        )
        self._registered: list[Any] = []
        self._outgoing = Buffers(2 * config.offer_limit_bytes, self._make)  # lengths are rounded up
        self._incoming = Buffers(config.pull_limit_bytes, self._make)
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}  # other agents and the metadata that was loaded of them
        self._stuck: list[tuple[Any, BufferLease]] = []  # reads that were given up and may still land

    def listen(self) -> tuple[socket.socket, str]:
        return listen_tcp(self._config)

    def prepare_offer(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, connection: Connection) -> dict[str, Any]:
        arrays = list(offer.arrays)
        offer.deadline.wait_computed(arrays, connection.must_be_quiet)
        started_s = offer.deadline.clock()
        offer.staged = lease = self._outgoing.take(offer.ticket.arrays)  # given back as the offer dies
        for view, array in zip(lease.views, arrays, strict=True):
            offer.deadline.left_s()
            np.copyto(view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8))
        offer.arrays.clear()
        with self._lock:
            metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        copied_s = offer.deadline.clock() - started_s
        return {"metadata": metadata, "at": lease.views[0].ctypes.data, "copied_s": copied_s}

    def send(self, offer: Offer, connection: Connection) -> None:
        """The destination reads."""

    def prepare(self, ticket: Ticket) -> Room:
        return Room(self._incoming.take(ticket.arrays))

    def receive(
        self,
        ticket: Ticket,
        room: Room,
        grant: dict[str, Any],
        connection: Connection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        metadata, at = grant.get("metadata"), grant.get("at")
        if not isinstance(metadata, str) or not isinstance(at, int) or room.lease is None:
            raise BadTicket(f"{connection.peer} grants {str(grant)[:80]}, which names no memory of an agent")
        agent = self._meet(base64.b64decode(metadata))
        self._read(agent, at, offsets_of(ticket.arrays)[1], room, connection, deadline)
        standing = exchange(connection, {"do": "ask", "id": ticket.id, "tag": ticket.tag}, deadline)
        if standing.get("ended") != "":
            raise TransferRefused(f"{deadline.what}: the offer ended while it was read: {standing}")
        arrays = [jax.device_put(view, device) for view, device in zip(room.lease.views, devices, strict=True)]
        room.lease.views.clear()  # jax's own references keep the buffer leased
        return arrays

    def _meet(self, metadata: bytes) -> str:
        """The peer agent's name, its latest memory known to ours."""
        with self._lock:
            for name, known in self._known.items():
                if known == metadata:
                    return name
            found = self._agent.add_remote_agent(metadata)
            name = found.decode() if isinstance(found, bytes) else str(found)
            self._known[name] = metadata
            return name

    def _read(self, agent: str, at: int, nbytes: int, room: Room, connection: Connection, deadline: Deadline) -> None:
        """Fills the room from the agent's memory, or leaves it where a late read can do no harm."""
        assert room.lease is not None
        here = self._agent.get_xfer_descs([(room.lease.views[0].ctypes.data, nbytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(at, nbytes, 0)], "DRAM")
        request = self._agent.initialize_xfer("READ", here, there, agent)
        try:
            state = self._agent.transfer(request)
            while state == "PROC":
                connection.must_be_quiet()
                deadline.sleep(POLL_S)
                state = self._agent.check_xfer_state(request)
            if state != "DONE":
                raise PeerDead(f"{deadline.what}: the read from {connection.peer} ended as {state}")
        except BaseException as error:
            self._forget(agent)
            self._stuck.append((request, room.lease))
            room.lease = None
            self.sweep()
            if isinstance(error, RuntimeError):  # NIXL's own
                raise PeerDead(f"{deadline.what}: the read from {connection.peer} broke off ({error})") from error
            raise
        request.release()

    def _forget(self, agent: str) -> None:
        """Whoever failed once is met anew."""
        with self._lock:
            if self._known.pop(agent, None) is not None:
                self._agent.remove_remote_agent(agent)

    def abandon(self, room: Room) -> None:
        if room.lease is not None:
            self._incoming.give_back(room.lease)

    def may_ack(self, ticket: Ticket) -> bool:
        return True

    def release(self, offer: Offer, how: Ended) -> None:
        """The buffer goes back with the offer itself: no peer that reads it late takes what it read."""

    def sweep(self) -> None:
        """Gives back what NIXL lets go of by now."""
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for request, lease in stuck:
            try:
                request.release()
            except RuntimeError:  # still under way
                self._stuck.append((request, lease))
                continue
            self._incoming.give_back(lease)

    @property
    def pull_bytes(self) -> int:
        return self._incoming.held_bytes

    def close(self) -> None:
        self.sweep()
        for name in list(self._known):
            self._forget(name)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self._outgoing.close()
        self._incoming.close()

    def _make(self, size: int) -> mmap.mmap:
        buffer = mmap.mmap(-1, size)
        at = np.frombuffer(buffer, np.uint8).ctypes.data
        self._registered.append(self._agent.register_memory([(at, size, 0, "")], "DRAM"))
        return buffer
