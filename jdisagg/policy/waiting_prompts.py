"""Prompts that wait for their next chunk, in order: which go into a step, and what of their beginning is there."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Progress
from jdisagg.core.steps import History, PrefillChunk
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.fetches import Fetches
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.part_shipping import PartShipping
from jdisagg.policy.planning import PromptView, history_of, pick_chunks, readable_pages
from jdisagg.policy.prefill_sequence import PrefillSequence, is_here
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.shared_pages import SharedPages

Taken = list[tuple[PrefillSequence, PrefillChunk]]  # chunks of one step, and whose they are


class WaitingPrompts:
    """Those of one worker with tokens that no step has taken. A colocated prompt computes in the reservation's pages,
    which `decode_side` knows."""

    def __init__(
        self,
        config: WorkerConfig,
        shared: SharedPages,
        out: Outbox,
        decode_side: DecodeSide,
        shipping: PartShipping,
        fetches: Fetches,
    ) -> None:
        self.config, self.shared, self.out, self.fetches = config, shared, out, fetches
        self.decode_side, self.shipping = decode_side, shipping
        self.tokens = 0
        self._waiting: list[PrefillSequence] = []  # in order
        self._computing: dict[PageHash, PrefillSequence] = {}  # pages that will be published, and by whom first

    def add(self, prompt: PrefillSequence) -> None:
        insort(self._waiting, prompt, key=lambda each: each.order)
        self.tokens += prompt.tokens_left

    def drop(self, prompt: PrefillSequence) -> None:
        """It is over: nothing more of it is computed."""
        if prompt.tokens_left:
            self._waiting.remove(prompt)
            self.tokens -= prompt.tokens_left
        self.computed(prompt)

    def computed(self, prompt: PrefillSequence) -> None:
        """Nobody waits for its pages any longer."""
        for name in prompt.names:
            if self._computing.get(name) is prompt:
                del self._computing[name]

    def take(self, now_s: float) -> Taken | None:
        """The chunks of the next step; None where nothing waits, or nothing can start."""
        waiting = [each for each in self._waiting if not self.fetches.holds_up(each.owner)]
        ready = [each for each in waiting if not self._another_computes(each)]
        picked = pick_chunks([self._view(each) for each in ready], self.shared.available, self.config)
        if not picked:
            return None
        prompts = [(ready[index], tokens) for index, tokens in picked]
        self._lock([prompt for prompt, _ in prompts])
        taken = [(prompt, self._take_chunk(prompt, tokens, now_s)) for prompt, tokens in prompts]
        self._waiting = [each for each in self._waiting if each.tokens_left]
        return taken

    def _view(self, prompt: PrefillSequence) -> PromptView:
        if self._started(prompt):
            return PromptView(prompt.tokens_left, 0)
        if is_here(prompt, self.config):
            return PromptView(prompt.tokens_left - self._held_tokens(prompt.cached_pages), 0)
        held, cost = self.shared.room_for(self._to_read(prompt), self.config.pages_for(len(prompt.request.prompt)))
        return PromptView(prompt.tokens_left - self._held_tokens(held), cost)

    def _started(self, prompt: PrefillSequence) -> bool:
        return prompt.planned > 0

    def _held_tokens(self, pages: int) -> int:
        return pages * self.config.page_size if self.config.prefix_caching else 0

    def _to_read(self, prompt: PrefillSequence) -> tuple[PageHash, ...]:
        return prompt.names[: readable_pages(prompt.request, self.config)]

    def _another_computes(self, prompt: PrefillSequence) -> bool:
        """Whether the next page that it lacks is being computed for another prompt, which has fewer tokens to go than
        waiting for it saves. That one's end, whatever it is, lets this one go on."""
        if self._started(prompt) or not self._computing:
            return False
        names = self._to_read(prompt)
        held = self.shared.cache.match(names)
        other = self._computing.get(names[held]) if held < len(names) else None
        if other is None:
            return False
        saved = sum(self._computing.get(name) is other for name in names[held:])
        return other.tokens_left <= saved * self.config.page_size

    def _lock(self, prompts: list[PrefillSequence]) -> None:
        """What they read stays as it is while they take the pages that they lack, and on."""
        for prompt in prompts:
            if not self._started(prompt) and not is_here(prompt, self.config):
                prompt.held = self.shared.lock(self._to_read(prompt))

    def _take_chunk(self, prompt: PrefillSequence, tokens: int, now_s: float) -> PrefillChunk:
        if prompt.planned == 0:
            self._begin(prompt, now_s)
        request, start, end = prompt.request, prompt.planned, prompt.planned + tokens
        pages = self.decode_side.pages_of(prompt.owner) if is_here(prompt, self.config) else prompt.pages
        last = end == len(request.prompt)
        prompt.planned = end
        self.tokens -= tokens
        return PrefillChunk(
            request_id=request.request_id,
            tokens=request.prompt[start:end],
            start=start,
            pages=pages[: self.config.pages_for(end)],
            last=last,
            sampling=request.sampling,
            history=history_of(request.prompt, request.sampling, prompt.num_output) if last else History(),
            num_output=prompt.num_output,
        )

    def _begin(self, prompt: PrefillSequence, now_s: float) -> None:
        cached = self._held_tokens(prompt.cached_pages) if is_here(prompt, self.config) else self._take_pages(prompt)
        prompt.planned = cached
        self.tokens -= cached
        prompt.mode = self.shipping.mode(prompt)
        reached = Progress(prompt.owner, Mark.PREFILL_STARTED, now_s)
        self.out.tell_router(replace(reached, cached_tokens=cached))

    def _take_pages(self, prompt: PrefillSequence) -> int:
        """Takes what it lacks; returns the tokens whose KV it has already."""
        held, total = len(prompt.held.pages), self.config.pages_for(len(prompt.request.prompt))
        own = self.shared.take(total - held, prompt.owner, PageState.HELD)
        assert own is not None, "a prompt is picked only where its pages are there to be taken"
        prompt.own, prompt.pages = own, (*prompt.held.pages, *own)
        for name in prompt.names[held:]:
            self._computing.setdefault(name, prompt)
        return held * self.config.page_size
