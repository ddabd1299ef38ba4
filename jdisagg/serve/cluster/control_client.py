"""The control client of worker and front processes: it joins the router, and joins again after a lost connection."""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import grpc

from jdisagg.core.authenticated_channel import AuthenticatedChannel, mac_of
from jdisagg.core.errors import ConfigError, JdisaggError, PeerDead, PeerMismatch, SenselessWord
from jdisagg.kv.transport.config import Identity
from jdisagg.kv.transport.listener import compare
from jdisagg.serve.cluster.control_server import OPTIONS
from jdisagg.serve.cluster.coordination import MAX_TERM, CoordinationError, RouterAddress
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

MAX_REFUSAL_CHARS = 1000  # characters of a refusal
OWN = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # not shared with other clients of the address


class ClientCallbacks(Protocol):
    """The reactions of a worker or front process to its link. Called on the link's thread."""

    def hello(self) -> dict[str, Any]:
        """Returns the handshake's body that describes this process's workers, new for every session."""
        ...

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None: ...

    def on_message(self, body: dict[str, Any]) -> None: ...

    def on_lost(self, why: str) -> None:
        """Called once for every `on_joined`, when the session has ended."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The client's side of a handshake: its identity, and the identity that the router must have."""

    address: str
    secret: bytes
    identity: Identity
    heartbeat: Heartbeat

    def open_link(self, call: Any, nonce: str) -> Link:
        """Returns the link once the router has proved that it has the secret. Raises PeerMismatch, PeerDead."""
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
        """Returns the router's answer. Raises PeerMismatch for a refusal or another identity, PeerDead."""
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
    """The client's records of a stream: the first one, and after the handshake those of the link."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._link: Link | None = None
        self._call: Any = None

    def go_on(self, link: Link, call: Any) -> None:
        self._link, self._call = link, call
        self._known.set()

    def give_up(self) -> None:
        self._known.set()

    def records(self, nonce: str) -> Iterator[bytes]:
        yield json.dumps({"jdisagg": PROTOCOL, "nonce": nonce}).encode()
        self._known.wait()
        if self._link is not None:
            yield from self._link.records()
            self._call.cancel()  # the link ended: wake the thread that waits for the router's next message


Locate = Callable[[], tuple[str, int] | None]  # the leader's address and term, as a `Lease` has them


class TermFence:
    """The highest term that a worker or front has accepted; a router with a lower term is refused."""

    def __init__(self) -> None:
        self.term, self.router = 0, ""

    def obey(self, term: Any, router: Any) -> None:
        """Accepts the router's term. Raises PeerDead for a lower term than was accepted, SenselessWord for no term."""
        if type(term) is not int or not 0 <= term < MAX_TERM or not isinstance(router, str):
            raise SenselessWord(f"the router leads with the term {str(term)[:20]}, must lie in [0, {MAX_TERM - 1}]")
        if term < self.term or (term == self.term and self.term and router != self.router):
            raise PeerDead(f"it leads with term {term}, and term {self.term} of another router was obeyed")
        self.term, self.router = term, router


class ControlClient:
    """Keeps this process joined to the router that leads until `stop`; a router that refuses the process ends it.

    The router is at `address`, or at the address that `locate` returns. `locate` is called before every connection and
    during it, so that a new leader is found before the old one times out.
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
        locate: Locate | None = None,
    ) -> None:
        """`refused` is called with the reason if the router refuses this process for good."""
        self._callbacks, self._refused, self._locate = callbacks, refused, locate
        self._handshake = Handshake(address, secret, identity, heartbeat or Heartbeat())
        self._fence = TermFence()
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
        """The router's address, as of the last attempt to join."""
        return self._handshake.address

    def _find(self) -> None:
        """Asks the coordination service for the leader's address. Raises CoordinationError without a leader."""
        if self._locate is None:
            return
        found = self._locate()
        if found is None:
            raise CoordinationError("the coordination service knows of no leader")
        self._handshake = replace(self._handshake, address=RouterAddress.parse(found[0]).control)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._find()
                self._connect()
            except PeerMismatch as error:
                log.error("the router at %s refuses this process: %s", self.address, error)
                self._refused(str(error))
                return
            except CoordinationError as error:
                log.info("no router is found: %s", error)
            except ConfigError as error:
                self._refused(str(error))
                return
            except (JdisaggError, grpc.RpcError) as error:
                log.info("no router at %s: %s", self.address, error)
            except Exception:  # from any peer at the address: keep looking for the router
                log.exception("what is at %s cannot be followed", self.address)
            self._stopped.wait(self._retry_s)

    def _connect(self) -> None:
        if self._credentials:
            channel = grpc.secure_channel(self.address, self._credentials, OWN)
        else:
            channel = grpc.insecure_channel(self.address, OWN)
        with channel:
            nonce, opening = new_nonce(), Opening()
            self._call = call = channel.stream_stream(METHOD)(opening.records(nonce))
            deadlines = threading.Timer(self._handshake_s, call.cancel)  # a stopped router does not answer
            deadlines.start()
            try:
                link = self._handshake.open_link(call, nonce)
                self._handshake.greet(link, self._callbacks.hello() | self._accepted_term())
                opening.go_on(link, call)
                welcome = self._handshake.welcome(link, call)
                self._check_welcome(welcome)
            finally:
                deadlines.cancel()
                opening.give_up()
            self._serve(link, welcome, call)

    def _accepted_term(self) -> dict[str, Any]:
        """Returns the highest accepted term, which the next router's term must exceed, and its router."""
        return {"term": self._fence.term, "router": self._fence.router}

    def _check_welcome(self, welcome: dict[str, Any]) -> None:
        """Accepts the router's term. Raises PeerDead for a standby, or for a lower term than was accepted."""
        if welcome.get("standby"):
            raise PeerDead("it is a standby")
        self._fence.obey(welcome.get("term", 0), welcome.get("router", ""))

    def _check_leader(self, link: Link) -> None:
        """Ends the link if the service names another leader with a higher term."""
        try:
            found = None if self._locate is None else self._locate()
        except JdisaggError:
            return  # the router steps down by itself when its lease ends
        if found is not None and found[1] > self._fence.term and RouterAddress.parse(found[0]).control != self.address:
            link.hang_up(f"another router leads, with term {found[1]}")

    def _serve(self, link: Link, welcome: dict[str, Any], call: Any) -> None:
        self._link = link
        if self._stopped.is_set():  # `stop` was called during the handshake
            link.hang_up("this process goes down")
        try:
            self._callbacks.on_joined(link, welcome)
            interval_s = self._handshake.heartbeat.silence_s / 5
            with (
                PeriodicTask(interval_s, lambda: link.is_stuck() and call.cancel()),
                nullcontext() if self._locate is None else PeriodicTask(interval_s, lambda: self._check_leader(link)),
            ):
                self._listen(link, call)
        finally:
            self._link = None
            call.cancel()
            self._callbacks.on_lost(link.why_over or "the router hung up")

    def _listen(self, link: Link, answers: Any) -> None:
        try:
            for body in link.bodies(answers):
                if "term" in body:
                    self._fence.obey(body["term"], self._fence.router)
                else:
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
    """Returns PeerMismatch with the router's reason for a refusal, else PeerDead."""
    details = getattr(error, "details", None)
    text = (details() if details is not None else "") or type(error).__name__
    reason = "".join(each if each.isprintable() else " " for each in text[:MAX_REFUSAL_CHARS])
    refused = isinstance(error, grpc.RpcError) and _code(error) == "PERMISSION_DENIED"
    return PeerMismatch(reason) if refused else PeerDead(reason)
