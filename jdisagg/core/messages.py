"""What actors say to each other: the handoff's words first, then what keeps the router's view true.

RESERVE -> RESERVED -> (parts of KV shipped) -> COMMIT -> ACK, and ABORT, acknowledged, from anywhere. Every message of
one try carries its `Attempt`: one of an earlier try is late and is dropped. Times to come are durations: actors of
several processes share no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.ledger import Mark
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig

PAGE_NAME_BYTES = 16  # of the name of one page: a hash of its tokens and of all before them
PAGES_A_WORD = 4096  # that one CacheHeld names at most
MOST_HOLDERS = 4  # that one prompt's word names


@dataclass(frozen=True, slots=True)
class Holder:
    """Another worker that is thought to hold pages `first` to `stop` - 1 of a prompt, in whichever tier."""

    worker: WorkerId
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Router to decode worker: hold pages and a slot for this request; the lease is renewed by what arrives.

    The prompt itself goes to the worker that prefills, whose Commit brings the few tokens of it that are needed here.
    """

    attempt: Attempt
    prompt_tokens: int  # as it is to be prefilled: earlier output joined to the prompt
    sampling: SamplingParams
    num_output: int  # output tokens already given to the client (a resumed request has some)
    prefill_worker: WorkerId
    lease_s: float  # the reservation is given up when nothing was heard of its source for this long
    arrival_s: float = 0.0  # as in Request, and so are the next two
    priority: int = 0
    cache_salt: str = ""  # the request's salt, which its adapter is in
    page_names: bytes = b""  # of the prompt's full pages of the decode worker's size, one behind the other; none: empty
    holders: tuple[Holder, ...] = ()  # where the prompt is computed here, as in StartPrefill

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode worker to router: these pages are held. The KV of the first `cached_pages` is in them already."""

    attempt: Attempt
    pages: tuple[int, ...]
    cached_pages: int = 0
    page_size: int = 0  # tokens a page; 0: as the prefill worker's


@dataclass(frozen=True, slots=True)
class Refused:
    """Decode worker to router: no reservation now."""

    attempt: Attempt
    detail: str


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Router to prefill worker: compute this prompt and ship its KV to those pages of that worker."""

    attempt: Attempt
    request: Request
    num_output: int
    decode_worker: WorkerId
    decode_pages: tuple[int, ...]
    timeout_s: float  # to the first token
    lease_s: float  # of the reservation: Renew it well within
    cached_pages: int = 0  # leading decode pages that hold their KV already: those are not shipped
    decode_page_size: int = 0  # tokens a decode page; 0: as this worker's
    tail_tokens: int = 0  # last tokens of the prompt that Commit is to bring
    holders: tuple[Holder, ...] = ()  # who may lend pages of this worker's size that it lacks


@dataclass(frozen=True, slots=True)
class Commit:
    """Prefill to decode worker: the manifest of what was shipped; this token was drawn and is fed next."""

    attempt: Attempt
    first: Sampled
    num_tokens: int  # tokens of KV, those in pages that the destination held already included
    num_parts: int  # parts 0 to num_parts - 1 were shipped
    layout: str = ""  # what the bytes are (WorkerConfig.kv_layout); empty: not told
    layers: tuple[tuple[int, int], ...] = ()  # of parts 0, 1, ... and so round and round; (): each holds all
    tail: tuple[int, ...] = ()  # last tokens of the prompt: StartPrefill says how many


@dataclass(frozen=True, slots=True)
class Ack:
    """Decode to prefill worker: committed and complete; the source pages may go."""

    attempt: Attempt
    wire_s: float = 0.0  # that its parts were on their way


@dataclass(frozen=True, slots=True)
class Resend:
    """Decode to prefill worker: this part came broken, or did not come; ship it again."""

    attempt: Attempt
    part: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Prefill to decode worker: still at it; the reservation's lease begins anew. Where there is no reservation, an
    Abort answers.
    """

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Abort:
    """Any actor to another: give back what this handoff holds, then say AbortAck. From a worker: it has done so."""

    attempt: Attempt
    detail: str
    reason: FinishReason = FinishReason.ERROR  # what the client is told where trying again is no use


@dataclass(frozen=True, slots=True)
class AbortAck:
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker to router: a request reached an instant of its ledger."""

    attempt: Attempt
    mark: Mark
    at_s: float
    wire_s: float = 0.0  # with COMMITTED: that parts of its KV were on their way
    cached_tokens: int = 0  # with PREFILL_STARTED and COMMITTED: prompt tokens whose KV was there already


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens of one request, drawn since the last word of it: from the worker by the router to who asked for them.

    `index` is the place of the first in the request's whole output.
    """

    attempt: Attempt
    index: int
    sampled: tuple[Sampled, ...]
    prompt: tuple[Sampled, ...] = ()  # once, before output 0, where prompt logprobs were asked for
    pooled: tuple[int, ...] = ()  # so, of the prompt's states, in parts of POOLED_ONE


@dataclass(frozen=True, slots=True)
class Drawn:
    """Worker to router: what one plan drew. The router alone tells clients, so that no token is told twice."""

    deltas: tuple[TokenDelta, ...]


NO_TOKENS = TokenDelta(Attempt(RequestId(""), 0), 0, ())


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Deltas of one request that follow each other as one, perhaps of several attempts: the last one's."""
    if len(deltas) <= 1:
        return deltas[0] if deltas else NO_TOKENS
    sampled = tuple(each for delta in deltas for each in delta.sampled)
    prompt = tuple(each for delta in deltas for each in delta.prompt)
    pooled = next((delta.pooled for delta in deltas if delta.pooled), ())
    return TokenDelta(deltas[-1].attempt, deltas[0].index, sampled, prompt, pooled)


@dataclass(frozen=True, slots=True)
class Ended:
    """Worker to router: the sequence came to its end on this worker, `num_output` tokens out in all."""

    attempt: Attempt
    reason: FinishReason
    at_s: float
    num_output: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Preempted:
    """Decode worker to router: pages ran out, this sequence gave its own back, or never had any; prefill it again with
    its output."""

    attempt: Attempt
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


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Worker to worker: lend me what you hold of these pages, from `first` on, without a gap. They come as records, by
    the way of KV; NoPages says that none do. Whoever asks waits no longer than its own deadline."""

    attempt: Attempt  # of this question alone, by the count of who asks
    names: bytes  # from the prompt's first page on, one behind the other
    first: int


@dataclass(frozen=True, slots=True)
class NoPages:
    """Worker to worker: none of those pages will come. `failed`: they are here, but cannot be read."""

    attempt: Attempt
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Priced:
    """Worker to router: what pages cost it of late, (source, seconds at all, seconds a page); "computed" is one."""

    lines: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class CacheWanted:
    """Router to worker: say which pages you keep for their content, all of them now, and each change from now on."""


@dataclass(frozen=True, slots=True)
class CacheHeld:
    """Worker to router: all the pages that it keeps after change `number`, in so many parts."""

    number: int
    names: bytes  # as in Reserve
    part: int = 0
    num_parts: int = 1
    tier: Tier = Tier.HBM  # each is counted by itself


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Worker to router: what it keeps more, and less, since change `number` - 1."""

    number: int
    check: int  # the exclusive or of all names that are kept now, 64 bits of it: who has lost a word finds it out
    added: bytes = b""
    removed: bytes = b""
    tier: Tier = Tier.HBM


@dataclass(frozen=True, slots=True)
class Leave:
    """Router to worker: nothing new will come; when nothing is left, say Left, and become this, if anything."""

    life: int  # of this change: the answers carry it
    config: WorkerConfig | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """Worker to router: nothing of any request is left here."""

    life: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Worker to router: it is this now and holds nothing. `why`: it could not become what it was to be."""

    life: int
    config: WorkerConfig
    why: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Worker to a router that it has just found: it decodes this still, as another router asked for it.

    The client had `num_output` tokens when that attempt began; what was drawn since is told from wherever Adopt says.
    """

    attempt: Attempt
    num_output: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Router to worker: what you have kept is asked for; say what was drawn from output `index` on."""

    attempt: Attempt
    index: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Front to router: a client's request. `output`: what its client was given already, by way of another router."""

    request: Request
    output: tuple[int, ...] = ()
    resumed: bool = False  # another router had it


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Front to router: its client wants no more of it, or has all of it."""

    request_id: RequestId
    reason: FinishReason = FinishReason.ABORT


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
    | FetchPages
    | NoPages
    | Priced
    | CacheWanted
    | CacheHeld
    | CacheChanged
    | Leave
    | Left
    | Joined
    | Kept
    | Adopt
    | Ask
    | Withdraw
)
