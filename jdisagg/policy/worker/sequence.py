"""One sequence's place on a decode worker, and what a step in flight remembers of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from operator import add

from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.layout.reshard import PageGroup
from jdisagg.core.messages import Commit, Reserve, StartPrefill
from jdisagg.core.request import Attempt, FinishReason, Request, Sampled, SamplingParams, WorkerId
from jdisagg.core.steps import Admission, KVTransfer
from jdisagg.core.worker_config import TransferMode, WorkerConfig
from jdisagg.policy.cache.page_pool import NOTHING
from jdisagg.policy.cache.prefix_cache import LockedPages, PageHash
from jdisagg.policy.request_size import OrderKey, history_of
from jdisagg.policy.worker.handoff import Handoff, Signal, State


@dataclass(slots=True, eq=False)
class PartArrivals:
    """Which parts of its KV a sequence has, and which it waits for."""

    parts: set[int] = field(default_factory=set[int])  # that are inserted
    num_parts: int | None = None  # that COMMIT counts
    layers: tuple[tuple[int, int], ...] = ()  # of its parts, round and round; (): each holds all
    asked: Counter[int] = field(default_factory=Counter[int])  # times each part was asked for again
    moved_s: float = 0.0  # when a part last came or was asked for again
    wire: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # when each part was on its way

    @property
    def missing(self) -> list[int]:
        """Parts that COMMIT counts and that have not come."""
        return [part for part in range(self.num_parts or 0) if part not in self.parts]

    @property
    def wire_s(self) -> float:
        """For how long at least one of them was on its way."""
        total_s, until_s = 0.0, -math.inf
        for began_s, landed_s in sorted(self.wire):
            total_s += max(0.0, landed_s - max(began_s, until_s))
            until_s = max(until_s, landed_s)
        return total_s

    def part_holds(self, part: int, layers: tuple[int, int]) -> bool:
        """Whether the part holds any of these layers."""
        if not self.layers:
            return True
        first, stop = self.layers[part % len(self.layers)]
        return first < layers[1] and layers[0] < stop

    def expects(self, part: int) -> bool:
        """Whether this part is still to come; one that COMMIT does not count is none of this sequence's."""
        return (self.num_parts is None or part < self.num_parts) and part not in self.parts


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One sequence's place: from its reservation to its last token."""

    handoff: Handoff
    asked: Reserve
    order: OrderKey
    pages: list[int]  # the leading `cached_pages` are not its own
    cached_pages: int = 0
    held: LockedPages = NOTHING  # those, locked
    arrivals: PartArrivals = field(default_factory=PartArrivals)
    tail: tuple[int, ...] = ()  # the prompt's last tokens, as many as are needed; known from COMMIT on
    output: list[int] = field(default_factory=list[int])  # tokens of this attempt, as read
    first: Sampled | None = None  # known from COMMIT on
    dispatched: int = 0  # output tokens drawn, and those that steps in flight may draw
    in_flight: int = 0  # tokens that steps in flight draw at least, unless they stop
    slot: int | None = None
    recalled: int = 0  # output tokens that its engine was told; none: its admission has not been dispatched
    stepped: bool = False  # a decoded token has been read

    @property
    def owner(self) -> Attempt:
        return self.handoff.owner

    @property
    def source(self) -> WorkerId:
        """Whose parts and COMMIT it waits for."""
        return self.asked.prefill_worker

    @property
    def sampling(self) -> SamplingParams:
        return self.asked.sampling

    @property
    def on_device(self) -> bool:
        return self.recalled > 0

    @property
    def num_output(self) -> int:
        """Tokens the client had before this attempt."""
        return self.asked.num_output

    @property
    def num_tokens(self) -> int:
        """Tokens in the KV when it is committed: the prompt's."""
        return self.asked.prompt_tokens

    @property
    def drained(self) -> bool:
        """All its steps are dispatched, and no stage of them waits for KV: it only waits for tokens."""
        return len(self.output) + self.in_flight >= self.sampling.max_tokens and admitted(self)

    @property
    def own_pages(self) -> list[int]:
        return self.pages[self.cached_pages :]

    def commit(self, manifest: Commit) -> None:
        """What COMMIT says; the first token is out, and the sequence's steps follow it."""
        self.handoff.take(Signal.COMMIT)
        self.first, self.tail = manifest.first, manifest.tail
        self.arrivals.num_parts, self.arrivals.layers = manifest.num_parts, manifest.layers
        self.output.append(manifest.first.token)
        self.dispatched = 1

    def dispatch(self, width: int, least: int) -> None:
        """A step that draws up to `width` tokens of it, and `least` unless one of them is its last, is under way."""
        self.recalled = len(self.output)
        self.in_flight += least
        self.dispatched += width

    def step_back(self) -> None:
        """What its steps in flight draw is nobody's: it decodes from where it was when it came."""
        self.slot, self.recalled, self.dispatched, self.in_flight = None, 0, 1, 0

    def read(self, width: int, least: int, drawn: int) -> None:
        """One of its steps ended, which could have drawn `width` tokens."""
        self.in_flight -= least
        self.dispatched -= width - drawn

    def renew(self, now_s: float) -> None:
        self.handoff.deadline_s = now_s + self.asked.lease_s

    def is_for(self, transfer: KVTransfer) -> bool:
        """Whether it comes from this reservation's source, for pages that are its own to fill."""
        ours = {NULL_PAGE, *self.own_pages}
        return transfer.source == self.source and ours.issuperset(transfer.destination_pages)

    def wants(self, part: int) -> bool:
        """Whether this part may come now."""
        return self.arrivals.expects(part) and self.handoff.can_take(Signal.ARRIVE)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Decode rows in flight, and whose the slots were when they were dispatched."""

    microbatch: int
    sequences: dict[int, DecodeSequence]
    retired: tuple[int, ...]
    widths: dict[int, int]  # tokens that each slot may draw
    turns: bool = False  # see `DecodeRows.turns`

    def least(self, slot: int) -> int:
        """Tokens that it draws unless one of them is its last: each turn's, of a draft only one."""
        return self.widths[slot] if self.turns else 1


def admitted(sequence: DecodeSequence) -> bool:
    return sequence.handoff.state is State.ADMITTED


def admission(slot: int, sequence: DecodeSequence, draft_tokens: int) -> Admission:
    assert sequence.first is not None, "an admitted sequence has its first token"
    drafted = draft_tokens > 0 and sequence.sampling.speculative
    drawn = (sequence.first.token,)
    return Admission(
        slot=slot,
        request_id=sequence.asked.request_id,
        token=sequence.first.token,
        position=sequence.num_tokens,
        pages=tuple(sequence.pages),
        sampling=sequence.sampling,
        num_output=sequence.num_output + 1,
        history=history_of(sequence.tail, sequence.sampling, sequence.num_output, drawn, drafted=drafted),
    )


def end_of(sampling: SamplingParams, sampled: Sampled, num_output: int) -> FinishReason | None:
    """Why a request is over with this token, its `num_output`th of this attempt; None where it goes on."""
    if sampled.broken:
        return FinishReason.ERROR
    if sampled.token in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


# One prompt on a prefill worker: what of it is planned, which pages it holds, and what of its KV has left.


@dataclass(slots=True)
class PromptResults:
    """What its chunks have told of the prompt itself, where that was asked for."""

    scored: list[Sampled] = field(default_factory=list[Sampled])  # logprobs so far
    pooled: tuple[int, ...] = ()  # the last token's state, or the sum of all so far

    def pool(self, share: tuple[int, ...]) -> None:
        self.pooled = tuple(map(add, self.pooled, share)) if self.pooled else share


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """One prompt on its way from StartPrefill to the release of its pages."""

    handoff: Handoff
    asked: StartPrefill
    order: OrderKey
    group: PageGroup  # of this worker's pages and the destination's
    sent_pages: int  # leading pages that have left, or whose KV the destination held already
    mode: TransferMode = TransferMode.WHOLE  # settled when it begins
    held: LockedPages = NOTHING  # leading pages whose KV was here already, locked
    pages: tuple[int, ...] = ()  # all, the held ones first; a colocated prompt computes in the reservation's
    own: tuple[int, ...] = ()  # of these, those that nobody else reads
    names: tuple[PageHash, ...] = ()  # of its full pages
    parts: list[KVTransfer] = field(default_factory=list[KVTransfer])  # as shipped
    planned: int = 0  # tokens that plans have taken
    told: PromptResults = field(default_factory=PromptResults)

    @property
    def owner(self) -> Attempt:
        return self.handoff.owner

    @property
    def request(self) -> Request:
        return self.asked.request

    @property
    def num_output(self) -> int:
        """Output tokens among those of its prompt."""
        return self.asked.num_output

    @property
    def decode_worker(self) -> WorkerId:
        return self.asked.decode_worker

    @property
    def cached_pages(self) -> int:
        """Leading decode pages that the destination held already."""
        return self.asked.cached_pages

    @property
    def tail(self) -> tuple[int, ...]:
        """The prompt's last tokens, as many as the destination needs."""
        return self.request.prompt[self.request.prompt_tokens - self.asked.tail_tokens :]

    @property
    def tokens_left(self) -> int:
        return len(self.request.prompt) - self.planned


def is_here(prompt: PrefillSequence, config: WorkerConfig) -> bool:
    """Whether it decodes on this very worker, and so computes in its reservation's pages."""
    return prompt.decode_worker == config.worker
