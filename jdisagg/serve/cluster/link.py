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
import math
import queue
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import grpc
import msgspec

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES, AuthenticatedChannel
from jdisagg.core.codec import convert, decode_as, shown
from jdisagg.core.errors import BadTicket, ConfigError, DecodeError, SenselessWord
from jdisagg.core.messages import Ended, Message, Progress
from jdisagg.core.protocol import check_word
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import MOST, WorkerConfig
from jdisagg.serve.cluster.kv_notices import read_lent, read_notice
from jdisagg.serve.deploy.private_files import read_private
from jdisagg.serve.driver.role_change import ReshapeTimes
from jdisagg.serve.observability.records import TransferStats, read_transfer_stats
from jdisagg.serve.observability.worker_metrics import Samples, read_samples

log = logging.getLogger("jdisagg.cluster")

METHOD = "/jdisagg.Control/Join"
PROTOCOL = 8
NONCE_BYTES = 16
FIRST_RECORD_BYTES = 1000
PIECE_BYTES = 256 << 10  # the longest message of the stream; the records of a handshake are of one piece
MORE, LAST = b"\1", b"\0"  # before a piece
MOST_WAITING = 50_000  # messages that a peer has not taken; a busy cluster has some tens
MOST_READ_AGAIN = 1000  # weights that one change of role had to read anew
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
        self._out: queue.SimpleQueue[tuple[dict[str, Any], int] | None] = queue.SimpleQueue()
        self._waiting, self._waiting_lock = 0, threading.Lock()  # messages in `_out`
        self._heard_s = clock()
        self._over_s: float | None = None
        self.why_over = ""
        self.may_send: Callable[[], bool] = lambda: True  # false ends the link: a router whose lease has ended

    def send(self, body: dict[str, Any], num_messages: int = 1) -> None:
        """Queues a record of `num_messages` messages; hangs up where the peer has left `MOST_WAITING` unread."""
        with self._waiting_lock:
            is_full = self._waiting >= MOST_WAITING
            self._waiting += num_messages
        if is_full:
            self.hang_up(f"it has left {MOST_WAITING} messages unread")
        if self._over_s is None:
            self._out.put((body, num_messages))

    def hang_up(self, why: str) -> None:
        """Ends the link once what was sent before is out. The first reason stays."""
        if self._over_s is None:
            self.why_over, self._over_s = why, self._clock()
            self._out.put(None)

    def records(self) -> Iterator[bytes]:
        """What is sent, signed, and heartbeats between; ends after `hang_up`, or when the peer is silent too long."""
        while not self._silent():
            try:
                item = self._out.get(timeout=self._heartbeat.interval_s)
            except queue.Empty:
                item = HEARTBEAT, 0
            if item is None:
                return
            body, num_messages = item
            with self._waiting_lock:
                self._waiting -= num_messages
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


# What a body on a control link says, read and checked: whatever a peer wrote, what comes out is of the declared
# types.
#
# A body is a message from worker to worker or to or from the router, a notice of KV, or a process's status
# report. What makes no sense raises SenselessWord, or BadTicket, by which the link with whoever said it ends.


def read_word(body: dict[str, Any], sender: WorkerConfig | None, to: WorkerConfig | None) -> Message | None:
    """The message of a body, None where it is a notice of KV or of pages that are lent. Either end is None where it is
    the router."""
    if "kv" in body or "lent" in body:
        if sender is None or to is None:
            raise SenselessWord("KV goes from worker to worker, and the router is none")
        if "kv" in body:
            read_notice(body["kv"], sender, to)
        else:
            read_lent(body["lent"])
        return None
    try:
        message = decode_as(Message, body.get("message"))
    except DecodeError as error:
        raise SenselessWord(str(error)) from error
    check_word(message, sender, to)
    return message


def shifted(message: Message, shift_s: float) -> Message:
    """Times of another process's clock as times of this one's."""
    return replace(message, at_s=message.at_s + shift_s) if isinstance(message, Progress | Ended) else message


def read_shift_s(record: Any) -> float:
    """What the clock of the process that says its `now_s` lacks to be ours, and the way here."""
    try:
        shift_s = time.monotonic() - float(record["now_s"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SenselessWord(f"a clock that cannot be read: {type(error).__name__}: {shown(error)}") from error
    if not math.isfinite(shift_s):
        raise SenselessWord(f"a clock that says {shown(record['now_s'])}")
    return shift_s


class ProcessStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker process reports at intervals: its clock, and what it counts and has learnt."""

    now_s: float
    recompiles: Annotated[int, msgspec.Meta(ge=0, le=MOST)]
    samples: Any
    transfer_stats: Any = None
    reshape_times: dict[WorkerId, ReshapeTimes] = {}


def read_status(status: Any) -> tuple[float, int, Samples, TransferStats, dict[WorkerId, ReshapeTimes]]:
    """Returns the clock's shift, the recompiles, the samples, the transfer statistics and the changes of role."""
    shift_s = read_shift_s(status)
    try:
        found = convert(ProcessStatus, status)
    except DecodeError as error:
        raise SenselessWord(f"a status that cannot be read: {error}") from error
    for worker, took in found.reshape_times.items():
        figures = took.reshard_s, took.compile_s, took.warm_s, took.moved_bytes, took.num_programs
        if not all(0 <= each < 1 << 62 for each in figures) or len(took.read_again) > MOST_READ_AGAIN:
            raise SenselessWord(f"times of a change of {shown(worker)} that cannot be: {shown(took)}")
    stats = read_transfer_stats(found.transfer_stats or {})
    return shift_s, found.recompiles, read_samples(found.samples), stats, found.reshape_times


# TLS by flag: for the control link (gRPC) and for KV over tcp, both from the same certificate and authority.
#
# With --tls_ca every end must show a certificate of that authority; without it, clients trust the system's
# authorities and servers ask for none. The shared secret is asked for in any case.


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """For the control port; None without TLS. Raises ConfigError."""
    if not wants_tls(settings):
        return None
    authority = _read("tls_ca", settings.tls_ca)
    pair = [(read_private("tls_key", settings.tls_key), _read("tls_cert", settings.tls_cert))]
    return grpc.ssl_server_credentials(pair, authority or None, require_client_auth=bool(authority))


def channel_credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    if not wants_tls(settings):
        return None
    key, cert = read_private("tls_key", settings.tls_key), _read("tls_cert", settings.tls_cert)
    return grpc.ssl_channel_credentials(_read("tls_ca", settings.tls_ca) or None, key, cert)


def kv_contexts(settings: Settings) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Where KV is offered, and where it is pulled. Raises ConfigError."""
    if not wants_tls(settings):
        return None, None
    read_private("tls_key", settings.tls_key)  # ssl reads it for itself: only its mode is looked at
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        client = ssl.create_default_context(cafile=settings.tls_ca or None)
        for each in (server, client):
            each.minimum_version = ssl.TLSVersion.TLSv1_2
            each.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_ca:
            server.load_verify_locations(settings.tls_ca)
            server.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--tls_cert={settings.tls_cert} --tls_key={settings.tls_key}: {error}") from error
    return server, client


def wants_tls(settings: Settings) -> bool:
    """Raises ConfigError where only a part of it is given."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ConfigError(f"--tls_cert={settings.tls_cert!r} and --tls_key={settings.tls_key!r}: give both or neither")
    if settings.tls_ca and not settings.tls_cert:
        raise ConfigError(f"--tls_ca={settings.tls_ca} needs --tls_cert and --tls_key: every process serves others")
    return bool(settings.tls_cert)


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise ConfigError(f"--{flag}={path}: {error.strerror}") from error


# A task that runs at intervals on a thread of its own, whatever other threads are waiting for.


class PeriodicTask:
    """Calls `task` every `interval_s` seconds, from `start` to `stop`. One that raises is logged and called again."""

    def __init__(self, interval_s: float, task: Callable[[], object]) -> None:
        self._interval_s, self._task = interval_s, task
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-periodic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def __enter__(self) -> PeriodicTask:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._task()
            except Exception:  # the next call may find what this one could not
                log.exception("a periodic task failed")
