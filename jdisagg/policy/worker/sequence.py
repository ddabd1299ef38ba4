"""The state of one sequence on a worker: its prompt while it is prefilled, and its tokens while it is decoded."""

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
    """The parts of a sequence's KV that have arrived, and those that are missing."""

    parts: set[int] = field(default_factory=set[int])  # inserted ones
    num_parts: int | None = None  # known from COMMIT on
    layers: tuple[tuple[int, int], ...] = ()  # of part i: layers[i % len(layers)]; (): each part holds all
    asked: Counter[int] = field(default_factory=Counter[int])  # number of times each part was requested again
    moved_s: float = 0.0  # when a part last arrived or was requested again
    wire: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # start, end of each transfer

    @property
    def missing(self) -> list[int]:
        """Parts that COMMIT counts and that have not arrived."""
        return [part for part in range(self.num_parts or 0) if part not in self.parts]

    @property
    def wire_s(self) -> float:
        """Seconds during which at least one part was being transferred."""
        total_s, until_s = 0.0, -math.inf
        for began_s, landed_s in sorted(self.wire):
            total_s += max(0.0, landed_s - max(began_s, until_s))
            until_s = max(until_s, landed_s)
        return total_s

    def part_holds(self, part: int, layers: tuple[int, int]) -> bool:
        """Returns True if the part holds any of these layers."""
        if not self.layers:
            return True
        first, stop = self.layers[part % len(self.layers)]
        return first < layers[1] and layers[0] < stop

    def expects(self, part: int) -> bool:
        """Returns True if this part has still to arrive; a part that COMMIT does not count is not expected."""
        return (self.num_parts is None or part < self.num_parts) and part not in self.parts


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence on its decode worker, from the reservation to the last token."""

    handoff: Handoff
    asked: Reserve
    order: OrderKey
    pages: list[int]  # the leading `cached_pages` are shared
    cached_pages: int = 0
    held: LockedPages = NOTHING  # a lock on the cached pages
    arrivals: PartArrivals = field(default_factory=PartArrivals)
    tail: tuple[int, ...] = ()  # last tokens of the prompt, as many as needed; known from COMMIT on
    output: list[int] = field(default_factory=list[int])  # tokens of this attempt, as read
    first: Sampled | None = None  # known from COMMIT on
    dispatched: int = 0  # output tokens read, and those that steps in flight may draw
    in_flight: int = 0  # tokens that steps in flight draw at least, unless they stop
    slot: int | None = None
    recalled: int = 0  # output tokens that the engine knows; 0: its admission has not been dispatched
    has_stepped: bool = False  # a decoded token has been read

    @property
    def owner(self) -> Attempt:
        return self.handoff.owner

    @property
    def source(self) -> WorkerId:
        """The worker that sends its KV and COMMIT."""
        return self.asked.prefill_worker

    @property
    def sampling(self) -> SamplingParams:
        return self.asked.sampling

    @property
    def is_on_device(self) -> bool:
        return self.recalled > 0

    @property
    def num_output(self) -> int:
        """Number of output tokens before this attempt."""
        return self.asked.num_output

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the KV at COMMIT: those of the prompt."""
        return self.asked.prompt_tokens

    @property
    def is_drained(self) -> bool:
        """True if all its steps are dispatched and no stage waits for KV: only tokens are outstanding."""
        return len(self.output) + self.in_flight >= self.sampling.max_tokens and self.is_admitted

    @property
    def own_pages(self) -> list[int]:
        return self.pages[self.cached_pages :]

    @property
    def is_admitted(self) -> bool:
        return self.handoff.state is State.ADMITTED

    def commit(self, manifest: Commit) -> None:
        """Takes over the first token and the number of parts from COMMIT; decode steps follow the first token."""
        self.handoff.take(Signal.COMMIT)
        self.first, self.tail = manifest.first, manifest.tail
        self.arrivals.num_parts, self.arrivals.layers = manifest.num_parts, manifest.layers
        self.output.append(manifest.first.token)
        self.dispatched = 1

    def admission(self, slot: int, draft_tokens: int) -> Admission:
        """Returns what the engine needs to know to decode the sequence in this slot."""
        assert self.first is not None, "an admitted sequence has its first token"
        drafted = draft_tokens > 0 and self.sampling.speculative
        drawn = (self.first.token,)
        return Admission(
            slot=slot,
            request_id=self.asked.request_id,
            token=self.first.token,
            position=self.num_tokens,
            pages=tuple(self.pages),
            sampling=self.sampling,
            num_output=self.num_output + 1,
            history=history_of(self.tail, self.sampling, self.num_output, drawn, drafted=drafted),
        )

    def dispatch(self, width: int, least: int) -> None:
        """Records a step that draws up to `width` tokens, and at least `least` unless one of them is the last."""
        self.recalled = len(self.output)
        self.in_flight += least
        self.dispatched += width

    def step_back(self) -> None:
        """Discards its steps in flight: it decodes again from its first token."""
        self.slot, self.recalled, self.dispatched, self.in_flight = None, 0, 1, 0

    def read(self, width: int, least: int, drawn: int) -> None:
        """Records the end of a step that could have drawn `width` tokens and drew `drawn`."""
        self.in_flight -= least
        self.dispatched -= width - drawn

    def renew(self, now_s: float) -> None:
        self.handoff.deadline_s = now_s + self.asked.lease_s

    def is_for(self, transfer: KVTransfer) -> bool:
        """Returns True if the transfer comes from this reservation's source, for pages that only it may fill."""
        ours = {NULL_PAGE, *self.own_pages}
        return transfer.source == self.source and ours.issuperset(transfer.destination_pages)

    def wants(self, part: int) -> bool:
        """Returns True if this part may be inserted now."""
        return self.arrivals.expects(part) and self.handoff.can_take(Signal.ARRIVE)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The decode rows of a step in flight, with the sequences that had the slots when it was dispatched."""

    microbatch: int
    sequences: dict[int, DecodeSequence]
    retired: tuple[int, ...]
    widths: dict[int, int]  # tokens that each slot may draw
    turns: bool = False  # see `DecodeRows.turns`

    def least(self, slot: int) -> int:
        """Returns the tokens that the slot draws unless one is its last: all of a multi-step, one of a draft."""
        return self.widths[slot] if self.turns else 1


def end_of(sampling: SamplingParams, sampled: Sampled, num_output: int) -> FinishReason | None:
    """Returns why a request ends with this token, the `num_output`th of the attempt; None if it goes on."""
    if sampled.broken:
        return FinishReason.ERROR
    if sampled.token in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


@dataclass(slots=True)
class PromptResults:
    """The requested outputs for the prompt itself: logprobs or a pooled state, collected chunk by chunk."""

    scored: list[Sampled] = field(default_factory=list[Sampled])  # logprobs so far
    pooled: tuple[int, ...] = ()  # the last token's state, or the sum of all so far

    def pool(self, share: tuple[int, ...]) -> None:
        self.pooled = tuple(map(add, self.pooled, share)) if self.pooled else share


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """A prompt from StartPrefill to the release of its pages."""

    handoff: Handoff
    asked: StartPrefill
    order: OrderKey
    group: PageGroup  # of this worker's pages and the destination's
    sent_pages: int  # leading pages that are sent, or cached at the destination
    mode: TransferMode = TransferMode.WHOLE  # chosen with its first chunk
    held: LockedPages = NOTHING  # leading pages that were cached, locked
    pages: tuple[int, ...] = ()  # all, the held ones first; empty if colocated: it computes in the reservation's
    own: tuple[int, ...] = ()  # those of `pages` that no other sequence reads
    names: tuple[PageHash, ...] = ()  # hashes of its full pages
    parts: list[KVTransfer] = field(default_factory=list[KVTransfer])  # as sent
    planned: int = 0  # tokens that are cached or that steps have taken
    results: PromptResults = field(default_factory=PromptResults)

    @property
    def owner(self) -> Attempt:
        return self.handoff.owner

    @property
    def request(self) -> Request:
        return self.asked.request

    @property
    def num_output(self) -> int:
        """Number of earlier output tokens at the end of its prompt."""
        return self.asked.num_output

    @property
    def decode_worker(self) -> WorkerId:
        return self.asked.decode_worker

    @property
    def cached_pages(self) -> int:
        """Number of leading decode pages that are cached at the destination."""
        return self.asked.cached_pages

    @property
    def tail(self) -> tuple[int, ...]:
        """The last tokens of the prompt, as many as the destination needs."""
        return self.request.prompt[self.request.prompt_tokens - self.asked.tail_tokens :]

    @property
    def is_started(self) -> bool:
        return self.planned > 0

    @property
    def tokens_left(self) -> int:
        return len(self.request.prompt) - self.planned


def is_here(prompt: PrefillSequence, config: WorkerConfig) -> bool:
    """Returns True if the prompt will decode on this worker, and so computes in the pages of its reservation."""
    return prompt.decode_worker == config.worker
