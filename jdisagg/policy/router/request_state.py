"""The state of one request in the router: phase, wait, deadline, output, and the messages made from it.

A literal table says what follows from each kind of failure in each phase. Every wait has a deadline, which is a kind of
failure, so that no request hangs; and an answer that was cut short never ends as "length". A broken, late or failed
part is sent again by its source first: the router sees only what sending again did not mend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.events import Finish, SetTimer
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Ended, Holder, Reserve, Reserved, StartPrefill, TokenDelta
from jdisagg.core.request import (
    Attempt,
    FinishReason,
    Phase,
    Request,
    RequestId,
    Sampled,
    WorkerId,
    continued,
    next_phase,
)
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.prefix_cache import PageHash, more_page_hashes, packed
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import OrderKey, tail_tokens


class FailureKind(StrEnum):
    NO_ANSWER = "the decode worker did not answer the reservation in time"
    PREFILL_LATE = "the prefill worker drew no token in time"
    SHIP_LATE = "the KV did not reach the decode worker in time"
    TOKEN_LATE = "the decode worker drew no token in time"
    PREFILL_GAVE_UP = "the prefill worker gave the handoff up"
    DECODE_GAVE_UP = "the decode worker gave the handoff up"
    PREFILL_LOST = "the prefill worker was lost"
    DECODE_LOST = "the decode worker was lost"


class Recovery(StrEnum):
    IGNORE = "ignore"  # nothing of this attempt is left there, or needed from there
    REPREFILL = "re-prefill"  # as this attempt began, elsewhere where there is an elsewhere
    RESUME = "resume"  # so, with the tokens that the client got since joined to the prompt


# QUEUED here means that a reservation is out. Where a row is missing, the kind cannot come in that phase, or is
# late: it is ignored. Any other recovery becomes a failure when a request has had its retries.
TABLE: Mapping[tuple[FailureKind, Phase], Recovery] = MappingProxyType(
    {
        (FailureKind.NO_ANSWER, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.DECODE_GAVE_UP, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.DECODE_LOST, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.PREFILL_LOST, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.PREFILL_LATE, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.PREFILL_GAVE_UP, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.DECODE_GAVE_UP, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.PREFILL_LOST, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.DECODE_LOST, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.SHIP_LATE, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.PREFILL_GAVE_UP, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.DECODE_GAVE_UP, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.PREFILL_LOST, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.DECODE_LOST, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.TOKEN_LATE, Phase.DECODING): Recovery.RESUME,
        (FailureKind.DECODE_GAVE_UP, Phase.DECODING): Recovery.RESUME,
        (FailureKind.DECODE_LOST, Phase.DECODING): Recovery.RESUME,
        (FailureKind.PREFILL_GAVE_UP, Phase.DECODING): Recovery.IGNORE,  # a source that missed its Ack: the KV is here
        (FailureKind.PREFILL_LOST, Phase.DECODING): Recovery.IGNORE,
    }
)


def recovery(kind: FailureKind, phase: Phase) -> Recovery:
    """Returns the table's entry, or IGNORE if there is none."""
    return TABLE.get((kind, phase), Recovery.IGNORE)


@dataclass(frozen=True, slots=True)
class Failure:
    """FailureKind as a row meets it. `reason` is what the client hears should trying again be no use."""

    kind: FailureKind
    reason: FinishReason
    detail: str
    gone: WorkerId | None = None  # holds nothing of the attempt any more
    avoid: WorkerId | None = None  # is to be avoided by the next attempt


LIFE = tuple(Mark)  # in the order in which an attempt reaches them


class Waiting(StrEnum):
    """The event that a request waits for; each has a deadline."""

    KEEPER = "a worker that has kept it"
    RESERVATION = "a free reservation"
    ANSWER = "the answer to a reservation"
    PREFILL = "its first token"
    SHIP = "its KV to reach the decode worker"
    TOKEN = "its next token"


PHASE_OF_MARK = MappingProxyType(
    {
        Mark.FIRST_TOKEN: Phase.SHIPPING,
        Mark.COMMITTED: Phase.DECODING,
        Mark.FIRST_STEP: Phase.DECODING,
    }
)
END_PHASE = MappingProxyType(
    {
        FinishReason.STOP: Phase.FINISHED,
        FinishReason.LENGTH: Phase.FINISHED,
        FinishReason.ABORT: Phase.CANCELLED,
        FinishReason.TIMEOUT: Phase.FAILED,
        FinishReason.ERROR: Phase.FAILED,
    }
)
FAILURE_OF_WAIT = MappingProxyType(
    {
        Waiting.ANSWER: FailureKind.NO_ANSWER,
        Waiting.PREFILL: FailureKind.PREFILL_LATE,
        Waiting.SHIP: FailureKind.SHIP_LATE,
        Waiting.TOKEN: FailureKind.TOKEN_LATE,
    }
)


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    order: OrderKey
    ledger: Ledger
    queue_deadline_s: float  # of its last wait in the queue, refusals and all
    deadline_s: float = 0.0  # of the present wait
    phase: Phase = Phase.QUEUED
    waiting: Waiting = Waiting.RESERVATION
    epoch: int = 0  # of the present attempt; 0: none, so that every late word is of another
    num_before: int = 0  # output tokens when this attempt began
    output: list[int] = field(default_factory=list[int])  # what the client has been given
    # Drawn, but an earlier token has not come yet.
    early: dict[int, Sampled] = field(default_factory=dict[int, Sampled])
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    ended: Ended | None = None  # it has ended on its worker, but tokens are still on their way here
    failures: int = 0
    avoid: set[WorkerId] = field(default_factory=set[WorkerId])
    armed_s: float | None = None  # when its timer fires
    wait_told: bool = False  # that it waits for room is in the log of decisions
    names: dict[int, tuple[PageHash, ...]] = field(default_factory=dict[int, tuple[PageHash, ...]])  # by page size

    @property
    def attempt(self) -> Attempt:
        """The present try."""
        return Attempt(self.request.request_id, self.epoch)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    def to_prefill(self) -> Request:
        """The request as it is to be prefilled now."""
        return continued(self.request, tuple(self.output)) if self.output else self.request

    def page_names(self, page_size: int) -> tuple[PageHash, ...]:
        """Returns the names of the full pages to be prefilled now; each is computed once."""
        names = self.names.get(page_size, ())
        if (len(names) + 1) * page_size <= len(self.request.prompt) + len(self.output):
            tokens = self.to_prefill().prompt[len(names) * page_size :]
            names = self.names[page_size] = more_page_hashes(names, tokens, page_size, self.request.salt)
        return names

    def enter(self, phase: Phase) -> None:
        self.phase = next_phase(self.phase, phase)

    @property
    def untold(self) -> tuple[int, ...]:
        """The beginning of its answer that is known, where nothing behind it has been drawn: told with what is."""
        if not self.request.forced:
            return ()
        beginning = self.request.beginning
        return beginning if len(self.output) == len(beginning) else ()

    def take(self, delta: TokenDelta) -> TokenDelta:
        """Books drawn tokens; returns those that the client is to get now: in order, none missing, none twice."""
        untold = tuple(map(Sampled, self.untold))
        told = self._in_order(delta)
        return replace(told, index=0, sampled=untold + told.sampled) if untold and told.sampled else told

    def _in_order(self, delta: TokenDelta) -> TokenDelta:
        first = len(self.output)
        if delta.index == first and not self.early:
            self.output.extend([sampled.token for sampled in delta.sampled])
            return delta
        for place, sampled in enumerate(delta.sampled, delta.index):
            if first <= place < self.request.sampling.max_tokens:
                self.early[place] = sampled
        told = list[Sampled]()
        while (sampled := self.early.pop(len(self.output), None)) is not None:
            self.output.append(sampled.token)
            told.append(sampled)
        return replace(delta, index=first, sampled=tuple(told))

    def mark(self, mark: Mark, at_s: float, wire_s: float = 0.0) -> None:
        """Notes what a worker says it has reached; a word that comes late or twice would charge the wrong part."""
        if LIFE.index(mark) > LIFE.index(self.ledger.marks[-1][0]):
            self.ledger.mark(mark, at_s)
            self.ledger.wire_ns += round(wire_s * 1e9)

    def begun(self, cached_tokens: int) -> None:
        """Records the cached tokens with which the first attempt's prefill began."""
        if len(self.output) == len(self.request.beginning):
            self.ledger.cached_tokens = cached_tokens

    def natural_end(self) -> FinishReason | None:
        """Why the output is complete, None where it is not."""
        if self.output and self.output[-1] in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= self.request.sampling.max_tokens else None

    def blamed(self, waited: WorkerId) -> WorkerId | None:
        """Returns the worker to avoid after `waited` timed out: the silent other end, or itself during prefill."""
        if waited == self.decode:
            return self.prefill
        return self.decode if self.phase is Phase.SHIPPING else waited

    def leave_workers(self) -> None:
        """Forgets the attempt; late words of it are of another epoch."""
        self.epoch, self.prefill, self.decode, self.ended = 0, None, None, None
        self.early.clear()

    def finish(self, reason: FinishReason, detail: str) -> Finish:
        return Finish(self.request_id, reason, self.ledger, self.prefill, self.decode, detail)


def set_deadline(out: EffectBuffer, row: RequestState, waiting: Waiting, deadline_s: float) -> None:
    """Sets what the request waits for, until when.

    The request's one timer moves only to an earlier time; a later deadline is found when the timer fires.
    """
    row.waiting, row.deadline_s = waiting, deadline_s
    if deadline_s < math.inf and (row.armed_s is None or deadline_s < row.armed_s):
        row.armed_s = deadline_s
        out.put(SetTimer(deadline_s, f"row/{row.request_id}"))


def check_deadline(out: EffectBuffer, row: RequestState, now_s: float) -> bool:
    """Returns True if the deadline has come when the timer fires; if it was moved, the timer is set again."""
    if row.armed_s is not None and now_s < row.armed_s:
        return False  # of an earlier request with this id
    row.armed_s = None
    if now_s >= row.deadline_s:
        return True
    set_deadline(out, row, row.waiting, row.deadline_s)
    return False


def reserve_for(
    attempt: Attempt,
    request: Request,
    num_output: int,
    prefill_worker: WorkerId,
    lease_s: float,
    page_names: tuple[PageHash, ...] = (),
    holders: tuple[Holder, ...] = (),
) -> Reserve:
    return Reserve(
        attempt=attempt,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        num_output=num_output,
        prefill_worker=prefill_worker,
        lease_s=lease_s,
        arrival_s=request.arrival_s,
        priority=request.priority,
        cache_salt=request.salt,
        page_names=packed(page_names),
        holders=holders,
    )


def build_reserve(
    row: RequestState,
    decode: WorkerConfig,
    config: RouterConfig,
    holders: tuple[Holder, ...] = (),
) -> Reserve:
    """`decode` looks the prompt's beginning up by its own pages."""
    assert row.prefill is not None, "a reservation is for what some worker computes"
    names = row.page_names(decode.page_size) if decode.prefix_caching else ()
    request = row.to_prefill()
    return reserve_for(row.attempt, request, row.num_before, row.prefill, config.lease_s, names, holders)


def build_start_prefill(
    row: RequestState,
    reservation: Reserved,
    decode: WorkerConfig,
    config: RouterConfig,
    holders: tuple[Holder, ...] = (),
) -> StartPrefill:
    assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
    request = row.to_prefill()
    return StartPrefill(
        attempt=row.attempt,
        request=request,
        num_output=row.num_before,
        decode_worker=row.decode,
        decode_pages=reservation.pages,
        timeout_s=config.prefill_timeout_s,
        lease_s=config.lease_s,
        cached_pages=reservation.cached_pages,
        decode_page_size=reservation.page_size,
        tail_tokens=tail_tokens(request, decode),
        holders=holders,
    )
