"""How a group comes together: members find their leader, both prove the secret, and the leader calls the roll.

All of it comes before JAX is told of other processes: there, a rank that comes twice or never hangs or aborts whatever
it meets. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import BadTicket, ConfigError, JdisaggError, PeerDead, PeerMismatch, TransferTimeout
from jdisagg.kv.transport.listener import split_address
from jdisagg.policy.roll_call import Card, read_card, refusal, unfilled
from jdisagg.serve.cluster.group.stream import FrameSocket, GroupStream

log = logging.getLogger("jdisagg.group")

PROTOCOL = 2
NONCE_BYTES = 16
OPENING_BYTES = 1000  # the longest first record of a stranger
HANDSHAKE_S = 10.0
RETRY_S = 0.5  # between two looks for a leader that is not there yet
MOST_STRANGERS = 16  # connections in the middle of their handshake
SIDES = ("leader", "member")


class GroupUnfilled(JdisaggError):
    """Not all processes came in time, or the leader did not: another try may find them."""


@dataclass(frozen=True)
class Meeting:
    """Where and how a group meets."""

    address: str  # HOST:PORT of the leader
    secret: bytes
    deadline_s: float  # of the monotonic clock
    wait_s: float  # how long that is in all
    tls_server: ssl.SSLContext | None = None
    tls_client: ssl.SSLContext | None = None


def session_of(opening: Any, ours: str, first: str) -> str:
    """Both nonces, the leader's behind the member's. Raises BadTicket, PeerMismatch."""
    if not isinstance(opening, dict) or "nonce" not in opening:
        raise BadTicket(f"the first record is {str(opening)[:40]!r}, none of a group's")
    if opening.get("jdisagg_group") != PROTOCOL:
        said = f"the peer speaks protocol {opening.get('jdisagg_group')!r:.40}"
        raise PeerMismatch(f"{said}, we speak {PROTOCOL}: install the same jdisagg")
    nonce = opening["nonce"]
    if not isinstance(nonce, str) or not re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", nonce):
        raise BadTicket("the first record has no nonce")
    return nonce + ours if first == "theirs" else ours + nonce


def _opening() -> tuple[str, bytes]:
    nonce = secrets.token_hex(NONCE_BYTES)
    return nonce, json.dumps({"jdisagg_group": PROTOCOL, "nonce": nonce}).encode()


def _read_opening(frames: FrameSocket, deadline_s: float) -> Any:
    try:
        return json.loads(frames.receive(deadline_s, OPENING_BYTES))
    except (ValueError, RecursionError) as error:
        raise BadTicket(f"{frames.peer} sent a first record that is no JSON") from error


# ---------------------------------------------------------------------- the member


def join_leader(meeting: Meeting, card: Card) -> GroupStream:
    """Looks for the leader until the deadline. Raises GroupUnfilled, and PeerMismatch where it refuses us."""
    last = "nobody answers"
    while time.monotonic() < meeting.deadline_s:
        try:
            return _join_once(meeting, card)
        except (PeerDead, TransferTimeout, OSError) as error:
            last = str(error)
        time.sleep(RETRY_S)
    raise GroupUnfilled(
        f"group {card.group!r}: no leader at {meeting.address} within {meeting.wait_s:g} s ({last}); start rank 0, or"
        " give --coordinator its HOST:PORT"
    )


def _join_once(meeting: Meeting, card: Card) -> GroupStream:
    host, port = split_address(meeting.address)
    until_s = min(meeting.deadline_s, time.monotonic() + HANDSHAKE_S)
    sock = socket.create_connection((host, port), timeout=max(0.1, until_s - time.monotonic()))
    frames = FrameSocket(sock, f"the leader at {meeting.address}")
    try:
        if meeting.tls_client is not None:
            frames.secure(meeting.tls_client, host, until_s)
        nonce, opening = _opening()
        frames.send(opening, until_s)
        session = session_of(_read_opening(frames, until_s), nonce, "ours")
        stream = GroupStream(frames, meeting.secret, session, (SIDES[1], SIDES[0]), f"leader of {card.group}")
        stream.send({"hello": card.to_json()}, until_s)
        answer = _answer_of(stream, until_s)
    except BaseException:
        frames.close()
        raise
    if "refused" in answer:
        frames.close()
        raise PeerMismatch(str(answer["refused"])[:1000])
    return stream


def _answer_of(stream: GroupStream, until_s: float) -> dict[str, Any]:
    try:
        return stream.receive(until_s)
    except BadTicket as error:
        raise PeerMismatch(
            f"{stream.frames.peer} does not share our secret: give all processes of a group the same --secret_file"
        ) from error


# ---------------------------------------------------------------------- the leader


class Assembly:
    """The leader's door: takes members in until the group is full."""

    def __init__(self, meeting: Meeting, card: Card, told: Callable[[str], None] = log.warning) -> None:
        """`told` is called with each refusal, in one line. Raises ConfigError where the port cannot be had."""
        self._meeting, self._card, self._told = meeting, card, told
        self._listener = _listen(meeting.address)
        self._lock = threading.Lock()
        self._streams: dict[int, GroupStream] = {}
        self._places: dict[int, str] = {}
        self._strangers = 0
        self._last_refusal = ""
        self._full = threading.Event()
        self._closed = False

    def gather(self) -> dict[int, GroupStream]:
        """The members' streams by rank. Who comes later is refused, and told of. Raises GroupUnfilled."""
        while not self._full.is_set():
            if time.monotonic() >= self._meeting.deadline_s:
                self._listener.close()
                with self._lock:
                    why = unfilled(self._card, dict(self._places), self._meeting.wait_s, self._last_refusal)
                self._dismiss(why)
                raise GroupUnfilled(why)
            self._forget_lost()
            self._accept_one()
        threading.Thread(target=self._refuse_the_rest, name="group-late", daemon=True).start()
        return dict(self._streams)

    def close(self) -> None:
        self._closed = True

    def _refuse_the_rest(self) -> None:
        while not self._closed:
            self._accept_one()
        self._listener.close()

    def _accept_one(self) -> None:
        self._listener.settimeout(0.2)
        try:
            sock, address = self._listener.accept()
        except OSError:  # nobody came, or left again
            return
        place = f"{address[0]}:{address[1]}"
        with self._lock:
            if self._strangers >= MOST_STRANGERS:
                sock.close()
                return
            self._strangers += 1
        threading.Thread(target=self._meet, args=(sock, place), name="group-door", daemon=True).start()

    def _meet(self, sock: socket.socket, place: str) -> None:
        frames = FrameSocket(sock, f"the process at {place}")
        try:
            self._admit(frames, place, time.monotonic() + HANDSHAKE_S)
        except JdisaggError as error:
            frames.close()
            self._note(f"the process at {place} is none of group {self._card.group!r}: {error}")
        except Exception:  # whatever it said: it goes, and nobody else
            frames.close()
            log.exception("a process at %s cannot be followed", place)
        finally:
            with self._lock:
                self._strangers -= 1

    def _admit(self, frames: FrameSocket, place: str, until_s: float) -> None:
        if self._meeting.tls_server is not None:
            frames.secure(self._meeting.tls_server, None, until_s)
        opening = _read_opening(frames, until_s)
        nonce, ours = _opening()
        session = session_of(opening, nonce, "theirs")
        frames.send(ours, until_s)
        stream = GroupStream(frames, self._meeting.secret, session, SIDES, f"the process at {place}")
        try:
            hello = stream.receive(until_s)
        except BadTicket:
            self._note(f"the process at {place} does not share our secret: give all the same --secret_file")
            frames.send(b"{}", until_s)  # it cannot be signed so that it would believe it: it knows by that
            frames.close()
            return
        theirs = read_card(hello.get("hello"))
        if theirs is None:
            raise BadTicket("it does not say what it is")
        with self._lock:
            why = refusal(self._card, theirs, place, self._places)
            if why is None:
                stream.who = f"member {theirs.rank} of group {self._card.group!r} at {place}"
                stream.send({"welcome": self._card.group}, until_s)
                self._streams[theirs.rank], self._places[theirs.rank] = stream, place
                if len(self._streams) == self._card.size - 1:
                    self._full.set()
                return
        self._note(why)
        stream.send({"refused": why}, until_s)
        frames.close()

    def _note(self, why: str) -> None:
        self._last_refusal = why
        self._told(why)

    def _forget_lost(self) -> None:
        """One that left again before the group was full may come back."""
        with self._lock:
            for rank in [rank for rank, stream in self._streams.items() if stream.frames.has_ended()]:
                self._streams.pop(rank).frames.close()
                del self._places[rank]

    def _dismiss(self, why: str) -> None:
        with self._lock:
            for stream in self._streams.values():
                with contextlib.suppress(JdisaggError):  # it has left
                    stream.send({"refused": why}, time.monotonic() + 1)
                stream.frames.close()


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        return listener_at(host, port)
    except OSError as error:
        raise ConfigError(
            f"--coordinator={address}: the group's leader cannot listen there ({error.strerror or error}); give each"
            " group a port of its own"
        ) from error


def listener_at(host: str, port: int) -> socket.socket:
    """At an address, or where a name is given everywhere: to this host itself its name may mean a loopback address."""
    if is_address(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MOST_STRANGERS)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=MOST_STRANGERS, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=MOST_STRANGERS)


def is_address(host: str) -> bool:
    """Whether it is no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
