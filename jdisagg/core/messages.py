"""What actors say to each other: the handoff's words first, then what keeps the router's view true.

RESERVE -> RESERVED -> (parts of KV shipped) -> COMMIT -> ACK, and ABORT, acknowledged, from anywhere. Every message of
one try carries its `Attempt`: one of an earlier try is late and is dropped. Times to come are durations: actors of
several processes share no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.codec import Number, TaggedStruct, Whole
from jdisagg.core.ledger import Mark
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig

PAGE_NAME_BYTES = 16  # of the name of one page: a hash of its tokens and of all before them
PAGES_A_WORD = 4096  # that one CacheHeld names at most
MOST_HOLDERS = 4  # that one prompt's word names


class Holder(TaggedStruct, frozen=True):
    """Another worker that is thought to hold pages `first` to `stop` - 1 of a prompt, in whichever tier."""

    worker: WorkerId
    first: Whole
    stop: Whole


class Reserve(TaggedStruct, frozen=True):
    """Router to decode worker: hold pages and a slot for this request; the lease is renewed by what arrives.

    The prompt itself goes to the worker that prefills, whose Commit brings the few tokens of it that are needed here.
    """

    attempt: Attempt
    prompt_tokens: Whole  # as it is to be prefilled: earlier output joined to the prompt
    sampling: SamplingParams
    num_output: Whole  # output tokens already given to the client (a resumed request has some)
    prefill_worker: WorkerId
    lease_s: Number  # the reservation is given up when nothing was heard of its source for this long
    arrival_s: Number = 0.0  # as in Request, and so are the next two
    priority: Whole = 0
    cache_salt: str = ""  # the request's salt, which its adapter is in
    page_names: bytes = b""  # of the prompt's full pages of the decode worker's size, one behind the other; none: empty
    holders: tuple[Holder, ...] = ()  # where the prompt is computed here, as in StartPrefill

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id


class Reserved(TaggedStruct, frozen=True):
    """Decode worker to router: these pages are held. The KV of the first `cached_pages` is in them already."""

    attempt: Attempt
    pages: tuple[Whole, ...]
    cached_pages: Whole = 0
    page_size: Whole = 0  # tokens a page; 0: as the prefill worker's


class Refused(TaggedStruct, frozen=True):
    """Decode worker to router: no reservation now."""

    attempt: Attempt
    detail: str


class StartPrefill(TaggedStruct, frozen=True):
    """Router to prefill worker: compute this prompt and ship its KV to those pages of that worker."""

    attempt: Attempt
    request: Request
    num_output: Whole
    decode_worker: WorkerId
    decode_pages: tuple[Whole, ...]
    timeout_s: Number  # to the first token
    lease_s: Number  # of the reservation: Renew it well within
    cached_pages: Whole = 0  # leading decode pages that hold their KV already: those are not shipped
    decode_page_size: Whole = 0  # tokens a decode page; 0: as this worker's
    tail_tokens: Whole = 0  # last tokens of the prompt that Commit is to bring
    holders: tuple[Holder, ...] = ()  # who may lend pages of this worker's size that it lacks


class Commit(TaggedStruct, frozen=True):
    """Prefill to decode worker: the manifest of what was shipped; this token was drawn and is fed next."""

    attempt: Attempt
    first: Sampled
    num_tokens: Whole  # tokens of KV, those in pages that the destination held already included
    num_parts: Whole  # parts 0 to num_parts - 1 were shipped
    layout: str = ""  # what the bytes are (WorkerConfig.kv_layout); empty: not told
    layers: tuple[tuple[Whole, Whole], ...] = ()  # of parts 0, 1, ... and so round and round; (): each holds all
    tail: tuple[Whole, ...] = ()  # last tokens of the prompt: StartPrefill says how many


class Ack(TaggedStruct, frozen=True):
    """Decode to prefill worker: committed and complete; the source pages may go."""

    attempt: Attempt
    wire_s: Number = 0.0  # that its parts were on their way


class Resend(TaggedStruct, frozen=True):
    """Decode to prefill worker: this part came broken, or did not come; ship it again."""

    attempt: Attempt
    part: Whole


class Renew(TaggedStruct, frozen=True):
    """Prefill to decode worker: still at it; the reservation's lease begins anew. Where there is no reservation, an
    Abort answers.
    """

    attempt: Attempt


class Abort(TaggedStruct, frozen=True):
    """Any actor to another: give back what this handoff holds, then say AbortAck. From a worker: it has done so."""

    attempt: Attempt
    detail: str
    reason: FinishReason = FinishReason.ERROR  # what the client is told where trying again is no use


class AbortAck(TaggedStruct, frozen=True):
    attempt: Attempt


class Progress(TaggedStruct, frozen=True):
    """Worker to router: a request reached an instant of its ledger."""

    attempt: Attempt
    mark: Mark
    at_s: Number
    wire_s: Number = 0.0  # with COMMITTED: that parts of its KV were on their way
    cached_tokens: Whole = 0  # with PREFILL_STARTED and COMMITTED: prompt tokens whose KV was there already


class TokenDelta(TaggedStruct, frozen=True):
    """Tokens of one request, drawn since the last word of it: from the worker by the router to who asked for them.

    `index` is the place of the first in the request's whole output.
    """

    attempt: Attempt
    index: Whole
    sampled: tuple[Sampled, ...]
    prompt: tuple[Sampled, ...] = ()  # once, before output 0, where prompt logprobs were asked for
    pooled: tuple[Whole, ...] = ()  # so, of the prompt's states, in parts of POOLED_ONE


class Drawn(TaggedStruct, frozen=True):
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


class Ended(TaggedStruct, frozen=True):
    """Worker to router: the sequence came to its end on this worker, `num_output` tokens out in all."""

    attempt: Attempt
    reason: FinishReason
    at_s: Number
    num_output: Whole
    detail: str = ""


class Preempted(TaggedStruct, frozen=True):
    """Decode worker to router: pages ran out, this sequence gave its own back, or never had any; prefill it again with
    its output."""

    attempt: Attempt
    output: tuple[Whole, ...]  # every token drawn since the last StartPrefill, in order
    detail: str


class View(TaggedStruct, frozen=True):
    """Worker to router: what is free and waiting, after it changed."""

    free_pages: Whole  # that a reservation may take: running sequences keep one each to grow into
    free_slots: Whole  # further sequences it would take, those that wait for a slot to come free included
    waiting_tokens: Whole  # prompt tokens not yet prefilled
    running: Whole  # sequences in slots
    stream_tokens: Whole = 0  # --transfer=auto: prompts of at least this many tokens are shipped as they are computed


class FetchPages(TaggedStruct, frozen=True):
    """Worker to worker: lend me what you hold of these pages, from `first` on, without a gap. They come as records, by
    the way of KV; NoPages says that none do. Whoever asks waits no longer than its own deadline."""

    attempt: Attempt  # of this question alone, by the count of who asks
    names: bytes  # from the prompt's first page on, one behind the other
    first: Whole


class NoPages(TaggedStruct, frozen=True):
    """Worker to worker: none of those pages will come. `failed`: they are here, but cannot be read."""

    attempt: Attempt
    failed: str = ""


class Priced(TaggedStruct, frozen=True):
    """Worker to router: what pages cost it of late, (source, seconds at all, seconds a page); "computed" is one."""

    lines: tuple[tuple[str, Number, Number], ...]


class CacheWanted(TaggedStruct, frozen=True):
    """Router to worker: say which pages you keep for their content, all of them now, and each change from now on."""


class CacheHeld(TaggedStruct, frozen=True):
    """Worker to router: all the pages that it keeps after change `number`, in so many parts."""

    number: Whole
    names: bytes  # as in Reserve
    part: Whole = 0
    num_parts: Whole = 1
    tier: Tier = Tier.HBM  # each is counted by itself


class CacheChanged(TaggedStruct, frozen=True):
    """Worker to router: what it keeps more, and less, since change `number` - 1."""

    number: Whole
    check: int  # the exclusive or of all names that are kept now, 64 bits of it: who has lost a word finds it out
    added: bytes = b""
    removed: bytes = b""
    tier: Tier = Tier.HBM


class Leave(TaggedStruct, frozen=True):
    """Router to worker: nothing new will come; when nothing is left, say Left, and become this, if anything."""

    life: Whole  # of this change: the answers carry it
    config: WorkerConfig | None = None


class Left(TaggedStruct, frozen=True):
    """Worker to router: nothing of any request is left here."""

    life: Whole


class Joined(TaggedStruct, frozen=True):
    """Worker to router: it is this now and holds nothing. `why`: it could not become what it was to be."""

    life: Whole
    config: WorkerConfig
    why: str = ""


class Kept(TaggedStruct, frozen=True):
    """Worker to a router that it has just found: it decodes this still, as another router asked for it.

    The client had `num_output` tokens when that attempt began; what was drawn since is told from wherever Adopt says.
    """

    attempt: Attempt
    num_output: Whole


class Adopt(TaggedStruct, frozen=True):
    """Router to worker: what you have kept is asked for; say what was drawn from output `index` on."""

    attempt: Attempt
    index: Whole


class Ask(TaggedStruct, frozen=True):
    """Front to router: a client's request. `output`: what its client was given already, by way of another router."""

    request: Request
    output: tuple[Whole, ...] = ()
    resumed: bool = False  # another router had it


class Withdraw(TaggedStruct, frozen=True):
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
