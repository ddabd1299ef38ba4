"""One prompt on a prefill worker: what of it is planned, which pages it holds, and what of its KV has left."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add

from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.layout.reshard import PageGroup, pages_elsewhere
from jdisagg.core.messages import StartPrefill
from jdisagg.core.request import Attempt, Request, Sampled, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import TransferMode, WorkerConfig
from jdisagg.policy.handoff import Handoff
from jdisagg.policy.parts import Piece
from jdisagg.policy.planning import Order
from jdisagg.policy.prefix_cache import Handle, PageHash
from jdisagg.policy.shared_pages import NOTHING


@dataclass(slots=True)
class PromptTold:
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
    order: Order
    group: PageGroup  # of this worker's pages and the destination's
    sent_pages: int  # leading pages that have left, or whose KV the destination held already
    mode: TransferMode = TransferMode.WHOLE  # settled when it begins
    held: Handle = NOTHING  # leading pages whose KV was here already, locked
    pages: tuple[int, ...] = ()  # all, the held ones first; a colocated prompt computes in the reservation's
    own: tuple[int, ...] = ()  # of these, those that nobody else reads
    names: tuple[PageHash, ...] = ()  # of its full pages
    parts: list[KVTransfer] = field(default_factory=list[KVTransfer])  # as shipped
    planned: int = 0  # tokens that plans have taken
    told: PromptTold = field(default_factory=PromptTold)

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

    def pages_there(self, piece: Piece, page_size: int) -> tuple[int, ...]:
        """Decode pages that hold the tokens of these pages; the null page for those that are held already."""
        start, stop = pages_elsewhere(piece.start, piece.stop, len(self.request.prompt), page_size, self.group)
        pages = self.asked.decode_pages[start:stop]
        return tuple(NULL_PAGE if start + at < self.cached_pages else page for at, page in enumerate(pages))


def is_here(prompt: PrefillSequence, config: WorkerConfig) -> bool:
    """Whether it decodes on this very worker, and so computes in its reservation's pages."""
    return prompt.decode_worker == config.worker
