"""Assembles a group: members connect to their leader, both sides prove the secret, and the leader checks each member.

It runs before JAX's distributed initialisation, where a duplicate or missing rank hangs or aborts processes. Every wait
has a deadline.
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
from jdisagg.policy.group_handshake import MemberInfo, read_member_info, refusal, unfilled
from jdisagg.serve.cluster.group.stream import FrameSocket, GroupStream

log = logging.getLogger("jdisagg.group")

PROTOCOL = 2
NONCE_BYTES = 16
OPENING_BYTES = 1000  # the longest first record of an unauthenticated peer
HANDSHAKE_S = 10.0
RETRY_S = 0.5  # between two attempts to connect to the leader
MOST_STRANGERS = 16  # connections during their handshake
SIDES = ("leader", "member")


class GroupUnfilled(JdisaggError):
    """The leader or some members did not join in time; another attempt may succeed."""


@dataclass(frozen=True)
class Meeting:
    """The leader's address, the secret and the deadline by which a group must be complete."""

    address: str  # HOST:PORT of the leader
    secret: bytes
    deadline_s: float  # of the monotonic clock
    wait_s: float  # the whole time until the deadline
    tls_server: ssl.SSLContext | None = None
    tls_client: ssl.SSLContext | None = None


def session_of(opening: Any, ours: str, first: str) -> str:
    """Returns both nonces, the member's first. Raises BadTicket, PeerMismatch."""
    if not isinstance(opening, dict) or "nonce" not in opening:
        raise BadTicket(f"the first record is {str(opening)[:40]!r}, none of a group's")
    if opening.get("jdisagg_group") != PROTOCOL:
        theirs = f"the peer speaks protocol {opening.get('jdisagg_group')!r:.40}"
        raise PeerMismatch(f"{theirs}, we speak {PROTOCOL}: install the same jdisagg")
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


def join_leader(meeting: Meeting, card: MemberInfo) -> GroupStream:
    """Connects to the leader, retrying until the deadline. Raises GroupUnfilled, and PeerMismatch for a refusal."""
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


def _join_once(meeting: Meeting, card: MemberInfo) -> GroupStream:
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
    """The leader's listener: admits members until the group is full, and refuses later ones."""

    def __init__(self, meeting: Meeting, card: MemberInfo, report: Callable[[str], None] = log.warning) -> None:
        """`report` is called with one line for each refusal. Raises ConfigError if the port cannot be bound."""
        self._meeting, self._card, self._report = meeting, card, report
        self._listener = _listen(meeting.address)
        self._lock = threading.Lock()
        self._streams: dict[int, GroupStream] = {}
        self._addresses: dict[int, str] = {}
        self._strangers = 0
        self._last_refusal = ""
        self._full = threading.Event()
        self._closed = False

    def gather(self) -> dict[int, GroupStream]:
        """Waits for all members and returns their streams by rank; later ones are refused. Raises GroupUnfilled."""
        while not self._full.is_set():
            if time.monotonic() >= self._meeting.deadline_s:
                self._listener.close()
                with self._lock:
                    why = unfilled(self._card, dict(self._addresses), self._meeting.wait_s, self._last_refusal)
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
        except OSError:  # no connection within the timeout, or it was closed again
            return
        address_text = f"{address[0]}:{address[1]}"
        with self._lock:
            if self._strangers >= MOST_STRANGERS:
                sock.close()
                return
            self._strangers += 1
        threading.Thread(
            target=self._shake_hands, args=(sock, address_text), name="group-handshake", daemon=True
        ).start()

    def _shake_hands(self, sock: socket.socket, address: str) -> None:
        frames = FrameSocket(sock, f"the process at {address}")
        try:
            self._admit(frames, address, time.monotonic() + HANDSHAKE_S)
        except JdisaggError as error:
            frames.close()
            self._note(f"the process at {address} is none of group {self._card.group!r}: {error}")
        except Exception:  # from any message: this connection ends, and no other
            frames.close()
            log.exception("a process at %s cannot be followed", address)
        finally:
            with self._lock:
                self._strangers -= 1

    def _admit(self, frames: FrameSocket, address: str, until_s: float) -> None:
        if self._meeting.tls_server is not None:
            frames.secure(self._meeting.tls_server, None, until_s)
        opening = _read_opening(frames, until_s)
        nonce, ours = _opening()
        session = session_of(opening, nonce, "theirs")
        frames.send(ours, until_s)
        stream = GroupStream(frames, self._meeting.secret, session, SIDES, f"the process at {address}")
        try:
            hello = stream.receive(until_s)
        except BadTicket:
            self._note(f"the process at {address} does not share our secret: give all the same --secret_file")
            frames.send(b"{}", until_s)  # it cannot verify our signature; an unsigned answer makes it report the secret
            frames.close()
            return
        theirs = read_member_info(hello.get("hello"))
        if theirs is None:
            raise BadTicket("it does not say what it is")
        with self._lock:
            why = refusal(self._card, theirs, address, self._addresses)
            if why is None:
                stream.who = f"member {theirs.rank} of group {self._card.group!r} at {address}"
                stream.send({"welcome": self._card.group}, until_s)
                self._streams[theirs.rank], self._addresses[theirs.rank] = stream, address
                if len(self._streams) == self._card.size - 1:
                    self._full.set()
                return
        self._note(why)
        stream.send({"refused": why}, until_s)
        frames.close()

    def _note(self, why: str) -> None:
        self._last_refusal = why
        self._report(why)

    def _forget_lost(self) -> None:
        """Forgets members that disconnected before the group was full, so that they may join again."""
        with self._lock:
            for rank in [rank for rank, stream in self._streams.items() if stream.frames.has_ended()]:
                self._streams.pop(rank).frames.close()
                del self._addresses[rank]

    def _dismiss(self, why: str) -> None:
        with self._lock:
            for stream in self._streams.values():
                with contextlib.suppress(JdisaggError):  # the member has left
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
    """Listens at an IP address, or at all addresses for a host name, which may resolve to loopback on its own host."""
    if is_address(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MOST_STRANGERS)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=MOST_STRANGERS, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=MOST_STRANGERS)


def is_address(host: str) -> bool:
    """Returns True for an IP address, not a hostname."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
