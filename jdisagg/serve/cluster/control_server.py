"""The router's control server: it admits worker and front processes, receives messages, and detects lost processes.

A handshake proves the shared secret both ways (challenge and response over two fresh nonces) and compares what the two
processes run. A peer with another model, version or layout is refused with both values. Before that a peer is
unauthenticated: the number of such peers, their time and the size of their first record are limited.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

import grpc

from jdisagg.core.authenticated_channel import AuthenticatedChannel, mac_of
from jdisagg.core.codec import shown
from jdisagg.core.errors import BadTicket, ConfigError, JdisaggError, PeerDead, PeerMismatch
from jdisagg.kv.transport.config import Identity
from jdisagg.kv.transport.listener import PendingHandshakes, compare
from jdisagg.serve.cluster.link import (
    HANDSHAKE_S,
    METHOD,
    PIECE_BYTES,
    PROTOCOL,
    Heartbeat,
    Link,
    PeriodicTask,
    new_nonce,
    nonce_of,
    read_opening,
    read_record,
)

log = logging.getLogger("jdisagg.cluster")

MAX_PEERS = 256  # processes that have joined
MAX_STRANGERS = 64  # unauthenticated peers
MAX_CALLS = MAX_PEERS + 2 * MAX_STRANGERS  # with calls that are ending; a thread each
OPTIONS = [("grpc.max_receive_message_length", PIECE_BYTES + 1)]


class ServerCallbacks(Protocol):
    """The reactions of the router's process to its peers. Called on the links' threads."""

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to an authenticated peer. A JdisaggError refuses the peer with its text."""
        ...

    def on_joined(self, link: Link) -> None:
        """Called when the answer was sent; from now on the link accepts messages."""

    def on_message(self, link: Link, body: dict[str, Any]) -> None: ...

    def on_lost(self, link: Link, why: str) -> None:
        """Called once for every admitted link, when it has ended."""


class ControlServer:
    """Listens on `address` (HOST:PORT; port 0 picks one) from `start` to `stop`."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        identity: Identity,
        callbacks: ServerCallbacks,
        heartbeat: Heartbeat | None = None,
        credentials: grpc.ServerCredentials | None = None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Binds the address. Raises ConfigError if that fails."""
        self._secret, self._identity, self._callbacks = secret, identity, callbacks
        self._heartbeat = heartbeat or Heartbeat()
        self._handshakes = PendingHandshakes(MAX_STRANGERS, handshake_s)
        self._links: dict[Link, grpc.ServicerContext] = {}
        self._lock = threading.Lock()
        self._checker = PeriodicTask(min(handshake_s, self._heartbeat.silence_s) / 5, self._end_overdue)
        pool = ThreadPoolExecutor(MAX_CALLS, "control")
        self._server = grpc.server(pool, options=_limits(handshake_s), maximum_concurrent_rpcs=MAX_CALLS)
        stream = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: stream})])
        try:
            add = self._server.add_insecure_port
            self.port = self._server.add_secure_port(address, credentials) if credentials else add(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} for worker processes: {error}") from error

    def start(self) -> None:
        self._server.start()
        self._checker.start()

    def stop(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.hang_up("the router's process goes down")
        self._server.stop(grace=1.0).wait()
        self._checker.stop()

    def _end_overdue(self) -> None:
        """Ends handshakes that take too long, and the calls of links that are stuck."""
        self._handshakes.sweep()
        with self._lock:
            links = list(self._links.items())
        for link, call in links:
            if link.is_stuck():
                call.cancel()

    def _serve(self, records: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        if len(self._links) >= MAX_PEERS:
            call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_PEERS} processes have joined, the most there may be")
        try:
            with self._handshakes.admit(_host_of(call.peer()), call.cancel):
                nonces = yield from self._challenge(records)
                link = Link(
                    AuthenticatedChannel(self._secret, nonces, "router"),
                    AuthenticatedChannel(self._secret, nonces, "worker"),
                    self._heartbeat,
                )
                answer = self._admit(link, records)
        except PeerDead as error:
            log.info("%s", error)
            return
        except JdisaggError as error:
            log.warning("a peer at %s was sent away: %s", call.peer(), error)
            call.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except (grpc.RpcError, StopIteration):
            log.info("a peer at %s left, or was cut off, before it had proved itself", call.peer())
            return
        try:
            self._welcome(link, answer, records, call)
            yield from link.records()
        finally:
            self._forget(link)

    def _welcome(
        self, link: Link, answer: dict[str, Any], records: Iterator[bytes], call: grpc.ServicerContext
    ) -> None:
        link.send(answer)
        with self._lock:
            self._links[link] = call
        self._callbacks.on_joined(link)
        if not call.add_callback(lambda: link.hang_up("the stream ended")):
            link.hang_up("the stream ended")
        threading.Thread(target=self._listen, args=(link, records), name="control-reader", daemon=True).start()

    def _challenge(self, records: Iterator[bytes]) -> Any:
        """Reads the peer's nonce, sends ours with a proof of the secret, and returns both nonces."""
        first = read_opening(next(records, b""))
        if first.get("jdisagg") != PROTOCOL:
            theirs = f"the peer speaks protocol {first.get('jdisagg')!r:.40}"
            raise PeerMismatch(f"{theirs}, we speak {PROTOCOL}: install the same jdisagg")
        ours, theirs = new_nonce(), nonce_of(first)
        yield json.dumps({"nonce": ours, "mac": mac_of(self._secret, "router", theirs, ours)}).encode()
        return theirs + ours

    def _admit(self, link: Link, records: Iterator[bytes]) -> dict[str, Any]:
        record = read_record(records, PIECE_BYTES)
        try:
            hello = link.read(record)
        except BadTicket:
            raise PeerMismatch("the peer does not share our secret: give all the same --secret_file") from None
        if hello is None:
            raise BadTicket("the peer said nothing of itself")
        compare(self._identity, hello.get("identity"), _who(hello))
        return {"welcome": self._callbacks.admit(link, hello), "identity": asdict(self._identity)}

    def _listen(self, link: Link, records: Iterator[bytes]) -> None:
        try:
            for body in link.bodies(records):
                self._callbacks.on_message(link, body)
            link.hang_up("the peer hung up")
        except grpc.RpcError:
            link.hang_up("the connection broke")
        except JdisaggError as error:
            link.hang_up(str(error))
        except Exception as error:  # from any message: the peer's link ends, and the server goes on
            log.exception("a peer said what cannot be followed")
            link.hang_up(f"{type(error).__name__}: {error}")

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.pop(link, None)
        link.hang_up("the stream ended")
        self._callbacks.on_lost(link, link.why_over)


def _limits(handshake_s: float) -> list[tuple[str, int]]:
    """Returns the gRPC options that limit connections, their idle time and their calls."""
    patience_ms = math.ceil(1000 * handshake_s)
    return [
        *OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", 2 * MAX_CALLS),
        ("grpc.max_concurrent_streams", 8),
        ("grpc.server_handshake_timeout_ms", patience_ms),
        ("grpc.max_connection_idle_ms", patience_ms),
        ("grpc.max_metadata_size", 8 << 10),
    ]


def _who(hello: dict[str, Any]) -> str:
    named = hello.get("named")
    return f"the process of {shown(named)}" if named else "the peer"


def _host_of(peer: str) -> str:
    """Returns the host of a gRPC peer: "ipv4:10.0.0.1" of "ipv4:10.0.0.1:40000"."""
    return peer.rpartition(":")[0]
