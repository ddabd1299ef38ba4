"""The router's table: one row a request, its phase, its wait, and the tokens its client has been given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Ended, TokenDelta
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
from jdisagg.policy.failures import FailureKind
from jdisagg.policy.planning import Order
from jdisagg.policy.prefix_cache import PageHash, more_page_hashes

LIFE = tuple(Mark)  # in the order in which an attempt reaches them


class Waiting(StrEnum):
    """What a row waits for; each has a deadline."""

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
    order: Order
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
        """Of the full pages of what is to be prefilled now; each is worked out once, however often it is routed."""
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
        """Its prefill began with so many tokens of KV at hand; told of the first attempt."""
        if len(self.output) == len(self.request.beginning):
            self.ledger.cached_tokens = cached_tokens

    def natural_end(self) -> FinishReason | None:
        """Why the output is complete, None where it is not."""
        if self.output and self.output[-1] in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= self.request.sampling.max_tokens else None

    def blamed(self, waited: WorkerId) -> WorkerId | None:
        """Who is at fault where `waited` waited in vain: the silent other end, but for a prompt nobody but itself."""
        if waited == self.decode:
            return self.prefill
        return self.decode if self.phase is Phase.SHIPPING else waited

    def leave_workers(self) -> None:
        """Forgets the attempt; late words of it are of another epoch."""
        self.epoch, self.prefill, self.decode, self.ended = 0, None, None, None
        self.early.clear()

    def finish(self, reason: FinishReason, detail: str) -> Finish:
        return Finish(self.request_id, reason, self.ledger, self.prefill, self.decode, detail)
