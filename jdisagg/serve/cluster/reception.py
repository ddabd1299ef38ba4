"""The router's end of the control links: it admits worker processes, hears them, and notices when they are gone.

A handshake proves the shared secret both ways (challenge and response over two fresh nonces) and compares what the two
processes run; a peer of another model, version or layout is told both fingerprints and sent away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

import grpc

from jdisagg.core.errors import BadTicket, ConfigError, JdisaggError, PeerMismatch
from jdisagg.core.wire import MAX_RECORD_BYTES, Seal, mac_of
from jdisagg.kv.transport.hello import compare
from jdisagg.kv.transport.terms import Identity
from jdisagg.serve.cluster.link import HANDSHAKE_S, METHOD, PROTOCOL, Link, Pulse, new_nonce

log = logging.getLogger("jdisagg.cluster")

MAX_PEERS = 256
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_RECORD_BYTES),
    ("grpc.max_send_message_length", MAX_RECORD_BYTES),
    ("grpc.so_reuseport", 0),
]


class Host(Protocol):
    """What the router's process does with its peers. Called from the links' threads."""

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        """A peer has proved itself; what to answer. A JdisaggError sends it away with its text."""
        ...

    def welcomed(self, link: Link) -> None:
        """The answer is on its way: from now on the link takes words."""
        ...

    def hear(self, link: Link, body: dict[str, Any]) -> None: ...

    def lose(self, link: Link, why: str) -> None:
        """Once for every link that was admitted."""
        ...


class Reception:
    """Listens on `address` (HOST:PORT; port 0 picks one) from `start` to `stop`."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        identity: Identity,
        host: Host,
        pulse: Pulse | None = None,
        credentials: grpc.ServerCredentials | None = None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Raises ConfigError where the address cannot be had."""
        self._handshake_s = handshake_s
        self._secret, self._identity, self._host, self._pulse = secret, identity, host, pulse or Pulse()
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(MAX_PEERS, "control"), options=OPTIONS)
        stream = grpc.stream_stream_rpc_method_handler(self._attend)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: stream})])
        try:
            add = self._server.add_insecure_port
            self.port = self._server.add_secure_port(address, credentials) if credentials else add(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} for worker processes: {error}") from error

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Hangs up on everybody."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.hang_up("the router's process goes down")
        self._server.stop(grace=1.0).wait()

    def _attend(self, records: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        """One peer's stream, from its first word to its end."""
        patience = threading.Timer(self._handshake_s, call.cancel)  # strangers may not keep a thread by saying nothing
        patience.start()
        try:
            nonces = yield from self._challenge(records)
            link = Link(Seal(self._secret, nonces, "router"), Seal(self._secret, nonces, "worker"), self._pulse)
            answer = self._admit(link, records)
        except JdisaggError as error:
            log.warning("a peer at %s was sent away: %s", call.peer(), error)
            call.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except (grpc.RpcError, StopIteration):
            log.warning("a peer at %s left, or was cut off, before it had proved itself", call.peer())
            return
        finally:
            patience.cancel()
        try:
            self._take_in(link, answer, records, call)
            yield from link.records()
        finally:
            self._forget(link)

    def _take_in(
        self, link: Link, answer: dict[str, Any], records: Iterator[bytes], call: grpc.ServicerContext
    ) -> None:
        link.send(answer)
        with self._lock:
            self._links.add(link)
        self._host.welcomed(link)
        if not call.add_callback(lambda: link.hang_up("the stream ended")):
            link.hang_up("the stream ended")
        threading.Thread(target=self._listen, args=(link, records), name="control-reader", daemon=True).start()

    def _challenge(self, records: Iterator[bytes]) -> Any:
        first = _plain(next(records, b""))
        if first.get("jdisagg") != PROTOCOL:
            raise PeerMismatch(f"the peer speaks protocol {str(first.get('jdisagg'))[:20]}, we speak {PROTOCOL}")
        ours, theirs = new_nonce(), str(first.get("nonce"))
        if len(theirs) != len(ours):
            raise BadTicket(f"a handshake needs a nonce of {len(ours)} hex digits, got {theirs[:20]!r}")
        yield json.dumps({"nonce": ours, "mac": mac_of(self._secret, "router", theirs, ours)}).encode()
        return theirs + ours

    def _admit(self, link: Link, records: Iterator[bytes]) -> dict[str, Any]:
        try:
            hello = link.read(next(records, b""))
        except BadTicket:
            raise PeerMismatch("the peer does not share our secret") from None
        if hello is None:
            raise BadTicket("the peer said nothing of itself")
        compare(self._identity, hello.get("identity"), "the peer")
        return {"welcome": self._host.admit(link, hello), "identity": asdict(self._identity)}

    def _listen(self, link: Link, records: Iterator[bytes]) -> None:
        try:
            for record in records:
                body = link.read(record)
                if body is not None:
                    self._host.hear(link, body)
            link.hang_up("the peer hung up")
        except grpc.RpcError:
            link.hang_up("the connection broke")
        except JdisaggError as error:
            link.hang_up(str(error))
        except Exception as error:  # whatever it said: it is the peer that goes, not we
            log.exception("a peer said what cannot be followed")
            link.hang_up(f"{type(error).__name__}: {error}")

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.hang_up("the stream ended")
        self._host.lose(link, link.why_over)


def _plain(record: bytes) -> dict[str, Any]:
    """The first record, before there is a session to seal it by."""
    with contextlib.suppress(ValueError):
        body = json.loads(record[:1000])
        if isinstance(body, dict):
            return body
    raise BadTicket(f"the first record of a peer is no object: {record[:40]!r}")
