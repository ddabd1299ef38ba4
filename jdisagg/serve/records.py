"""What /debug shows: the last decisions and the lives of the last requests, kept as values until somebody asks.

Written on the driver's thread, read from any other. No prompt and no token is kept. A router whose workers are in other
processes sees their words, but not their chunks and parts: those lists are of workers of this process.
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
    RunPrefill,
    Send,
    ShipKV,
    Submit,
)
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Drawn, Preempted, Progress, Renew, Reserve, StartPrefill, View
from jdisagg.core.plans import KVTransfer
from jdisagg.core.request import Phase, Request, RequestId
from jdisagg.policy.decisions import Decision
from jdisagg.policy.request_state import END_PHASE, PHASE_OF_MARK
from jdisagg.serve.learnt import Learnt

PHASE_OF_WORD = {StartPrefill: Phase.PREFILLING, Preempted: Phase.QUEUED, Reserve: Phase.QUEUED}
FAMILIES = ("", "cmpl-", "chatcmpl-")  # what the fronts put before a client's id
MOST_WORDS = 200  # of one request, chunks and parts counted apart
UNTOLD = (Drawn, View, Renew)  # too many, and of no interest
TO_WORDS = ("detail", "reason", "part", "num_parts", "wire_s", "cached_pages", "mark")  # fields worth a look


def ledger_json(ledger: Ledger) -> dict[str, Any]:
    """Nanoseconds: the whole, its parts (which sum to it), and the KV's way, what of it was hidden behind prefill."""
    hidden, exposed = ledger.transfer_ns()
    return {
        "total_ns": ledger.total_ns,
        "parts_ns": ledger.parts_ns(),
        "transfer_ns": {"hidden": hidden, "exposed": exposed},
    }


@dataclass(slots=True)
class Life:
    """One request, in numbers and words. Each list is as long as `MOST_WORDS` allows; the rest is counted."""

    request_id: RequestId
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    phase: Phase = Phase.QUEUED
    tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    decisions: list[Decision] = field(default_factory=list)
    words: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    ending: Finish | Reject | None = None

    def add(self, rows: list[Any], row: Any) -> None:
        if len(rows) < MOST_WORDS:
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
            "words": list(self.words),
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
        self._lives: OrderedDict[str, Life] = OrderedDict()
        self._keep = keep
        self._folds: dict[type, Callable[[str, Any, float], None]] = {
            Submit: self._submit,
            Send: self._send,
            Received: self._received,
            RunPrefill: self._prefill,
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
        life = self._lives.get(decision.request_id)
        if life is not None:
            life.add(life.decisions, decision)

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Folds one event or effect of `actor`; what is not of a request's life is let by."""
        fold = self._folds.get(type(item))
        if fold is not None:
            fold(actor, item, now_s)

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        request: Request = item.request
        self._lives[request.request_id] = Life(
            request.request_id, request.arrival_s, len(request.prompt), request.sampling.max_tokens
        )
        if len(self._lives) > self._keep:
            self._lives.popitem(last=False)

    def _send(self, actor: str, item: Send, now_s: float) -> None:
        """What the router says, and what workers say to each other; what they tell the router is heard there."""
        if item.to != ROUTER:
            self._word(actor, item.to, item.message, now_s)

    def _received(self, actor: str, item: Received, now_s: float) -> None:
        if actor == ROUTER:
            self._word(item.sender, actor, item.message, now_s)

    def _word(self, speaker: str, to: str, message: Any, now_s: float) -> None:
        if isinstance(message, UNTOLD):
            return
        life = self._lives.get(getattr(message, "handoff", None) or getattr(message, "request_id", ""))
        if life is None:
            return
        if isinstance(message, tuple(PHASE_OF_WORD)) and life.ending is None:
            life.phase = PHASE_OF_WORD[type(message)]
        if isinstance(message, Progress) and life.ending is None:
            life.phase = PHASE_OF_MARK.get(message.mark, life.phase)
        told = {name: getattr(message, name) for name in TO_WORDS if getattr(message, name, None)}
        word = {"at_s": now_s, "from": speaker, "to": to, "word": type(message).__name__, "attempt": message.epoch}
        life.add(life.words, word | told)

    def _prefill(self, actor: str, item: RunPrefill, now_s: float) -> None:
        for chunk in item.plan.chunks:
            life = self._lives.get(chunk.request_id)
            if life is not None:
                row = {"at_s": now_s, "worker": actor, "start": chunk.start, "tokens": len(chunk.tokens)}
                life.add(life.chunks, row)
        for transfer in item.ships:
            self._part("to leave", transfer, now_s)

    def _part(self, what: str, transfer: KVTransfer, now_s: float, **more: float) -> None:
        life = self._lives.get(transfer.request_id)
        if life is None:
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
            "attempt": transfer.attempt,
        }
        life.add(life.parts, row | more)

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        life = self._lives.get(item.request_id)
        if life is not None:
            life.tokens += len(item.sampled)
            life.first_token_s = now_s if life.first_token_s is None else life.first_token_s
            life.last_token_s = now_s

    def _end(self, actor: str, item: Finish | Reject, now_s: float) -> None:
        life = self._lives.get(item.request_id)
        if life is not None:
            life.ending = item
            life.phase = END_PHASE[item.reason] if isinstance(item, Finish) else Phase.FAILED

    # ------------------------------------------------------------ out

    def decisions(self, count: int) -> list[dict[str, Any]]:
        """The last `count`, latest first."""
        return [decision.to_json() for decision in list(self._decisions)[: -count - 1 : -1]]

    def requests(self) -> list[dict[str, Any]]:
        """Who is remembered, latest first."""
        return [{"request_id": life.request_id, "phase": life.phase.value} for life in self._latest()]

    def request(self, name: str) -> list[dict[str, Any]]:
        """The lives of the request, or of all choices of a client's request, of this name; latest first."""
        starts = tuple(f"{family}{name}-" for family in FAMILIES)
        return [
            life.to_json() for life in self._latest() if life.request_id == name or life.request_id.startswith(starts)
        ]

    def _latest(self) -> Iterable[Life]:
        return reversed(list(self._lives.values()))


@dataclass(frozen=True, slots=True)
class Inside:
    """What a running stack can show of itself."""

    records: Records
    learnt: Callable[[], Learnt]
