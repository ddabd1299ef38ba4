"""One end of a control link: a queue of bodies out, authenticated records in, and heartbeats while nothing is said.

A link is one gRPC stream. Each end sends something every `interval_s`; one that hears nothing for `silence_s` hangs up,
so that a process that is stopped, cut off or dead is missed within that time, whatever TCP believes.

Records travel in pieces, so that a stranger's first record can be held to the length of a piece while a prompt of a
million tokens still goes through.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES, AuthenticatedChannel
from jdisagg.core.errors import BadTicket

log = logging.getLogger("jdisagg.cluster")

METHOD = "/jdisagg.Control/Join"
PROTOCOL = 7
NONCE_BYTES = 16
FIRST_RECORD_BYTES = 1000
PIECE_BYTES = 256 << 10  # the longest message of the stream; the records of a handshake are of one piece
MORE, LAST = b"\1", b"\0"  # before a piece
MOST_WAITING = 50_000  # messages that a peer has not taken; a busy cluster has some tens
HANDSHAKE_S = 10.0  # to prove oneself and to be answered: whoever takes longer is cut off
HEARTBEAT: dict[str, Any] = {"beat": 1}


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How often each end sends something, and after how long a silence the link ends. Seconds."""

    interval_s: float = 1.0
    silence_s: float = 5.0


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def read_opening(record: bytes) -> dict[str, Any]:
    """The first record of either end, before there is a session to sign it in. Raises BadTicket."""
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(record[:FIRST_RECORD_BYTES])
        if isinstance(body, dict):
            return body
    raise BadTicket(f"the first record of a peer is no object: {record[:40]!r}")


def nonce_of(body: dict[str, Any]) -> str:
    """The nonce in the first record of a handshake. Raises BadTicket."""
    nonce = body.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES or not re.fullmatch("[0-9a-f]*", nonce):
        raise BadTicket(f"a handshake needs a nonce of {2 * NONCE_BYTES} hex digits, got {nonce!r:.40}")
    return nonce


def split_record(record: bytes) -> Iterator[bytes]:
    """The pieces that a record travels in."""
    for start in range(0, len(record), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(record)
        yield (LAST if last else MORE) + record[start : start + PIECE_BYTES]


def read_record(pieces: Iterator[bytes], limit_bytes: int, on_piece: Callable[[], object] = lambda: None) -> bytes:
    """The next record; `on_piece` is called at each. Raises StopIteration at the end, BadTicket over the limit."""
    record = bytearray()
    while True:
        piece = next(pieces)
        on_piece()
        record += piece[1:]
        if len(record) > limit_bytes:
            raise BadTicket(f"a record of over {limit_bytes} bytes, the limit here")
        if piece[:1] == LAST:
            return bytes(record)
        if piece[:1] != MORE:
            raise BadTicket(f"a piece begins with {piece[:1]!r}, neither {MORE!r} nor {LAST!r}")


class Link:
    """What both ends share. `send` and `hang_up` are safe from any thread; `records` is read by gRPC's."""

    def __init__(
        self,
        outgoing: AuthenticatedChannel,
        incoming: AuthenticatedChannel,
        heartbeat: Heartbeat,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outgoing, self._incoming, self._heartbeat, self._clock = outgoing, incoming, heartbeat, clock
        self._out: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._heard_s = clock()
        self._over_s: float | None = None
        self.why_over = ""
        self.may_send: Callable[[], bool] = lambda: True  # false ends the link: a router whose lease has ended

    def send(self, body: dict[str, Any]) -> None:
        if self._out.qsize() >= MOST_WAITING:
            self.hang_up(f"it has left {MOST_WAITING} messages unread")
        if self._over_s is None:
            self._out.put(body)

    def hang_up(self, why: str) -> None:
        """Ends the link once what was sent before is out. The first reason stays."""
        if self._over_s is None:
            self.why_over, self._over_s = why, self._clock()
            self._out.put(None)

    def records(self) -> Iterator[bytes]:
        """What is sent, signed, and heartbeats between; ends after `hang_up`, or when the peer is silent too long."""
        while not self._silent():
            try:
                body = self._out.get(timeout=self._heartbeat.interval_s)
            except queue.Empty:
                body = HEARTBEAT
            if body is None:
                return
            if not self.may_send():
                self.hang_up("this router leads no longer")
                return
            try:
                record = self._outgoing.sign(body)
            except BadTicket as error:  # its request will miss it and end; the link serves all the others
                log.error("not sent: %s", error)
                continue
            yield from split_record(record)

    def is_stuck(self) -> bool:
        """Silent too long, or hung up and not yet over: to be asked by another thread than waits on the stream.

        A peer that is stopped takes nothing either, and whoever sends to it may wait in the middle of a record.
        """
        return self._silent() or (self._over_s is not None and self._clock() - self._over_s > self._heartbeat.silence_s)

    def _silent(self) -> bool:
        silent_s = self._clock() - self._heard_s
        if silent_s > self._heartbeat.silence_s:
            self.hang_up(f"nothing heard for {silent_s:.1f} s")
        return silent_s > self._heartbeat.silence_s

    def bodies(self, pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
        """What the peer says, heartbeats apart, until its stream ends. Raises BadTicket."""
        while True:
            try:
                record = read_record(pieces, MAX_RECORD_BYTES, self._note)
            except StopIteration:
                return
            body = self.read(record)
            if body is not None:
                yield body

    def _note(self) -> None:
        self._heard_s = self._clock()

    def read(self, record: bytes) -> dict[str, Any] | None:
        """The body of a record; None for a heartbeat. Raises BadTicket."""
        body = self._incoming.verify(record)
        self._note()
        return None if body == HEARTBEAT else body
