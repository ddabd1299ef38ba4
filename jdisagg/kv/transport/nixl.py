"""The NIXL transport: the destination reads the source's registered memory by one-sided reads over UCX.

UCX uses RDMA if there is any, else TCP. NIXL is optional: `pip install --no-deps nixl-cu12` (its declared dependency on
torch is not used). One-sided reads need care:

- The source does not notice a read. After it, the destination asks whether the offer was still valid, and discards the
  bytes if not, since the buffer may have been rewritten in the meantime.
- An abandoned read may still write. Its buffer is not leased again until NIXL has released the request.
- Memory that a peer may still read must stay mapped. Buffers are registered once, reused and kept to the end.

Descriptors are sent as plain numbers; NIXL's own serialisation of them is pickle and is not used.
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
from jdisagg.kv.transport.connection import Deadline, KVConnection
from jdisagg.kv.transport.endpoint import Endpoint, exchange
from jdisagg.kv.transport.listener import Offer, OfferOutcome, listen_tcp
from jdisagg.kv.transport.memory import BufferLease, BufferPool, offsets_of
from jdisagg.kv.transport.tcp import host_bytes, start_host_copies
from jdisagg.kv.transport.ticket import Ticket

POLL_S = 0.0002
logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to stdout


def nixl(config: TransportConfig) -> Endpoint:
    """Returns an endpoint between two processes that both have the `nixl` wheel."""
    return Endpoint(config, NixlBackend(config))


@dataclass(eq=False, slots=True)
class ReceiveBuffer:
    """A receive buffer; `lease` is None if a late read may still write to it."""

    lease: BufferLease | None


class NixlBackend:
    name = "nixl"

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._agent = nixl_agent(
            f"jdisagg-{secrets.token_hex(8)}",  # new for each start of the process
            nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT),
        )
        self._registered: list[Any] = []
        self._outgoing = BufferPool(2 * config.offer_limit_bytes, self._make)  # lengths are rounded up
        self._incoming = BufferPool(config.pull_limit_bytes, self._make)
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}  # remote agents and the metadata loaded from them
        self._stuck: list[tuple[Any, BufferLease]] = []  # abandoned reads that may still write

    def listen(self) -> tuple[socket.socket, str]:
        return listen_tcp(self._config)

    def prepare_offer(self, offer: Offer) -> None:
        start_host_copies(offer.arrays)

    def grant(self, offer: Offer, connection: KVConnection) -> dict[str, Any]:
        arrays = list(offer.arrays)
        offer.deadline.wait_computed(arrays, connection.must_be_quiet)
        started_s = offer.deadline.clock()
        offer.staged = lease = self._outgoing.take(offer.ticket.arrays)  # returned when the offer ends
        for view, array in zip(lease.views, arrays, strict=True):
            offer.deadline.left_s()
            np.copyto(view.reshape(-1).view(np.uint8), np.frombuffer(host_bytes(array), np.uint8))
        offer.arrays.clear()
        with self._lock:
            metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        copied_s = offer.deadline.clock() - started_s
        return {"metadata": metadata, "at": lease.views[0].ctypes.data, "copied_s": copied_s}

    def send(self, offer: Offer, connection: KVConnection) -> None:
        """Sends nothing; the destination reads."""

    def prepare(self, ticket: Ticket) -> ReceiveBuffer:
        return ReceiveBuffer(self._incoming.take(ticket.arrays))

    def receive(
        self,
        ticket: Ticket,
        room: ReceiveBuffer,
        grant: dict[str, Any],
        connection: KVConnection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        metadata, at = grant.get("metadata"), grant.get("at")
        if not isinstance(metadata, str) or not isinstance(at, int) or room.lease is None:
            raise BadTicket(f"{connection.peer} grants {str(grant)[:80]}, which names no memory of an agent")
        agent = self._load_agent(base64.b64decode(metadata))
        self._read(agent, at, offsets_of(ticket.arrays)[1], room, connection, deadline)
        reply = exchange(connection, {"do": "ask", "id": ticket.id, "tag": ticket.tag}, deadline)
        if reply.get("ended") != "":
            raise TransferRefused(f"{deadline.what}: the offer ended while it was read: {reply}")
        arrays = [jax.device_put(view, device) for view, device in zip(room.lease.views, devices, strict=True)]
        room.lease.views.clear()  # jax's own references keep the buffer leased
        return arrays

    def _load_agent(self, metadata: bytes) -> str:
        """Returns the name of the peer's agent, after loading its latest metadata into ours."""
        with self._lock:
            for name, known in self._known.items():
                if known == metadata:
                    return name
            added = self._agent.add_remote_agent(metadata)
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._known[name] = metadata
            return name

    def _read(
        self, agent: str, at: int, nbytes: int, room: ReceiveBuffer, connection: KVConnection, deadline: Deadline
    ) -> None:
        """Fills the buffer from the agent's memory, or sets it aside until a late read can do no harm."""
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
            if isinstance(error, RuntimeError):  # raised by NIXL
                raise PeerDead(f"{deadline.what}: the read from {connection.peer} broke off ({error})") from error
            raise
        request.release()

    def _forget(self, agent: str) -> None:
        """Removes an agent after a failure, so that the next read loads its metadata again."""
        with self._lock:
            if self._known.pop(agent, None) is not None:
                self._agent.remove_remote_agent(agent)

    def abandon(self, room: ReceiveBuffer) -> None:
        if room.lease is not None:
            self._incoming.give_back(room.lease)

    def may_ack(self, ticket: Ticket) -> bool:
        return True

    def release(self, offer: Offer, how: OfferOutcome) -> None:
        """Does nothing; the buffer is returned with the offer, and a peer that reads it late discards the bytes."""

    def sweep(self) -> None:
        """Returns the buffers of abandoned reads that NIXL has released."""
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for request, lease in stuck:
            try:
                request.release()
            except RuntimeError:  # still running
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
