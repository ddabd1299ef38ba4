"""What /debug shows: the last decisions and a trace of each of the last requests, kept as values until somebody asks.

Written on the driver's thread, read from any other. No prompt and no token is kept. A router whose workers are in other
processes sees their messages, but not their chunks and parts: those lists are of workers of this process.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    Finish,
    InsertKV,
    KVArrived,
    Received,
    Reject,
    RunStep,
    Send,
    ShipKV,
    Submit,
)
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import (
    CacheChanged,
    CacheHeld,
    CacheWanted,
    Drawn,
    Message,
    Preempted,
    Progress,
    Renew,
    Reserve,
    StartPrefill,
    View,
)
from jdisagg.core.request import Phase, Request, RequestId
from jdisagg.core.steps import KVTransfer
from jdisagg.policy.decisions import Decision
from jdisagg.policy.request_state import END_PHASE, PHASE_OF_MARK
from jdisagg.serve.transfer_stats import TransferStats

PHASE_OF_MESSAGE = {StartPrefill: Phase.PREFILLING, Preempted: Phase.QUEUED, Reserve: Phase.QUEUED}
FAMILIES = ("", "cmpl-", "chatcmpl-")  # what the fronts put before a client's id
MAX_ROWS = 200  # of one request, chunks and parts counted apart
NOT_KEPT = (Drawn, View, Renew, CacheWanted, CacheHeld, CacheChanged)  # too many, and they explain nothing
SHOWN_FIELDS = ("detail", "reason", "part", "num_parts", "wire_s", "cached_pages", "mark")  # of a message


def ledger_json(ledger: Ledger) -> dict[str, Any]:
    """Nanoseconds: the whole, its parts (which sum to it), and the KV's way, what of it was hidden behind prefill."""
    hidden, exposed = ledger.transfer_ns()
    return {
        "total_ns": ledger.total_ns,
        "parts_ns": ledger.parts_ns(),
        "transfer_ns": {"hidden": hidden, "exposed": exposed},
    }


@dataclass(slots=True)
class RequestTrace:
    """One request's numbers, decisions, messages, chunks and parts. Lists end at `MAX_ROWS`; the rest is counted."""

    request_id: RequestId
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    phase: Phase = Phase.QUEUED
    tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    decisions: list[Decision] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    ending: Finish | Reject | None = None

    def add(self, rows: list[Any], row: Any) -> None:
        if len(rows) < MAX_ROWS:
            rows.append(row)
        else:
            self.left_out += 1

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "request_id": self.request_id,
            "phase": self.phase.value,
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "tokens": self.tokens,
            "first_token_s": self.first_token_s,
            "last_token_s": self.last_token_s,
            "decisions": [decision.to_json() for decision in list(self.decisions)],
            "messages": list(self.messages),
            "chunks": list(self.chunks),
            "parts": list(self.parts),
            "left_out": self.left_out,
        }
        return shown | _ending(self.ending)


def _ending(ending: Finish | Reject | None) -> dict[str, Any]:
    if ending is None:
        return {"finish": None}
    if isinstance(ending, Reject):
        return {"finish": {"reason": "rejected", "detail": ending.detail, "retry_after_s": ending.retry_after_s}}
    marks = [{"mark": mark.value, "at_s": at_ns / 1e9} for mark, at_ns in ending.ledger.marks]
    return {
        "finish": {"reason": ending.reason.value, "detail": ending.detail},
        "workers": {"prefill": ending.prefill_worker, "decode": ending.decode_worker},
        "marks": marks,
        "ledger": ledger_json(ending.ledger),
    }


class Records:
    """The last `keep` requests and as many decisions."""

    def __init__(self, keep: int = 512) -> None:
        self._decisions: deque[Decision] = deque(maxlen=keep)
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()
        self._keep = keep
        self._folds: dict[type, Callable[[str, Any, float], None]] = {
            Submit: self._submit,
            Send: self._send,
            Received: self._received,
            RunStep: self._step,
            ShipKV: lambda actor, item, now_s: self._part("left", item.transfer, now_s),
            KVArrived: lambda actor, item, now_s: self._part(
                "arrived" if item.intact else "arrived broken", item.transfer, now_s, wire_s=item.wire_s
            ),
            InsertKV: lambda actor, item, now_s: self._part("inserted", item.transfer, now_s),
            DropKV: lambda actor, item, now_s: self._part("dropped", item.transfer, now_s),
            EmitTokens: self._emit,
            Finish: self._end,
            Reject: self._end,
        }

    # ------------------------------------------------------------ in

    def note(self, decision: Decision) -> None:
        """For the router."""
        self._decisions.append(decision)
        trace = self._traces.get(decision.request_id)
        if trace is not None:
            trace.add(trace.decisions, decision)

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Folds one event or effect of `actor`; what is in no trace is ignored."""
        fold = self._folds.get(type(item))
        if fold is not None:
            fold(actor, item, now_s)

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        request: Request = item.request
        self._traces[request.request_id] = RequestTrace(
            request.request_id, request.arrival_s, len(request.prompt), request.sampling.max_tokens
        )
        if len(self._traces) > self._keep:
            self._traces.popitem(last=False)

    def _send(self, actor: str, item: Send, now_s: float) -> None:
        """Messages of the router, and between workers; those to the router are noted when it receives them."""
        if item.to != ROUTER:
            self._message(actor, item.to, item.message, now_s)

    def _received(self, actor: str, item: Received, now_s: float) -> None:
        if actor == ROUTER:
            self._message(item.sender, actor, item.message, now_s)

    def _message(self, speaker: str, to: str, message: Message, now_s: float) -> None:
        if isinstance(message, NOT_KEPT):
            return
        trace = self._traces.get(message.attempt.request_id)
        if trace is None:
            return
        if isinstance(message, tuple(PHASE_OF_MESSAGE)) and trace.ending is None:
            trace.phase = PHASE_OF_MESSAGE[type(message)]
        if isinstance(message, Progress) and trace.ending is None:
            trace.phase = PHASE_OF_MARK.get(message.mark, trace.phase)
        details = {name: getattr(message, name) for name in SHOWN_FIELDS if getattr(message, name, None)}
        named = {"message": type(message).__name__, "attempt": message.attempt.epoch}
        trace.add(trace.messages, {"at_s": now_s, "from": speaker, "to": to} | named | details)

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        for chunk in item.plan.prefill.chunks if item.plan.prefill else ():
            trace = self._traces.get(chunk.request_id)
            if trace is not None:
                row = {"at_s": now_s, "worker": actor, "start": chunk.start, "tokens": len(chunk.tokens)}
                trace.add(trace.chunks, row)
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
        trace.add(trace.parts, row | more)

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        trace = self._traces.get(item.request_id)
        if trace is not None:
            trace.tokens += len(item.delta.sampled)
            trace.first_token_s = now_s if trace.first_token_s is None else trace.first_token_s
            trace.last_token_s = now_s

    def _end(self, actor: str, item: Finish | Reject, now_s: float) -> None:
        trace = self._traces.get(item.request_id)
        if trace is not None:
            trace.ending = item
            trace.phase = END_PHASE[item.reason] if isinstance(item, Finish) else Phase.FAILED

    # ------------------------------------------------------------ out

    def decisions(self, count: int) -> list[dict[str, Any]]:
        """The last `count`, latest first."""
        return [decision.to_json() for decision in list(self._decisions)[: -count - 1 : -1]]

    def requests(self) -> list[dict[str, Any]]:
        """The requests that are kept, latest first."""
        return [{"request_id": trace.request_id, "phase": trace.phase.value} for trace in self._latest()]

    def request(self, name: str) -> list[dict[str, Any]]:
        """The traces of the request, or of all choices of a client's request, of this name; latest first."""
        starts = tuple(f"{family}{name}-" for family in FAMILIES)
        named = [trace for trace in self._latest() if trace.request_id == name or trace.request_id.startswith(starts)]
        return [trace.to_json() for trace in named]

    def _latest(self) -> Iterable[RequestTrace]:
        return reversed(list(self._traces.values()))


@dataclass(frozen=True, slots=True)
class DebugState:
    """What a running stack shows under /debug."""

    records: Records
    transfer_stats: Callable[[], TransferStats]
