"""The transport over `jax.experimental.transfer`, for accelerators: jdisagg does not touch the host copy of the arrays.

Measured behaviour of its server, and how this module handles it:
- A pull that is never answered stays pending for ever. So the source grants it over our own connection first, and the
  destination polls `is_ready` under its deadline.
- Poisoning a connection is the only way to end a pending pull, and a connection whose server has died stays broken. So
  a connection carries one pull at a time, and is poisoned and never used again after any failure.
- If arrays are deleted at their source during a pull (the destination was frozen for longer than the deadline), neither
  server ever completes another pull. So pulls and offers have servers of their own, and after a failure the next one
  begins on a new server. The old server leaks about 40 MB and 5 descriptors.
- Timeouts are swept only when the server next receives something. The listener's tick sends it something.
- An offer that is never pulled is kept for ever. At its end its arrays are deleted, which frees them at once.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jdisagg.core.errors import BadTicket, PeerDead, TransferFull
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.kv.transport.connection import Deadline, KVConnection
from jdisagg.kv.transport.endpoint import Endpoint
from jdisagg.kv.transport.listener import Offer, OfferOutcome, listen_tcp, split_address
from jdisagg.kv.transport.ticket import DTYPES, ID_BITS, Ticket

SOCKETS = 4  # for data; with none the server reaches only its own process
COPIES, CHUNK_BYTES = 8, 4 << 20  # the default, 256 MiB chunks, reserves 6.4 GB of addresses and is no faster
LINGER_S = 5.0  # the server's own timeout is only a second safeguard after ours


def jax_transfer(config: TransportConfig) -> Endpoint:
    """Returns an endpoint between two processes of one jax version. Each array goes between single devices of one
    platform."""
    return Endpoint(config, JaxBackend(config))


class JaxBackend:
    name = "jax_transfer"

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        host = split_address(config.advertise + ":0" if config.advertise else config.listen)[0]
        self._here = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._lock = threading.Lock()
        self._source: Any = None  # servers are started when first needed, and again after a failure
        self._puller: Any = None
        self._idle: dict[str, list[Any]] = {}
        self._pulling: dict[int, int] = {}  # ticket -> bytes
        self._tiny = jax.device_put(np.zeros((), np.float32))

    def listen(self) -> tuple[socket.socket, str]:
        return listen_tcp(self._config)

    def prepare_offer(self, offer: Offer) -> None:
        """Does nothing yet: the server would keep an offer that is never pulled."""

    def grant(self, offer: Offer, connection: KVConnection) -> dict[str, Any]:
        arrays = list(offer.arrays)
        offer.deadline.wait_computed(arrays, connection.must_be_quiet)
        with self._lock:
            if self._source is None:
                self._source = start_server(self._here)
            server = self._source
        offer.staged = server, arrays
        server.await_pull(offer.ticket.id, arrays, timeout=in_seconds(offer.deadline.left_s() + LINGER_S))
        return {"server": server.address()}

    def send(self, offer: Offer, connection: KVConnection) -> None:
        """Sends nothing; the server does when the destination's server asks."""

    def prepare(self, ticket: Ticket) -> int:
        with self._lock:
            pulling_bytes = sum(self._pulling.values())
            if pulling_bytes + ticket.nbytes > self._config.pull_limit_bytes:
                raise TransferFull(
                    f"{ticket.nbytes} bytes to pull beside {pulling_bytes} under way is over the limit of "
                    f"{self._config.pull_limit_bytes}"
                )
            self._pulling[ticket.id] = ticket.nbytes
        return ticket.id

    def receive(
        self,
        ticket: Ticket,
        room: int,
        grant: dict[str, Any],
        connection: KVConnection,
        devices: Sequence[Any],
        deadline: Deadline,
    ) -> list[Array]:
        address = grant.get("server")
        if not isinstance(address, str):
            raise BadTicket(f"{connection.peer} grants {str(grant)[:80]}, which names no transfer server")
        puller, channel = self._take(address)
        wanted = [
            jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype], sharding=SingleDeviceSharding(device))
            for spec, device in zip(ticket.arrays, devices, strict=True)
        ]
        try:
            arrays = channel.pull(ticket.id, wanted, timeout=in_seconds(deadline.left_s() + LINGER_S))
            wait_landed(arrays, connection, deadline)
        except BaseException:
            channel._poison_connection()  # the only way to end a pending pull
            self._drop(puller)
            raise
        with self._lock:
            if puller is self._puller:
                self._idle.setdefault(address, []).append(channel)
        self.abandon(room)
        return arrays

    def abandon(self, room: int) -> None:
        """Releases the bytes that the pull reserved."""
        with self._lock:
            self._pulling.pop(room, None)

    def may_ack(self, ticket: Ticket) -> bool:
        return True

    def release(self, offer: Offer, how: OfferOutcome) -> None:
        """Deletes arrays that were handed to the server and not fetched, since the server would keep them."""
        server, arrays = offer.staged or (None, ())
        if server is not None and how not in (OfferOutcome.ACKED, OfferOutcome.ACKED_HERE):
            with self._lock:
                self._source = None if server is self._source else self._source
            for array in arrays:
                array.delete()
        self._tick()

    def sweep(self) -> None:
        self._tick()

    @property
    def pull_bytes(self) -> int:
        return sum(self._pulling.values())

    def close(self) -> None:
        """Drops the servers; a server stops when its last reference goes."""
        with self._lock:
            self._source = self._puller = None
            self._idle.clear()

    def _take(self, address: str) -> tuple[Any, Any]:
        """Returns the pulling server and one of its idle connections."""
        with self._lock:
            if self._puller is None:
                self._puller = start_server(self._here)
            idle = self._idle.get(address)
            return self._puller, idle.pop() if idle else self._puller.connect(address)

    def _drop(self, puller: Any) -> None:
        """Moves later pulls to a new server; those in progress on this one end by themselves."""
        with self._lock:
            if puller is self._puller:
                self._puller = None
                self._idle.clear()

    def _tick(self) -> None:
        """Makes the server sweep its timeouts by giving it a scalar that has timed out already."""
        with self._lock:
            server = self._source
        if server is not None:
            server.await_pull(secrets.randbits(ID_BITS), [self._tiny], timeout=in_seconds(0.0))


def start_server(address: str) -> Any:
    return transfer.start_transfer_server(
        jax.local_devices()[0].client,
        address,
        [address] * SOCKETS,
        max_num_parallel_copies=COPIES,
        transfer_size=CHUNK_BYTES,
        use_raw_buffers=False,  # raw buffers would still be read if an array is deleted in the middle
    )


def wait_landed(arrays: Sequence[Any], connection: KVConnection, deadline: Deadline) -> None:
    """Waits for the arrays. Raises PeerDead if the other server went away, or what the deadline raises."""
    while not all(array.is_ready() for array in arrays):
        connection.must_be_quiet()
        deadline.sleep(0.0005)
    try:
        jax.block_until_ready(arrays)
    except RuntimeError as error:
        raise PeerDead(
            f"{deadline.what}: the transfer from {connection.peer} broke off ({str(error)[:200]})"
        ) from error


def in_seconds(seconds: float) -> datetime.datetime:
    """Returns the time in `seconds` as the absolute local time that the server expects."""
    return datetime.datetime.now() + datetime.timedelta(seconds=seconds)
