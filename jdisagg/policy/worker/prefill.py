"""The prefill phase of a worker: prompts in order, cut into chunks; their first token; their KV sent.

KV leaves in parts, the early ones with the plan that computes them: if a plan fails, its parts never left. A prompt's
pages are held from its first chunk until the destination acknowledges all parts. In a colocated worker they are the
pages of the reservation, and sending is only bookkeeping.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jdisagg.core.events import ShipKV, StepDone
from jdisagg.core.layout.reshard import group_pages
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Commit, Progress, Renew, Resend, StartPrefill, TokenDelta
from jdisagg.core.request import Attempt, Sampled, WorkerId
from jdisagg.core.steps import History, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import RAW, TransferMode, WorkerConfig, bucket
from jdisagg.policy.cache.page_pool import NOTHING, PageState, SharedPages
from jdisagg.policy.cache.prefix_cache import PageHash
from jdisagg.policy.cache.tiers import Tiers
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import history_of, order_of, readable_pages
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.handoff import Handoff, HandoffRole, Signal, State, Timer, timer_of
from jdisagg.policy.worker.kv_sender import KVSender, cut_chunks, layers_of
from jdisagg.policy.worker.sequence import PrefillSequence, end_of, is_here

RENEWALS_PER_LEASE = 3  # so that two messages of each lease may be lost

PickedChunks = list[tuple[PrefillSequence, PrefillChunk]]  # the chunks of one step with their prompts


class PromptView(NamedTuple):
    """A waiting prompt: tokens not yet planned, and the pages that it must get before it starts (0 once it has)."""

    tokens_left: int
    pages_to_start: int


def pick_chunks(waiting: Sequence[PromptView], free_pages: int, config: WorkerConfig) -> list[tuple[int, int]]:
    """Returns (index into `waiting`, tokens) of the chunks of one plan; `waiting` is in order.

    A prompt is cut at multiples of the chunk size whatever runs beside it, so that its numbers do not depend on the
    other prompts: what does not fit whole waits for the next plan, where the first in order always fits. No prompt
    starts that cannot finish: if the first one to start lacks pages, none behind it starts; started prompts go on.
    """
    chunk_tokens = room = config.prefill_buckets[-1]
    picked: list[tuple[int, int]] = []
    blocked = False
    for index, view in enumerate(waiting):
        tokens = min(view.tokens_left, chunk_tokens)
        starts = view.pages_to_start > 0
        blocked = blocked or view.pages_to_start > free_pages
        if tokens > room or (starts and blocked):
            continue
        picked.append((index, tokens))
        room -= tokens
        free_pages -= view.pages_to_start
        if room == 0 or len(picked) == config.max_chunk_seqs:
            break
    return picked


class PrefillPhase:
    """All prompts of one worker, from StartPrefill to the release of their pages."""

    def __init__(
        self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer, decode: DecodePhase, tiers: Tiers
    ) -> None:
        self.config, self.shared, self.out, self.decode, self.tiers = config, shared, out, decode, tiers
        self.sequences: dict[Attempt, PrefillSequence] = {}
        self.steps: dict[int, tuple[PrefillSequence, ...]] = {}  # in flight: the prompts of the chunks, in order
        self.sender = KVSender(config)
        self.waiting_tokens = 0  # prompt tokens that no step has taken
        self._waiting: list[PrefillSequence] = []  # prompts with such tokens, in order
        self._computing: dict[PageHash, PrefillSequence] = {}  # pages to be published, and the first to compute each

    def start(self, message: StartPrefill, now_s: float) -> None:
        owner = message.attempt
        here = message.decode_worker == self.config.worker
        if owner in self.sequences or (here and not self.decode.is_reserved(owner)):
            return  # a repeated message, or its reservation is gone
        handoff = Handoff(owner, HandoffRole.SOURCE, now_s + message.timeout_s)
        handoff.take(Signal.START)
        group = group_pages(self.config.page_size, message.decode_page_size or self.config.page_size)
        prompt = PrefillSequence(
            handoff=handoff,
            asked=message,
            order=order_of(message.request),
            group=group,
            sent_pages=message.cached_pages // group.destination * group.source,
        )
        if not here:
            prompt.names = self.shared.names(prompt.request)
            self.tiers.fetch(owner, self._readable(prompt), self.shared.available, now_s, message.holders)
        self.sequences[owner] = prompt
        insort(self._waiting, prompt, key=lambda each: each.order)
        self.waiting_tokens += prompt.tokens_left
        self.out.arm(handoff)
        self._renew_later(prompt, now_s)

    # ------------------------------------------------------------ chunks of the next step

    def next_chunks(self, now_s: float) -> PickedChunks | None:
        """Returns the chunks of the next step; None if no prompt can run, or enough steps are in flight."""
        if len(self.steps) >= self.config.chunks_in_flight:
            return None
        fetches = self.tiers.fetches
        ready = [each for each in self._waiting if not fetches.holds_up(each.owner) and not self._should_wait(each)]
        picked = pick_chunks([self._view(each) for each in ready], self.shared.available, self.config)
        if not picked:
            return None
        prompts = [(ready[index], tokens) for index, tokens in picked]
        for prompt, _ in prompts:  # before any of them takes pages, which could evict what another reads
            if not prompt.is_started and not is_here(prompt, self.config):
                prompt.held = self.shared.lock(self._readable(prompt))
        chunks = [(prompt, self._take_chunk(prompt, tokens, now_s)) for prompt, tokens in prompts]
        self._waiting = [each for each in self._waiting if each.tokens_left]
        return chunks

    def _view(self, prompt: PrefillSequence) -> PromptView:
        if prompt.is_started:
            return PromptView(prompt.tokens_left, 0)
        if is_here(prompt, self.config):
            return PromptView(prompt.tokens_left - self._cached_tokens(prompt.cached_pages), 0)
        held, cost = self.shared.room_for(self._readable(prompt), self.config.pages_for(len(prompt.request.prompt)))
        return PromptView(prompt.tokens_left - self._cached_tokens(held), cost)

    def _cached_tokens(self, pages: int) -> int:
        return pages * self.config.page_size if self.config.prefix_caching else 0

    def _readable(self, prompt: PrefillSequence) -> tuple[PageHash, ...]:
        return prompt.names[: readable_pages(prompt.request, self.config)]

    def _should_wait(self, prompt: PrefillSequence) -> bool:
        """Returns True if another prompt computes the next page that this one lacks and has less left to compute than
        waiting for it saves. The end of that prompt, however it ends, lets this one go on."""
        if prompt.is_started or not self._computing:
            return False
        names = self._readable(prompt)
        held = self.shared.cache.match(names)
        other = self._computing.get(names[held]) if held < len(names) else None
        if other is None:
            return False
        saved = sum(self._computing.get(name) is other for name in names[held:])
        return other.tokens_left <= saved * self.config.page_size

    def _take_chunk(self, prompt: PrefillSequence, tokens: int, now_s: float) -> PrefillChunk:
        if not prompt.is_started:
            self._begin(prompt, now_s)
        request, start, end = prompt.request, prompt.planned, prompt.planned + tokens
        pages = self.decode.pages_of(prompt.owner) if is_here(prompt, self.config) else prompt.pages
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
            history=history_of(request.prompt, request.sampling, prompt.num_output) if last else History(),
            num_output=prompt.num_output,
        )

    def _begin(self, prompt: PrefillSequence, now_s: float) -> None:
        here = is_here(prompt, self.config)
        cached = self._cached_tokens(prompt.cached_pages) if here else self._take_pages(prompt)
        prompt.planned = cached
        self.waiting_tokens -= cached
        prompt.mode = TransferMode.WHOLE if here else self.sender.mode(prompt.request)
        progress = Progress(prompt.owner, Mark.PREFILL_STARTED, now_s)
        self.out.tell_router(replace(progress, cached_tokens=cached))

    def _take_pages(self, prompt: PrefillSequence) -> int:
        """Takes the pages that the prompt lacks; returns the number of tokens whose KV is cached."""
        held, total = len(prompt.held.pages), self.config.pages_for(len(prompt.request.prompt))
        own = self.shared.take(total - held, prompt.owner, PageState.LIVE)
        assert own is not None, "a prompt is picked only if its pages are available"
        prompt.own, prompt.pages = own, (*prompt.held.pages, *own)
        for name in prompt.names[held:]:
            self._computing.setdefault(name, prompt)
        return held * self.config.page_size

    def _stop_computing(self, prompt: PrefillSequence) -> None:
        """Lets prompts go on that wait for pages of this one."""
        for name in prompt.names:
            if self._computing.get(name) is prompt:
                del self._computing[name]

    # ------------------------------------------------------------ steps

    def dispatch(
        self, step_id: int, picked: PickedChunks, now_s: float
    ) -> tuple[PrefillChunks, tuple[KVTransfer, ...]]:
        """Records the step; returns its chunks packed, and the parts that leave with it."""
        prompts, chunks = tuple(prompt for prompt, _ in picked), tuple(chunk for _, chunk in picked)
        packed = PrefillChunks(
            chunks=chunks,
            bucket_tokens=bucket(sum(len(chunk.tokens) for chunk in chunks), self.config.prefill_buckets),
            table_pages=bucket(max(len(chunk.pages) for chunk in chunks), self.config.table_buckets),
        )
        self.steps[step_id] = prompts
        self.sender.step_dispatched(step_id, packed.num_tokens, now_s)
        self.tiers.step_dispatched(step_id, packed.num_tokens, now_s)
        streamed = [prompt for prompt in prompts if prompt.mode is not TransferMode.WHOLE]
        return packed, tuple(part for prompt in streamed for part in self._cut(prompt))

    def on_step_done(self, event: StepDone, now_s: float) -> None:
        self.sender.step_done(event.step_id, now_s)
        self.tiers.step_done(event.step_id, now_s)
        prompts = {each.request.request_id: each for each in self.steps.pop(event.step_id) if not each.handoff.over}
        for request_id, scored in event.prompt:
            if request_id in prompts:
                prompts[request_id].results.scored.extend(scored)
        for request_id, share in event.pooled:
            if request_id in prompts:
                prompts[request_id].results.pool(share)
        done = [(prompts[request_id], first) for request_id, first in event.first if request_id in prompts]
        done = [(prompt, _first_broken([*prompt.results.scored, first])) for prompt, first in done]
        self.out.draw([_first_delta(prompt, first) for prompt, first in done if not first.broken])
        for prompt, first in done:
            self.out.reach(prompt.owner, Mark.FIRST_TOKEN, now_s)
            self._hand_over(prompt, first, now_s)

    def on_step_failed(self, step_id: int, reason: str) -> None:
        self.sender.step_failed(step_id)
        self.tiers.step_failed(step_id)
        for prompt in self.steps.pop(step_id):
            if not prompt.handoff.over:
                self.end(prompt.owner, Signal.ABORT)
                self.decode.end(prompt.owner, Signal.ABORT)
                self.out.abort(prompt.owner, reason)

    def _hand_over(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        owner, here = prompt.owner, is_here(prompt, self.config)
        reason = end_of(prompt.request.sampling, first, 1)
        if reason is not None:
            if not first.broken:
                self._publish(prompt)
            num_output = prompt.num_output + (not first.broken)
            self.out.end(owner, reason, num_output, now_s, prompt.request.sampling)
            self.end(owner, Signal.RELEASE)
            if here:
                self.decode.end(owner, Signal.RELEASE, good=not first.broken)
            return
        if here:
            prompt.handoff.take(Signal.COMMIT)
            self.decode.commit_here(owner, self._manifest(prompt, first), now_s)
            self.end(owner, Signal.ACK)
        else:
            self._commit(prompt, first, now_s)
            self._publish(prompt)

    def _publish(self, prompt: PrefillSequence) -> None:
        """Lets others read the full pages, whose KV is all computed, while they are still being sent."""
        self._stop_computing(prompt)
        if prompt.names:
            before = prompt.held
            prompt.held, prompt.own = self.shared.publish(prompt.names, prompt.pages, prompt.own, prompt.owner)
            self.shared.release(before)

    # ------------------------------------------------------------ sending KV

    def _cut(self, prompt: PrefillSequence) -> list[KVTransfer]:
        """Returns the parts that may leave now that `planned` tokens are dispatched, and records them as sent."""
        total = len(prompt.request.prompt)
        chunks = cut_chunks(prompt.mode, self.config, prompt.sent_pages, prompt.planned, total, prompt.group.source)
        if not chunks:
            return []
        prompt.handoff.take(Signal.SHIP)
        first_own = max(prompt.sent_pages, len(prompt.held.pages))
        self.shared.pool.move(prompt.pages[first_own : chunks[-1].stop], prompt.owner, PageState.IN_FLIGHT)
        prompt.sent_pages = chunks[-1].stop
        parts = [self.sender.part(prompt, chunk, len(prompt.parts) + index) for index, chunk in enumerate(chunks)]
        prompt.parts += parts
        return parts

    def _commit(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        """Sends the rest of the KV and COMMIT, then waits for the destination's Ack."""
        for part in self._cut(prompt):
            self.out.put(ShipKV(part))
        prompt.handoff.take(Signal.COMMIT)
        self.out.send(prompt.decode_worker, self._manifest(prompt, first))
        prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s
        self.out.arm(prompt.handoff)

    def _manifest(self, prompt: PrefillSequence, first: Sampled) -> Commit:
        """Returns the COMMIT message: how many parts were sent, and what else the destination needs."""
        return Commit(
            attempt=prompt.owner,
            first=first,
            num_tokens=prompt.request.prompt_tokens,
            num_parts=len(prompt.parts),
            layout=self.config.kv_layout,
            layers=layers_of(prompt.mode, self.config),
            tail=prompt.tail,
        )

    def on_ack(self, message: Ack) -> None:
        """Releases the pages of a prompt whose KV has all arrived."""
        prompt = self.sequences.get(message.attempt)
        if self.end(message.attempt, Signal.ACK) and prompt is not None:
            self.sender.on_ack(prompt.parts, message.wire_s)

    def renew_lease(self, owner: Attempt, now_s: float) -> None:
        """Renews the lease of the reservation, so that leases can be short although prompts are long."""
        prompt = self.sequences.get(owner)
        if prompt is not None:
            self.out.send(prompt.decode_worker, Renew(owner))
            self._renew_later(prompt, now_s)

    def _renew_later(self, prompt: PrefillSequence, now_s: float) -> None:
        if not is_here(prompt, self.config):
            due_s = now_s + prompt.asked.lease_s / RENEWALS_PER_LEASE
            self.out.set_timer(due_s, timer_of(Timer.RENEW, prompt.owner))

    def on_resend(self, message: Resend, destination: WorkerId, now_s: float) -> None:
        """Sends a part again that the destination lacks."""
        prompt = self.sequences.get(message.attempt)
        if prompt is None:
            self.out.send(destination, Abort(message.attempt, "no such prompt"))
        else:
            self._reship(prompt, message.part, now_s)

    def on_ship_failed(self, owner: Attempt, part: int, now_s: float) -> bool:
        """Sends the part again; returns False if it has failed too often, or the prompt or part is unknown."""
        prompt = self.sequences.get(owner)
        if prompt is None or part >= len(prompt.parts) or prompt.parts[part].resends >= self.config.part_tries:
            return False
        self._reship(prompt, part, now_s)
        return True

    def _reship(self, prompt: PrefillSequence, part: int, now_s: float) -> None:
        """Sends a part again as raw KV: its pages are held until all are acknowledged, and quantising may have lost
        more than the bound."""
        if part >= len(prompt.parts):
            return  # it never left
        again = replace(prompt.parts[part], resends=prompt.parts[part].resends + 1, wire=RAW)
        prompt.parts[part] = again
        self.out.put(ShipKV(again))
        if prompt.handoff.state is State.SHIPPED:
            prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s

    # ------------------------------------------------------------ ends

    def end(self, owner: Attempt, signal: Signal) -> bool:
        """Releases all that the prompt holds; False if there is none or its state cannot take the signal."""
        prompt = self.sequences.get(owner)
        if prompt is None or not prompt.handoff.can_take(signal):
            return False
        prompt.handoff.take(signal)
        del self.sequences[owner]
        self.tiers.fetches.forget(owner)
        if prompt.tokens_left:
            self._waiting.remove(prompt)
            self.waiting_tokens -= prompt.tokens_left
        self._stop_computing(prompt)
        self.shared.pool.give_back(prompt.own, owner)
        self.shared.release(prompt.held)
        prompt.pages, prompt.own, prompt.held = (), (), NOTHING
        return True

    def expire(self, owner: Attempt, now_s: float) -> bool:
        """Ends a prompt whose deadline is over; returns True if it did."""
        prompt = self.sequences.get(owner)
        if prompt is None or not prompt.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < prompt.handoff.deadline_s:
            self.out.arm(prompt.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)


def _first_broken(drawn: list[Sampled]) -> Sampled:
    """Returns the first broken token, because NaN logits of a prompt spoil all that follows; else the last token."""
    return next((each for each in drawn if each.broken), drawn[-1])


def _first_delta(prompt: PrefillSequence, first: Sampled) -> TokenDelta:
    """Returns the client's update after prefill; it has prompt logprobs only before the request's first token."""
    scored = tuple(prompt.results.scored) if prompt.num_output == 0 else ()
    return TokenDelta(prompt.owner, prompt.num_output, (first,), scored, prompt.results.pooled)
