"""Records for /debug: the last routing decisions and a trace of each of the last requests. Also opens the journal.

Written on the driver's thread, read from any other. No prompt and no token is stored. The router sees messages of
workers in other processes, but not their chunks and parts; those lists have only this process's workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from jdisagg.core.codec import convert
from jdisagg.core.errors import BadTicket, ConfigError, DecodeError
from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    EngineFailed,
    Finish,
    InsertKV,
    KVArrived,
    Received,
    Reject,
    RunStep,
    Send,
    ShipKV,
    StepDone,
    Submit,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from jdisagg.core.journal import Header, Journal
from jdisagg.core.ledger import Ledger, Mark, parts_of
from jdisagg.core.messages import (
    Ask,
    CacheChanged,
    CacheHeld,
    CacheWanted,
    Drawn,
    FetchPages,
    Joined,
    Leave,
    Left,
    Message,
    NoPages,
    Preempted,
    Priced,
    Progress,
    Renew,
    Reserve,
    Reserved,
    StartPrefill,
    View,
    Withdraw,
)
from jdisagg.core.request import Phase, Request, RequestId, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role
from jdisagg.policy.router.decisions import Decision
from jdisagg.policy.router.request_state import END_PHASE, PHASE_OF_MARK
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.pools import Place
from jdisagg.serve.observability.step_log import KEPT, StepLog
from jdisagg.serve.observability.tracing import chrome_trace, overlapping

# The journal's file under --record_dir. It has prompts, so only its owner may read it.

log = logging.getLogger("jdisagg.journal")


def open_journal(header: Header, record_dir: str, dropped: Callable[[], None]) -> Journal:
    """Returns a journal that also appends to a new file of `record_dir`, unless that is empty. Raises ConfigError.

    `dropped` is called when the file cannot be written any more (a full disk); the journal then stays in memory only.
    """
    if not record_dir:
        return Journal(header)
    path = Path(record_dir) / f"journal-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _open_new(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--record_dir={record_dir}: {getattr(error, 'strerror', None) or error}") from error

    def drop(error: OSError) -> None:
        with contextlib.suppress(OSError):  # flushing its buffer fails as well
            file.close()
        log.error("%s takes no more: %s; the record ends there, serving goes on", path, error.strerror or error)
        dropped()

    try:
        return Journal(header, sink=lambda line: file.write(line + "\n"), dropped=drop)
    except OSError as error:
        raise ConfigError(f"--record_dir={record_dir}: {error.strerror}") from error


def _open_new(path: Path) -> TextIO:
    """Creates a file for its owner alone, line-buffered; fails if the path exists or is a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")


# Transfer statistics: measurements of --transfer=auto and --transfer_compress=auto.

TransferStats = dict[WorkerId, dict[str, str]]  # by worker: "streaming" and "wires"
MOST_CHARS = 500


def transfer_stats_of(actors: Mapping[WorkerId, Any]) -> TransferStats:
    """Returns the statistics of prefill workers. Safe from any thread, since only single numbers are read."""
    workers = {name: actor for name, actor in actors.items() if isinstance(actor, Worker)}
    return {name: _described(worker) for name, worker in workers.items() if worker.config.role is Role.PREFILL}


def _described(worker: Worker) -> dict[str, str]:
    streaming = worker.prefill.sender.streaming
    fixed = f"--transfer={worker.config.transfer}: nothing to learn"
    return {
        "streaming": fixed if streaming is None else streaming.describe(),
        "wires": f"--transfer_compress={worker.config.compress}: {worker.prefill.sender.codecs.describe()}",
    }


def read_transfer_stats(reported: Any) -> TransferStats:
    """Returns the transfer statistics that another process reports, its texts cut short. Raises BadTicket."""
    try:
        found = convert(TransferStats, reported)
    except DecodeError as error:
        raise BadTicket(f"a peer's transfer statistics cannot be read: {error}") from error
    return {worker: {name[:40]: text[:MOST_CHARS] for name, text in of.items()} for worker, of in found.items()}


PHASE_OF_MESSAGE = {StartPrefill: Phase.PREFILLING, Preempted: Phase.QUEUED, Reserve: Phase.QUEUED}
MARK_OF_MESSAGE = {Reserve: Mark.RESERVE_SENT, Reserved: Mark.RESERVED, Preempted: Mark.REQUEUED}
FAMILIES = ("", "cmpl-", "chatcmpl-")  # prefixes that front ends add to a client's request id
MAX_CHANGES = 32
MAX_ROWS = 200  # per request and list
NOT_KEPT = (  # messages that are too many to store, or belong to no request
    *(Drawn, View, Renew, CacheWanted, CacheHeld, CacheChanged),
    *(Leave, Left, Joined, Ask, Withdraw, Priced, FetchPages, NoPages),
)
SHOWN_FIELDS = ("detail", "reason", "part", "num_parts", "wire_s", "cached_pages", "mark")  # fields of a message


def ledger_json(ledger: Ledger) -> dict[str, Any]:
    """Returns nanoseconds: the total, the parts that sum to it, and KV transfer overlapped with prefill or exposed."""
    hidden, exposed = ledger.transfer_ns()
    return {
        "total_ns": ledger.total_ns,
        "parts_ns": ledger.parts_ns(),
        "transfer_ns": {"hidden": hidden, "exposed": exposed},
    }


@dataclass(slots=True)
class TraceRows:
    """The events of one request in order. Each list has at most `MAX_ROWS` rows; `left_out` counts the others."""

    decisions: list[Decision] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0

    def add(self, rows: list[Any], row: Any) -> None:
        if len(rows) < MAX_ROWS:
            rows.append(row)
        else:
            self.left_out += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "decisions": [decision.to_json() for decision in list(self.decisions)],
            "messages": list(self.messages),
            "chunks": list(self.chunks),
            "parts": list(self.parts),
            "left_out": self.left_out,
        }


@dataclass(slots=True)
class RequestTrace:
    """The sizes, times and events of one request."""

    request_id: RequestId
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    phase: Phase = Phase.QUEUED
    tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    rows: TraceRows = field(default_factory=TraceRows)
    ledger: Ledger = field(default_factory=Ledger)  # from messages; once the request ended, the router's own
    ending: Finish | Reject | None = None

    def mark(self, mark: Mark, at_s: float) -> None:
        """Adds a mark to the ledger. A second reservation request starts another attempt."""
        if mark is Mark.RESERVE_SENT and self.ledger.marks[-1][0] not in (Mark.ARRIVED, Mark.REQUEUED):
            self.ledger.mark(Mark.REQUEUED, at_s)
        self.ledger.mark(mark, at_s)

    @property
    def workers(self) -> dict[str, WorkerId | None]:
        """The request's current or last workers; None before it has one."""
        if isinstance(self.ending, Finish):
            return {"prefill": self.ending.prefill_worker, "decode": self.ending.decode_worker}
        choices = (each.choice for each in reversed(self.rows.decisions) if each.choice is not None)
        taken = next((choice.taken for choice in choices if choice.taken is not None), None)
        return {"prefill": taken and taken.prefill, "decode": taken and taken.decode}

    def summary(self, now_s: float) -> dict[str, Any]:
        """Returns one row of a list of requests. `parts_ns` of a running request extend to `now_s`."""
        return {
            "request_id": self.request_id,
            "phase": self.phase.value,
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.ledger.cached_tokens,
            "tokens": self.tokens,
            "workers": self.workers,
            "finish": None if self.ending is None else _ending(self.ending)["reason"],
            "parts_ns": parts_of(self.ledger.spans(None if self.ending else round(now_s * 1e9))),
        }

    def to_json(self, now_s: float | None = None) -> dict[str, Any]:
        """Returns the whole trace. The last span of a running request extends to `now_s`."""
        now_ns = None if self.ending or now_s is None else round(now_s * 1e9)
        shown: dict[str, Any] = {
            "request_id": self.request_id,
            "phase": self.phase.value,
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.ledger.cached_tokens,
            "max_tokens": self.max_tokens,
            "tokens": self.tokens,
            "first_token_s": self.first_token_s,
            "last_token_s": self.last_token_s,
            "workers": self.workers,
            "marks": [{"mark": mark.value, "at_s": at_ns / 1e9} for mark, at_ns in list(self.ledger.marks)],
            "spans": [
                {"part": part, "start_s": began / 1e9, "end_s": ended / 1e9}
                for part, began, ended in self.ledger.spans(now_ns)
            ],
            "finish": None if self.ending is None else _ending(self.ending),
        }
        ledger = {"ledger": ledger_json(self.ledger)} if isinstance(self.ending, Finish) else {}
        return shown | ledger | self.rows.to_json()


def _ending(ending: Finish | Reject) -> dict[str, Any]:
    if isinstance(ending, Reject):
        return {"reason": "rejected", "detail": ending.detail, "retry_after_s": ending.retry_after_s}
    return {"reason": ending.reason.value, "detail": ending.detail}


def _note_progress(trace: RequestTrace, message: Message, now_s: float) -> None:
    """Updates a running request's phase and ledger from a message."""
    if type(message) in MARK_OF_MESSAGE:
        trace.mark(MARK_OF_MESSAGE[type(message)], now_s)
    elif isinstance(message, Progress):
        trace.phase = PHASE_OF_MARK.get(message.mark, trace.phase)
        trace.mark(message.mark, message.at_s)
        trace.ledger.cached_tokens = max(trace.ledger.cached_tokens, message.cached_tokens)


class Records:
    """The last `keep` requests and as many decisions."""

    def __init__(self, keep: int = 512, steps: int = KEPT) -> None:
        self._decisions: deque[Decision] = deque(maxlen=keep)
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()
        self._keep, self.steps = keep, StepLog(steps)
        self.changes: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)  # workers that joined, are leaving or are gone
        self._folds: dict[type, Callable[[str, Any, float], None]] = {
            Submit: self._submit,
            Send: self._send,
            Received: self._received,
            RunStep: self._step,
            StepDone: lambda actor, item, now_s: self.steps.ended(actor, item.step_id, now_s),
            EngineFailed: lambda actor, item, now_s: self.steps.ended(actor, item.step_id, now_s),
            ShipKV: lambda actor, item, now_s: self._part("left", item.transfer, now_s),
            KVArrived: lambda actor, item, now_s: self._part(
                "arrived" if item.intact else "arrived broken", item.transfer, now_s, wire_s=item.wire_s
            ),
            InsertKV: lambda actor, item, now_s: self._part("inserted", item.transfer, now_s),
            DropKV: lambda actor, item, now_s: self._part("dropped", item.transfer, now_s),
            EmitTokens: self._emit,
            Finish: self._end,
            Reject: self._end,
            WorkerJoined: lambda actor, item, now_s: self._change("joined", item.config.worker, now_s),
            WorkerLeaving: lambda actor, item, now_s: self._change("leaving", item.worker, now_s),
            WorkerLost: lambda actor, item, now_s: self._change("gone", item.worker, now_s),
        }

    # ------------------------------------------------------------ writing

    def note(self, decision: Decision) -> None:
        self._decisions.append(decision)
        trace = self._traces.get(decision.request_id)
        if trace is not None:
            trace.rows.add(trace.rows.decisions, decision)

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Records one event or effect of `actor`; types that no trace has are ignored."""
        fold = self._folds.get(type(item))
        if fold is not None:
            fold(actor, item, now_s)

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        request: Request = item.request
        trace = self._traces[request.request_id] = RequestTrace(
            request.request_id, request.arrival_s, len(request.prompt), request.sampling.max_tokens
        )
        trace.ledger.mark(Mark.ARRIVED, request.arrival_s)
        if len(self._traces) > self._keep:
            self._traces.popitem(last=False)

    def _send(self, actor: str, item: Send, now_s: float) -> None:
        """Records messages of the router and between workers; messages to the router are recorded on receipt."""
        if item.to != ROUTER:
            self._message(actor, item.to, item.message, now_s)

    def _received(self, actor: str, item: Received, now_s: float) -> None:
        if actor != ROUTER:
            return
        if isinstance(item.message, Ask):  # from a front process
            self._submit(actor, Submit(item.message.request), now_s)
        self._message(item.sender, actor, item.message, now_s)

    def _message(self, sender: str, to: str, message: Message, now_s: float) -> None:
        if isinstance(message, NOT_KEPT):
            return
        trace = self._traces.get(message.attempt.request_id)
        if trace is None:
            return
        if isinstance(message, tuple(PHASE_OF_MESSAGE)) and trace.ending is None:
            trace.phase = PHASE_OF_MESSAGE[type(message)]
        if trace.ending is None:
            _note_progress(trace, message, now_s)
        details = {name: getattr(message, name) for name in SHOWN_FIELDS if getattr(message, name, None)}
        named = {"message": type(message).__name__, "attempt": message.attempt.epoch}
        trace.rows.add(trace.rows.messages, {"at_s": now_s, "from": sender, "to": to} | named | details)

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        self.steps.began(actor, item.plan, now_s)
        for chunk in item.plan.prefill.chunks if item.plan.prefill else ():
            trace = self._traces.get(chunk.request_id)
            if trace is not None:
                row = {"at_s": now_s, "worker": actor, "start": chunk.start, "tokens": len(chunk.tokens)}
                trace.rows.add(trace.rows.chunks, row)
        for transfer in item.ships:
            self._part("to leave", transfer, now_s)

    def _part(self, what: str, transfer: KVTransfer, now_s: float, **more: float) -> None:
        trace = self._traces.get(transfer.attempt.request_id)
        if trace is None:
            return
        row = {
            "at_s": now_s,
            "part": transfer.part,
            "what": what,
            "from": transfer.source,
            "to": transfer.destination,
            "pages": len(transfer.source_pages),
            "layers": transfer.layers,
            "wire": transfer.wire,
            "resends": transfer.resends,
        }
        trace.rows.add(trace.rows.parts, row | more)

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        trace = self._traces.get(item.request_id)
        if trace is not None:
            trace.tokens += len(item.delta.sampled)
            trace.first_token_s = now_s if trace.first_token_s is None else trace.first_token_s
            trace.last_token_s = now_s

    def _change(self, what: str, worker: WorkerId, now_s: float) -> None:
        self.changes.append({"at_s": now_s, "what": what, "worker": worker})

    def _end(self, actor: str, item: Finish | Reject, now_s: float) -> None:
        trace = self._traces.get(item.request_id)
        if trace is not None:
            trace.ending = item
            trace.ledger = item.ledger if isinstance(item, Finish) else trace.ledger
            trace.phase = END_PHASE[item.reason] if isinstance(item, Finish) else Phase.FAILED

    # ------------------------------------------------------------ reading

    def decisions(self, count: int) -> list[dict[str, Any]]:
        """Returns the last `count` decisions as JSON, latest first."""
        return [decision.to_json() for decision in self.last(count)]

    def last(self, count: int) -> list[Decision]:
        return list(self._decisions)[: -count - 1 : -1]

    def requests(self) -> list[dict[str, Any]]:
        """Returns id and phase of the stored requests, latest first."""
        return [{"request_id": trace.request_id, "phase": trace.phase.value} for trace in self._latest()]

    def summaries(self, count: int, now_s: float) -> list[dict[str, Any]]:
        """Returns summaries of the last `count` requests, latest first."""
        return [trace.summary(now_s) for trace in islice(self._latest(), count)]

    def window(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Returns the time window as a trace for Perfetto."""
        traces = [trace.to_json(end_s if math.isfinite(end_s) else None) for trace in self._latest()]
        return chrome_trace(overlapping(traces, begin_s), self.steps.since(begin_s), begin_s, end_s)

    def request(self, name: str, now_s: float | None = None) -> list[dict[str, Any]]:
        """Returns the traces of a request, or of all choices of a client's request, of this name; latest first."""
        starts = tuple(f"{family}{name}-" for family in FAMILIES)
        named = [trace for trace in self._latest() if trace.request_id == name or trace.request_id.startswith(starts)]
        return [trace.to_json(now_s) for trace in named]

    def _latest(self) -> Iterable[RequestTrace]:
        return reversed(list(self._traces.values()))


@dataclass(frozen=True, slots=True)
class DebugState:
    """The parts of a running stack that /debug reads."""

    records: Records
    transfer_stats: Callable[[], TransferStats]
    places: Callable[[], Sequence[Place]] = tuple  # the workers that are present now
    holders: Callable[[Sequence[int], str, float], list[dict[str, Any]]] = lambda tokens, salt, now_s: []
