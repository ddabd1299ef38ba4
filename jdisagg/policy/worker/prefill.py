"""The prefill side of a worker: prompts in order, packed into chunks, their first token told, their KV shipped.

KV leaves in parts, the early ones with the plan that computes them: where a plan fails, its parts never left. A
prompt's pages are held from its first chunk until the destination acknowledges them all. In a colocated worker they
are the reservation's own, and shipping is a change of books.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from jdisagg.core.events import ShipKV, StepDone
from jdisagg.core.layout.reshard import group_pages
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Progress, Renew, Resend, StartPrefill, TokenDelta
from jdisagg.core.request import Attempt, Sampled, WorkerId
from jdisagg.core.steps import History, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import TransferMode, WorkerConfig, bucket
from jdisagg.policy.cache.fetch import Fetches
from jdisagg.policy.cache.page_pool import NOTHING, PageState, SharedPages
from jdisagg.policy.cache.prefix_cache import PageHash
from jdisagg.policy.cache.tiers import Tiers
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import PromptView, history_of, order_of, pick_chunks, readable_pages
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.handoff import Handoff, HandoffRole, Signal, Timer, timer_of
from jdisagg.policy.worker.kv_sender import KVSender
from jdisagg.policy.worker.sequence import PrefillSequence, end_of, is_here

# Prompts that wait for their next chunk, in order: which go into a step, and what of their beginning is there.

Taken = list[tuple[PrefillSequence, PrefillChunk]]  # chunks of one step, and whose they are


class WaitingPrompts:
    """Those of one worker with tokens that no step has taken. A colocated prompt computes in the reservation's pages,
    which `decode_side` knows."""

    def __init__(
        self,
        config: WorkerConfig,
        shared: SharedPages,
        out: EffectBuffer,
        decode_side: DecodePhase,
        shipping: KVSender,
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


BEATS = 3  # a lease is renewed: two words of it may be lost


class PrefillPhase:
    """All prompts of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        shared: SharedPages,
        out: EffectBuffer,
        decode_side: DecodePhase,
        tiers: Tiers,
    ) -> None:
        self.config, self.shared, self.out, self.tiers = config, shared, out, tiers
        self.decode_side = decode_side
        self.sequences: dict[Attempt, PrefillSequence] = {}
        self.steps: dict[int, tuple[PrefillSequence, ...]] = {}  # in flight: whose chunks, in the step's order
        self.shipping = KVSender(config, shared, out)
        self.waiting = WaitingPrompts(config, shared, out, decode_side, self.shipping, tiers.fetches)

    def start(self, message: StartPrefill, now_s: float) -> None:
        owner = message.attempt
        here = message.decode_worker == self.config.worker
        if owner in self.sequences or (here and not self.decode_side.reservation_waits(owner)):
            return  # said twice, or its reservation is gone
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
            to_read = prompt.names[: readable_pages(prompt.request, self.config)]
            self.tiers.fetch(owner, to_read, self.shared.available, now_s, message.holders)
        self.sequences[owner] = prompt
        self.waiting.add(prompt)
        self.out.arm(handoff)
        self._beat_later(prompt, now_s)

    # ------------------------------------------------------------ steps

    def next_chunks(self, now_s: float) -> Taken | None:
        """The chunks of the next step; None where there are none, or enough is in flight."""
        return self.waiting.take(now_s) if len(self.steps) < self.config.chunks_in_flight else None

    def dispatch(self, step_id: int, taken: Taken, now_s: float) -> tuple[PrefillChunks, tuple[KVTransfer, ...]]:
        """Books the step; returns its chunks packed, and the parts that leave with it."""
        prompts, chunks = tuple(prompt for prompt, _ in taken), tuple(chunk for _, chunk in taken)
        packed = PrefillChunks(
            chunks=chunks,
            bucket_tokens=bucket(sum(len(chunk.tokens) for chunk in chunks), self.config.prefill_buckets),
            table_pages=bucket(max(len(chunk.pages) for chunk in chunks), self.config.table_buckets),
        )
        self.steps[step_id] = prompts
        self.shipping.step_dispatched(step_id, packed.num_tokens, now_s)
        self.tiers.step_dispatched(step_id, packed.num_tokens, now_s)
        streamed = [prompt for prompt in prompts if prompt.mode is not TransferMode.WHOLE]
        return packed, tuple(part for prompt in streamed for part in self.shipping.cut(prompt))

    # ------------------------------------------------------------ results

    def step_done(self, event: StepDone, now_s: float) -> None:
        self.shipping.step_done(event.step_id, now_s)
        self.tiers.step_done(event.step_id, now_s)
        prompts = {each.request.request_id: each for each in self.steps.pop(event.step_id) if not each.handoff.over}
        for request_id, scored in event.prompt:
            if request_id in prompts:
                prompts[request_id].told.scored.extend(scored)
        for request_id, share in event.pooled:
            if request_id in prompts:
                prompts[request_id].told.pool(share)
        done = [(prompts[request_id], first) for request_id, first in event.first if request_id in prompts]
        done = [(prompt, _worst([*prompt.told.scored, first])) for prompt, first in done]
        self.out.draw([_first_draw(prompt, first) for prompt, first in done if not first.broken])
        for prompt, first in done:
            self.out.reach(prompt.owner, Mark.FIRST_TOKEN, now_s)
            self._hand_over(prompt, first, now_s)

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
                self.decode_side.end(owner, Signal.RELEASE, good=not first.broken)
            return
        if here:
            prompt.handoff.take(Signal.COMMIT)
            self.decode_side.commit_here(owner, self.shipping.manifest(prompt, first), now_s)
            self.end(owner, Signal.ACK)
        else:
            self._commit(prompt, first, now_s)
            self._publish(prompt)

    def _commit(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        """Ships what has not left, and says what was shipped in all."""
        for part in self.shipping.cut(prompt):
            self.out.put(ShipKV(part))
        self.shipping.commit(prompt, first, now_s)

    def _publish(self, prompt: PrefillSequence) -> None:
        """All its KV is computed: others may read its full pages while it is still on its way."""
        self.waiting.computed(prompt)
        if prompt.names:
            before = prompt.held
            prompt.held, prompt.own = self.shared.publish(prompt.names, prompt.pages, prompt.own, prompt.owner)
            self.shared.release(before)

    # ------------------------------------------------------------ while the destination waits

    def acknowledged(self, message: Ack) -> None:
        """The destination has it all: the pages may go."""
        prompt = self.sequences.get(message.attempt)
        if self.end(message.attempt, Signal.ACK) and prompt is not None:
            self.shipping.acknowledged(prompt.parts, message.wire_s)

    def beat(self, owner: Attempt, now_s: float) -> None:
        """Renews the reservation's lease while this end lives, so that a lease may be short though a prompt is long."""
        prompt = self.sequences.get(owner)
        if prompt is not None:
            self.out.send(prompt.decode_worker, Renew(owner))
            self._beat_later(prompt, now_s)

    def _beat_later(self, prompt: PrefillSequence, now_s: float) -> None:
        if not is_here(prompt, self.config):
            self.out.set_timer(now_s + prompt.asked.lease_s / BEATS, timer_of(Timer.RENEW, prompt.owner))

    def resend(self, message: Resend, destination: WorkerId, now_s: float) -> None:
        """The destination lacks a part."""
        prompt = self.sequences.get(message.attempt)
        if prompt is None:
            self.out.send(destination, Abort(message.attempt, "no such prompt"))
        else:
            self.shipping.reship(prompt, message.part, now_s)

    def ship_failed(self, owner: Attempt, part: int, now_s: float) -> bool:
        """Ships the part again; False where it has failed too often, or nothing is known of it."""
        prompt = self.sequences.get(owner)
        if prompt is None or not self.shipping.may_reship(prompt, part):
            return False
        self.shipping.reship(prompt, part, now_s)
        return True

    def step_failed(self, step_id: int, reason: str) -> None:
        self.shipping.step_failed(step_id)
        self.tiers.step_failed(step_id)
        for prompt in self.steps.pop(step_id):
            if not prompt.handoff.over:
                self.end(prompt.owner, Signal.ABORT)
                self.decode_side.end(prompt.owner, Signal.ABORT)
                self.out.abort(prompt.owner, reason)

    # ------------------------------------------------------------ ends

    def end(self, owner: Attempt, signal: Signal) -> bool:
        """Gives back all that the prompt holds; False where there is none, or where the signal is not for its state."""
        prompt = self.sequences.get(owner)
        if prompt is None or not prompt.handoff.can_take(signal):
            return False
        prompt.handoff.take(signal)
        del self.sequences[owner]
        self.tiers.fetches.forget(owner)
        self.waiting.drop(prompt)
        self.shared.pool.give_back(prompt.own, owner)
        self.shared.release(prompt.held)
        prompt.pages, prompt.own, prompt.held = (), (), NOTHING
        return True

    def expire(self, owner: Attempt, now_s: float) -> bool:
        prompt = self.sequences.get(owner)
        if prompt is None or not prompt.handoff.can_take(Signal.EXPIRE):
            return False
        if now_s < prompt.handoff.deadline_s:
            self.out.arm(prompt.handoff)
            return False
        return self.end(owner, Signal.EXPIRE)


def _worst(drawn: list[Sampled]) -> Sampled:
    """The last, or the first that is broken: where a prompt's logits were no numbers, so is what follows from them."""
    return next((each for each in drawn if each.broken), drawn[-1])


def _first_draw(prompt: PrefillSequence, first: Sampled) -> TokenDelta:
    """What the client learns after prefill; prompt logprobs only before its very first token."""
    scored = tuple(prompt.told.scored) if prompt.num_output == 0 else ()
    return TokenDelta(prompt.owner, prompt.num_output, (first,), scored, prompt.told.pooled)
