"""The control client of a worker process: it joins the router, says what it is, and joins again when cut off."""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import grpc

from jdisagg.core.authenticated_channel import AuthenticatedChannel, mac_of
from jdisagg.core.errors import JdisaggError, PeerDead, PeerMismatch
from jdisagg.kv.transport.config import Identity
from jdisagg.kv.transport.listener import compare
from jdisagg.policy.lease import Witness
from jdisagg.serve.cluster.control_server import OPTIONS
from jdisagg.serve.cluster.link import (
    HANDSHAKE_S,
    LAST,
    METHOD,
    PIECE_BYTES,
    PROTOCOL,
    Heartbeat,
    Link,
    new_nonce,
    nonce_of,
    read_opening,
    read_record,
)
from jdisagg.serve.cluster.periodic import PeriodicTask

log = logging.getLogger("jdisagg.cluster")

MAX_REFUSAL_CHARS = 1000  # characters of a refusal
OWN = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection of its own, whoever else calls that address


class ClientCallbacks(Protocol):
    """What a worker process does with its link. Called from the link's thread."""

    def hello(self) -> dict[str, Any]:
        """The body of the handshake that describes its workers, made anew for every session."""
        ...

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None: ...

    def on_message(self, body: dict[str, Any]) -> None: ...

    def on_lost(self, why: str) -> None:
        """Once for every `on_joined`: everything of that session is over."""
        ...


@dataclass(frozen=True, slots=True)
class Handshake:
    """The worker process's part of a handshake: who it is, and who the router has to be."""

    address: str
    secret: bytes
    identity: Identity
    heartbeat: Heartbeat

    def open_link(self, call: Any, nonce: str) -> Link:
        """The session, once the router has proved itself; it has not heard of us yet. Raises PeerMismatch, PeerDead."""
        try:
            reply = read_opening(next(call))
        except (grpc.RpcError, StopIteration) as error:
            raise _reason(error) from error
        theirs, proof = nonce_of(reply), str(reply.get("mac")).encode(errors="replace")
        if not hmac.compare_digest(proof, mac_of(self.secret, "router", nonce, theirs).encode()):
            raise PeerMismatch(
                f"the router at {self.address} does not share our secret: give all the same --secret_file"
            )
        session = nonce + theirs
        outgoing, incoming = (AuthenticatedChannel(self.secret, session, end) for end in ("worker", "router"))
        return Link(outgoing, incoming, self.heartbeat)

    def greet(self, link: Link, hello: dict[str, Any]) -> None:
        link.send(hello | {"identity": asdict(self.identity)})

    def welcome(self, link: Link, answers: Any) -> dict[str, Any]:
        """The router's answer. Raises PeerMismatch where it refuses us or runs something else, PeerDead."""
        try:
            body = link.read(read_record(answers, PIECE_BYTES))
        except (grpc.RpcError, StopIteration) as error:
            link.hang_up("not welcome")
            raise _reason(error) from error
        if body is None or "welcome" not in body:
            link.hang_up("not welcome")
            raise PeerMismatch(f"the router at {self.address} answers {str(body)[:80]}")
        compare(self.identity, body.get("identity"), f"the router at {self.address}")
        return body["welcome"]


class Opening:
    """Our side of the stream: the first record, then, once both ends know each other, those of the link."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._link: Link | None = None
        self._call: Any = None
        self._parting = b""

    def go_on(self, link: Link, call: Any) -> None:
        self._link, self._call = link, call
        self._known.set()

    def disbelieve(self, call: Any) -> None:
        """The router does not know our secret: what we send now proves none to it, and it tells of us where it runs."""
        self._parting = LAST + b"{}"
        self._known.set()
        with suppress(grpc.RpcError, StopIteration):
            next(call)

    def give_up(self) -> None:
        """There is nothing more to say, unless the link was given already."""
        self._known.set()

    def records(self, nonce: str) -> Iterator[bytes]:
        yield json.dumps({"jdisagg": PROTOCOL, "nonce": nonce}).encode()
        self._known.wait()
        if self._parting:
            yield self._parting
        if self._link is not None:
            yield from self._link.records()
            self._call.cancel()  # silent or hung up: whoever waits for the router's next message is to know


class ControlClient:
    """Keeps this process joined to the router at `address` until `stop`; a router that refuses it ends it.

    Where `address` names two, with a comma, it is joined to whichever of them leads.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        identity: Identity,
        callbacks: ClientCallbacks,
        heartbeat: Heartbeat | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry_s: float = 1.0,
        refused: Callable[[str], None] = lambda why: None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`refused` is called with why the router will never take this process as it is."""
        self._addresses, self._callbacks, self._refused = deque(address.split(",")), callbacks, refused
        self._handshake = Handshake(self._addresses[0], secret, identity, heartbeat or Heartbeat())
        self._witness = Witness()
        self._credentials, self._retry_s, self._handshake_s = credentials, retry_s, handshake_s
        self._stopped = threading.Event()
        self._link: Link | None = None
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        link, call = self._link, self._call
        if link is not None:
            link.hang_up("this process goes down")
        elif call is not None:
            call.cancel()
        self._thread.join(timeout=5)

    @property
    def address(self) -> str:
        """Where it is joined, or tries to be."""
        return self._handshake.address

    def _next(self) -> None:
        """Another router's turn, unless it has promised to wait for this one."""
        if not self._witness.bound(time.monotonic()):
            self._addresses.rotate(-1)
            self._handshake = replace(self._handshake, address=self._addresses[0])

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._witness.released(time.monotonic()):
                    self._next()
                self._connect()
            except PeerMismatch as error:
                log.error("the router at %s refuses this process: %s", self.address, error)
                self._refused(str(error))
                return
            except (JdisaggError, grpc.RpcError) as error:
                log.info("no router at %s: %s", self.address, error)
            except Exception:  # whatever answers there: this process goes on looking for its router
                log.exception("what is at %s cannot be followed", self.address)
            self._next()
            self._stopped.wait(self._retry_s / len(self._addresses))

    def _connect(self) -> None:
        """One stream, from the handshake to its end."""
        if self._credentials:
            channel = grpc.secure_channel(self.address, self._credentials, OWN)
        else:
            channel = grpc.insecure_channel(self.address, OWN)
        with channel:
            nonce, opening = new_nonce(), Opening()
            self._call = call = channel.stream_stream(METHOD)(opening.records(nonce))
            deadlines = threading.Timer(self._handshake_s, call.cancel)  # one that is stopped, or cut off, says nothing
            deadlines.start()
            try:
                link = self._open(call, nonce, opening)
                self._handshake.greet(link, self._callbacks.hello() | self._asking())
                opening.go_on(link, call)
                welcome = self._handshake.welcome(link, call)
                self._heed(welcome)
            finally:
                deadlines.cancel()
                opening.give_up()
            self._serve(link, welcome, call)

    def _open(self, call: Any, nonce: str, opening: Opening) -> Link:
        try:
            return self._handshake.open_link(call, nonce)
        except PeerMismatch:
            opening.disbelieve(call)
            raise

    def _asking(self) -> dict[str, Any]:
        """Whether a router may count upon us, should it not lead yet."""
        return {"term": self._witness.term, "asks": self._witness.may_ask(time.monotonic())}

    def _heed(self, welcome: dict[str, Any]) -> None:
        """Raises PeerDead where the router does not lead, or not any more."""
        now_s, by, term = time.monotonic(), welcome.get("standing_by"), welcome.get("term", 0)
        if type(by) is int:
            if by:
                self._witness.promise(by, now_s)
            raise PeerDead("it stands by")
        if type(term) is not int or ("lease" not in welcome and not self._witness.obey(term, now_s)):
            raise PeerDead(f"it leads with term {str(term)[:20]}, and term {self._witness.term} was obeyed")

    def _serve(self, link: Link, welcome: dict[str, Any], call: Any) -> None:
        self._link = link
        if self._stopped.is_set():  # stopped while it was being welcomed
            link.hang_up("this process goes down")
        try:
            self._callbacks.on_joined(link, welcome)
            with PeriodicTask(self._handshake.heartbeat.silence_s / 5, lambda: link.is_stuck() and call.cancel()):
                self._listen(link, call)
        finally:
            self._link = None
            call.cancel()
            self._callbacks.on_lost(link.why_over or "the router hung up")

    def _listen(self, link: Link, answers: Any) -> None:
        try:
            for body in link.bodies(answers):
                self._callbacks.on_message(body)
            link.hang_up("the router hung up")
        except grpc.RpcError as error:
            link.hang_up(f"the connection broke ({_code(error)})")
        except JdisaggError as error:
            link.hang_up(str(error))
        except Exception as error:
            log.exception("the router said what cannot be followed")
            link.hang_up(f"{type(error).__name__}: {error}")


def _code(error: grpc.RpcError) -> str:
    code = getattr(error, "code", None)
    return code().name if code is not None else type(error).__name__


def _reason(error: grpc.RpcError | StopIteration) -> JdisaggError:
    """A refusal with the router's reason, or a router that is not there."""
    details = getattr(error, "details", None)
    text = (details() if details is not None else "") or type(error).__name__
    reason = "".join(each if each.isprintable() else " " for each in text[:MAX_REFUSAL_CHARS])
    refused = isinstance(error, grpc.RpcError) and _code(error) == "PERMISSION_DENIED"
    return PeerMismatch(reason) if refused else PeerDead(reason)
