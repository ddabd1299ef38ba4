"""The prefill side of a worker: prompts in order, packed into chunks, their first token told, their KV shipped.

A prompt's pages are held from its first chunk until the destination acknowledges them. In a colocated worker they are
the bed's own, and shipping is a change of books.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from jdisagg.core.events import PrefillDone, RunPrefill, ShipKV
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Commit, Draw, StartPrefill
from jdisagg.core.plans import History, KVTransfer, PrefillChunk, PrefillPlan
from jdisagg.core.request import Request, Sampled, WorkerId
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.policy.beds import Beds, end_of
from jdisagg.policy.handoff import End, Handoff, Signal
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import Owner, PagePool, PageState
from jdisagg.policy.planning import Order, PromptView, history_of, order_of, pick_chunks


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt on its way from StartPrefill to the release of its pages."""

    handoff: Handoff
    request: Request
    order: Order
    num_output: int
    decode_worker: WorkerId
    decode_pages: tuple[int, ...]
    pages: tuple[int, ...] = ()  # its own; a colocated prompt computes in the bed's
    planned: int = 0  # tokens that plans have taken
    scored: list[Sampled] = field(default_factory=list)  # prompt logprobs so far

    @property
    def owner(self) -> Owner:
        return self.handoff.owner

    @property
    def tokens_left(self) -> int:
        return len(self.request.prompt) - self.planned


class Prompts:
    """All prompts of one worker."""

    def __init__(
        self, config: WorkerConfig, pool: PagePool, out: Outbox, beds: Beds, new_plan_id: Callable[[], int]
    ) -> None:
        self.config, self.pool, self.out, self.beds, self.new_plan_id = config, pool, out, beds, new_plan_id
        self.prompts: dict[Owner, Prompt] = {}
        self.plans: dict[int, tuple[Prompt, ...]] = {}  # in flight: whose chunks, in the plan's order
        self.waiting_tokens = 0
        self._waiting: list[Prompt] = []  # with tokens not yet planned, in order

    def start(self, message: StartPrefill, now_s: float) -> None:
        owner = Owner(message.handoff, message.epoch)
        here = message.decode_worker == self.config.worker
        if owner in self.prompts or (here and not self.beds.bed_waits(owner)):
            return  # said twice, or its bed is gone
        handoff = Handoff(owner, End.SOURCE, message.deadline_s)
        handoff.take(Signal.START)
        order = order_of(message.request)
        prompt = Prompt(
            handoff, message.request, order, message.num_output, message.decode_worker, message.decode_pages
        )
        self.prompts[owner] = prompt
        insort(self._waiting, prompt, key=lambda each: each.order)
        self.waiting_tokens += prompt.tokens_left
        self.out.arm(handoff)

    def _here(self, prompt: Prompt) -> bool:
        return prompt.decode_worker == self.config.worker

    # ------------------------------------------------------------ plans

    def plan(self, now_s: float) -> bool:
        """Dispatches the next plan; False where nothing waits, or nothing can start, or enough is in flight."""
        if not self._waiting or len(self.plans) >= self.config.prefills_ahead:
            return False
        views = [PromptView(each.tokens_left, self._pages_to_start(each)) for each in self._waiting]
        picked = pick_chunks(views, self.pool.free_pages, self.config)
        if not picked:
            return False
        prompts = [(self._waiting[index], tokens) for index, tokens in picked]
        chunks = tuple(self._take_chunk(prompt, tokens, now_s) for prompt, tokens in prompts)
        self._dispatch(chunks, tuple(prompt for prompt, _ in prompts))
        self._waiting = [each for each in self._waiting if each.tokens_left]
        return True

    def _pages_to_start(self, prompt: Prompt) -> int:
        started = bool(prompt.pages) or self._here(prompt)
        return 0 if started else self.config.pages_for(len(prompt.request.prompt))

    def _take_chunk(self, prompt: Prompt, tokens: int, now_s: float) -> PrefillChunk:
        if prompt.planned == 0:
            self._begin(prompt, now_s)
        request, start, end = prompt.request, prompt.planned, prompt.planned + tokens
        pages = self.beds.pages_of(prompt.owner) if self._here(prompt) else prompt.pages
        last = end == len(request.prompt)
        prompt.planned = end
        self.waiting_tokens -= tokens
        return PrefillChunk(
            request_id=request.request_id,
            tokens=request.prompt[start:end],
            start=start,
            pages=pages[: self.config.pages_for(end)],
            last=last,
            sampling=request.sampling,
            history=history_of(request, prompt.num_output) if last else History(),
            num_output=prompt.num_output,
        )

    def _begin(self, prompt: Prompt, now_s: float) -> None:
        pages = self.pool.take(self._pages_to_start(prompt), prompt.owner, PageState.HELD)
        assert pages is not None, "a prompt is picked only where its pages are free"
        prompt.pages = pages
        self.out.reach(prompt.request.request_id, prompt.owner, Mark.PREFILL_STARTED, now_s)

    def _dispatch(self, chunks: tuple[PrefillChunk, ...], prompts: tuple[Prompt, ...]) -> None:
        plan = PrefillPlan(
            plan_id=self.new_plan_id(),
            chunks=chunks,
            bucket_tokens=bucket(sum(len(chunk.tokens) for chunk in chunks), self.config.prefill_buckets),
            table_pages=bucket(max(len(chunk.pages) for chunk in chunks), self.config.table_buckets),
        )
        self.plans[plan.plan_id] = prompts
        self.out.put(RunPrefill(plan))

    # ------------------------------------------------------------ results

    def prefill_done(self, event: PrefillDone, now_s: float) -> None:
        prompts = {each.request.request_id: each for each in self.plans.pop(event.plan_id) if not each.handoff.over}
        for request_id, scored in event.prompt:
            if request_id in prompts:
                prompts[request_id].scored.extend(scored)
        done = [(prompts[request_id], first) for request_id, first in event.sampled if request_id in prompts]
        self.out.draw([_first_draw(prompt, first) for prompt, first in done])
        for prompt, first in done:
            self.out.reach(prompt.request.request_id, prompt.owner, Mark.FIRST_TOKEN, now_s)
            self._hand_over(prompt, first, now_s)

    def _hand_over(self, prompt: Prompt, first: Sampled, now_s: float) -> None:
        owner, here = prompt.owner, self._here(prompt)
        reason = end_of(prompt.request, first, 1)
        if reason is not None:
            self.out.end(prompt.request.request_id, owner, reason, prompt.num_output + 1, now_s)
            self.end(owner, Signal.RELEASE)
            if here:
                self.beds.end(owner, Signal.RELEASE)
            return
        prompt.handoff.take(Signal.SHIP)
        if here:
            self.beds.commit_here(owner, first, now_s)
            self.end(owner, Signal.ACK)
        else:
            self._ship(prompt, first, now_s)

    def _ship(self, prompt: Prompt, first: Sampled, now_s: float) -> None:
        owner, num_tokens = prompt.owner, len(prompt.request.prompt)
        self.pool.move(prompt.pages, owner, PageState.IN_FLIGHT)
        transfer = KVTransfer(
            handoff=owner.handoff,
            epoch=owner.epoch,
            request_id=prompt.request.request_id,
            source=self.config.worker,
            destination=prompt.decode_worker,
            source_pages=prompt.pages,
            destination_pages=prompt.decode_pages[: len(prompt.pages)],
            num_tokens=num_tokens,
        )
        self.out.put(ShipKV(transfer))
        self.out.send(prompt.decode_worker, Commit(*owner, first, num_tokens))
        prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s
        self.out.arm(prompt.handoff)

    def plan_failed(self, plan_id: int, reason: str) -> None:
        for prompt in self.plans.pop(plan_id):
            if not prompt.handoff.over:
                self.end(prompt.owner, Signal.ABORT)
                self.beds.end(prompt.owner, Signal.ABORT)
                self.out.abort(prompt.owner, reason)

    # ------------------------------------------------------------ ends

    def end(self, owner: Owner, signal: Signal) -> bool:
        """Gives back all that the prompt holds; False where there is none, or where the signal is not for its state."""
        prompt = self.prompts.get(owner)
        if prompt is None or not prompt.handoff.can_take(signal):
            return False
        prompt.handoff.take(signal)
        del self.prompts[owner]
        if prompt.tokens_left:
            self._waiting.remove(prompt)
            self.waiting_tokens -= prompt.tokens_left
        self.pool.give_back(prompt.pages, owner)
        prompt.pages = ()
        return True

    def expire(self, owner: Owner, now_s: float) -> bool:
        prompt = self.prompts.get(owner)
        if prompt is None or not prompt.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < prompt.handoff.deadline_s:
            self.out.arm(prompt.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)


def _first_draw(prompt: Prompt, first: Sampled) -> Draw:
    """What the client learns after prefill; prompt logprobs only before its very first token."""
    scored = tuple(prompt.scored) if prompt.num_output == 0 else ()
    return Draw(prompt.request.request_id, prompt.owner.epoch, prompt.num_output, (first,), scored)
