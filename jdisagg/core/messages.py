"""What actors say to each other: the handoff's words first, then what keeps the router's view true.

RESERVE -> RESERVED -> (parts of KV shipped) -> COMMIT -> ACK, and ABORT, acknowledged, from anywhere. Every message of
a handoff carries its epoch: one of another epoch is late and is dropped. Epochs are the router's and never come again.
Times to come are durations: actors of several processes share no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.ledger import Mark
from jdisagg.core.request import FinishReason, Request, RequestId, Sampled, WorkerId


@dataclass(frozen=True, slots=True)
class Reserve:
    """Router to decode worker: hold pages and a slot for this request; the lease is renewed by what arrives."""

    handoff: str
    epoch: int
    request: Request  # as it is to be prefilled: earlier output joined to the prompt
    num_output: int  # output tokens already given to the client (a resumed request has some)
    prefill_worker: WorkerId
    lease_s: float  # the reservation is given up when nothing was heard of its source for this long


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode worker to router: these pages are held. The KV of the first `cached_pages` is in them already."""

    handoff: str
    epoch: int
    pages: tuple[int, ...]
    cached_pages: int = 0
    page_size: int = 0  # tokens a page; 0: as the prefill worker's


@dataclass(frozen=True, slots=True)
class Refused:
    """Decode worker to router: no reservation now."""

    handoff: str
    epoch: int
    detail: str


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Router to prefill worker: compute this prompt and ship its KV to those pages of that worker."""

    handoff: str
    epoch: int
    request: Request
    num_output: int
    decode_worker: WorkerId
    decode_pages: tuple[int, ...]
    timeout_s: float  # to the first token
    lease_s: float  # of the reservation: Renew it well within
    cached_pages: int = 0  # leading decode pages that hold their KV already: those are not shipped
    decode_page_size: int = 0  # tokens a decode page; 0: as this worker's


@dataclass(frozen=True, slots=True)
class Commit:
    """Prefill to decode worker: the manifest of what was shipped; this token was drawn and is fed next."""

    handoff: str
    epoch: int
    first: Sampled
    num_tokens: int  # tokens of KV, those in pages that the destination held already included
    num_parts: int  # parts 0 to num_parts - 1 were shipped
    layout: str = ""  # what the bytes are (WorkerConfig.kv_layout); empty: not told
    layers: tuple[tuple[int, int], ...] = ()  # of parts 0, 1, ... and so round and round; (): each holds all


@dataclass(frozen=True, slots=True)
class Ack:
    """Decode to prefill worker: committed and complete; the source pages may go."""

    handoff: str
    epoch: int
    wire_s: float = 0.0  # that its parts were on their way


@dataclass(frozen=True, slots=True)
class Resend:
    """Decode to prefill worker: this part came broken, or did not come; ship it again."""

    handoff: str
    epoch: int
    part: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Prefill to decode worker: still at it; the reservation's lease begins anew. Where there is no reservation, an
    Abort answers.
    """

    handoff: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Any actor to another: give back what this handoff holds, then say AbortAck. From a worker: it has done so."""

    handoff: str
    epoch: int
    detail: str
    reason: FinishReason = FinishReason.ERROR  # what the client is told where trying again is no use


@dataclass(frozen=True, slots=True)
class AbortAck:
    handoff: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker to router: a request reached an instant of its ledger."""

    request_id: RequestId
    epoch: int
    mark: Mark
    at_s: float
    wire_s: float = 0.0  # with COMMITTED: that parts of its KV were on their way
    cached_tokens: int = 0  # with PREFILL_STARTED: prompt tokens whose KV was there already


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens of one request, drawn since the last word of it. `index` is the place of the first in its whole output."""

    request_id: RequestId
    epoch: int
    index: int
    sampled: tuple[Sampled, ...]
    prompt: tuple[Sampled, ...] = ()  # once, before output 0, where prompt logprobs were asked for


@dataclass(frozen=True, slots=True)
class Drawn:
    """Worker to router: what one plan drew. The router alone tells clients, so that no token is told twice."""

    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Worker to router: the sequence came to its end on this worker, `num_output` tokens out in all."""

    request_id: RequestId
    epoch: int
    reason: FinishReason
    at_s: float
    num_output: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Preempted:
    """Decode worker to router: pages ran out, this sequence gave its own back; prefill it again with its output."""

    request_id: RequestId
    epoch: int
    output: tuple[int, ...]  # every token drawn since the last StartPrefill, in order
    detail: str


@dataclass(frozen=True, slots=True)
class View:
    """Worker to router: what is free and waiting, after it changed."""

    free_pages: int  # that a reservation may take: running sequences keep one each to grow into
    free_slots: int  # further sequences it would take, those that wait for a slot to come free included
    waiting_tokens: int  # prompt tokens not yet prefilled
    running: int  # sequences in slots
    stream_tokens: int = 0  # --transfer=auto: prompts of at least this many tokens are shipped as they are computed


Message = (
    Reserve
    | Reserved
    | Refused
    | StartPrefill
    | Commit
    | Ack
    | Resend
    | Renew
    | Abort
    | AbortAck
    | Progress
    | Drawn
    | Ended
    | Preempted
    | View
)
