"""The prefill side of a worker: prompts in order, packed into chunks, their first token told, their KV shipped.

KV leaves in parts, the early ones with the plan that computes them: where a plan fails, its parts never left. A
prompt's pages are held from its first chunk until the destination acknowledges them all. In a colocated worker they
are the reservation's own, and shipping is a change of books.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from jdisagg.core.events import ShipKV, StepDone
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ack, Commit, Progress, Renew, Resend, StartPrefill, TokenDelta
from jdisagg.core.request import Attempt, Sampled, WorkerId
from jdisagg.core.reshard import group_pages
from jdisagg.core.steps import History, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import RAW, Role, TransferMode, WorkerConfig, bucket
from jdisagg.policy.compression import Wires
from jdisagg.policy.decode_sequence import end_of
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.handoff import End, Handoff, Signal, State, Timer, timer_of
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.parts import Piece, layers_of, pieces
from jdisagg.policy.planning import PromptView, history_of, order_of, pick_chunks, readable_pages
from jdisagg.policy.prefill_sequence import PrefillSequence
from jdisagg.policy.prefix_cache import PageHash
from jdisagg.policy.shared_pages import NOTHING, SharedPages
from jdisagg.policy.streaming import Streaming

Taken = list[tuple[PrefillSequence, PrefillChunk]]  # chunks of one step, and whose they are
BEATS = 3  # a lease is renewed: two words of it may be lost


class PrefillSide:
    """All prompts of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        shared: SharedPages,
        out: Outbox,
        decode_side: DecodeSide,
    ) -> None:
        self.config, self.shared, self.out = config, shared, out
        self.decode_side = decode_side
        self.sequences: dict[Attempt, PrefillSequence] = {}
        self.steps: dict[int, tuple[PrefillSequence, ...]] = {}  # in flight: whose chunks, in the step's order
        auto = config.role is Role.PREFILL and config.transfer is TransferMode.AUTO
        self.streaming = Streaming(config) if auto else None
        self.wires = Wires(config)
        self.waiting_tokens = 0
        self._waiting: list[PrefillSequence] = []  # with tokens not yet planned, in order
        self._computing: dict[PageHash, PrefillSequence] = {}  # pages that will be published, and by whom first

    def start(self, message: StartPrefill, now_s: float) -> None:
        owner = message.attempt
        here = message.decode_worker == self.config.worker
        if owner in self.sequences or (here and not self.decode_side.reservation_waits(owner)):
            return  # said twice, or its reservation is gone
        handoff = Handoff(owner, End.SOURCE, now_s + message.timeout_s)
        handoff.take(Signal.START)
        group = group_pages(self.config.page_size, message.decode_page_size or self.config.page_size)
        prompt = PrefillSequence(
            handoff=handoff,
            request=message.request,
            order=order_of(message.request),
            num_output=message.num_output,
            decode_worker=message.decode_worker,
            decode_pages=message.decode_pages,
            lease_s=message.lease_s,
            cached_pages=message.cached_pages,
            group=group,
            sent_pages=message.cached_pages // group.destination * group.source,
        )
        if not here:
            prompt.names = self.shared.names(prompt.request)
        self.sequences[owner] = prompt
        insort(self._waiting, prompt, key=lambda each: each.order)
        self.waiting_tokens += prompt.tokens_left
        self.out.arm(handoff)
        self._beat_later(prompt, now_s)

    def _here(self, prompt: PrefillSequence) -> bool:
        return prompt.decode_worker == self.config.worker

    # ------------------------------------------------------------ plans

    def next_chunks(self, now_s: float) -> Taken | None:
        """Takes the chunks of the next step; None where nothing waits, or nothing can start, or enough is in flight."""
        if not self._waiting or len(self.steps) >= self.config.chunks_in_flight:
            return None
        ready = [each for each in self._waiting if not self._another_computes(each)]
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
        if self._here(prompt):
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
            if not self._started(prompt) and not self._here(prompt):
                prompt.held = self.shared.lock(self._to_read(prompt))

    def _take_chunk(self, prompt: PrefillSequence, tokens: int, now_s: float) -> PrefillChunk:
        if prompt.planned == 0:
            self._begin(prompt, now_s)
        request, start, end = prompt.request, prompt.planned, prompt.planned + tokens
        pages = self.decode_side.pages_of(prompt.owner) if self._here(prompt) else prompt.pages
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

    def _begin(self, prompt: PrefillSequence, now_s: float) -> None:
        cached = self._held_tokens(prompt.cached_pages) if self._here(prompt) else self._take_pages(prompt)
        prompt.planned = cached
        self.waiting_tokens -= cached
        prompt.mode = self._mode(prompt)
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

    def dispatch(self, step_id: int, taken: Taken, now_s: float) -> tuple[PrefillChunks, tuple[KVTransfer, ...]]:
        """Books the step; returns its chunks packed, and the parts that leave with it."""
        prompts, chunks = tuple(prompt for prompt, _ in taken), tuple(chunk for _, chunk in taken)
        packed = PrefillChunks(
            chunks=chunks,
            bucket_tokens=bucket(sum(len(chunk.tokens) for chunk in chunks), self.config.prefill_buckets),
            table_pages=bucket(max(len(chunk.pages) for chunk in chunks), self.config.table_buckets),
        )
        self.steps[step_id] = prompts
        if self.streaming is not None:
            self.streaming.dispatched(step_id, packed.num_tokens, now_s)
        ships = [part for prompt in prompts if prompt.mode is not TransferMode.WHOLE for part in self._cut(prompt)]
        return packed, tuple(ships)

    # ------------------------------------------------------------ parts

    def _mode(self, prompt: PrefillSequence) -> TransferMode:
        """How this prompt's KV leaves; one that ends with its first token ships nothing before that is known."""
        if self._here(prompt) or prompt.request.sampling.max_tokens == 1:
            return TransferMode.WHOLE
        if self.streaming is None:
            return self.config.transfer
        return self.streaming.mode(len(prompt.request.prompt))

    def _cut(self, prompt: PrefillSequence) -> list[KVTransfer]:
        """The parts that may leave now that `planned` tokens are dispatched; they are booked as on their way."""
        total = len(prompt.request.prompt)
        cut = pieces(prompt.mode, self.config, prompt.sent_pages, prompt.planned, total, prompt.group.source)
        if not cut:
            return []
        prompt.handoff.take(Signal.SHIP)
        first_own = max(prompt.sent_pages, len(prompt.held.pages))
        self.shared.pool.move(prompt.pages[first_own : cut[-1].stop], prompt.owner, PageState.IN_FLIGHT)
        prompt.sent_pages = cut[-1].stop
        parts = [self._part(prompt, piece, len(prompt.parts) + index) for index, piece in enumerate(cut)]
        prompt.parts += parts
        return parts

    def _part(self, prompt: PrefillSequence, piece: Piece, index: int) -> KVTransfer:
        return KVTransfer(
            attempt=prompt.owner,
            source=self.config.worker,
            destination=prompt.decode_worker,
            source_pages=prompt.pages[piece.start : piece.stop],
            destination_pages=prompt.pages_there(piece, self.config.page_size),
            num_tokens=piece.num_tokens(len(prompt.request.prompt), self.config.page_size),
            part=index,
            layers=piece.layers,
            wire=self.wires.choose(),
        )

    # ------------------------------------------------------------ results

    def step_done(self, event: StepDone, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.done(event.step_id, now_s)
        prompts = {each.request.request_id: each for each in self.steps.pop(event.step_id) if not each.handoff.over}
        for request_id, scored in event.prompt:
            if request_id in prompts:
                prompts[request_id].scored.extend(scored)
        done = [(prompts[request_id], first) for request_id, first in event.first if request_id in prompts]
        done = [(prompt, _worst([*prompt.scored, first])) for prompt, first in done]
        self.out.draw([_first_draw(prompt, first) for prompt, first in done if not first.broken])
        for prompt, first in done:
            self.out.reach(prompt.owner, Mark.FIRST_TOKEN, now_s)
            self._hand_over(prompt, first, now_s)

    def _hand_over(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        owner, here = prompt.owner, self._here(prompt)
        reason = end_of(prompt.request, first, 1)
        if reason is not None:
            if not first.broken:
                self._publish(prompt)
            num_output = prompt.num_output + (not first.broken)
            self.out.end(owner, reason, num_output, now_s)
            self.end(owner, Signal.RELEASE)
            if here:
                self.decode_side.end(owner, Signal.RELEASE, good=not first.broken)
            return
        if here:
            prompt.handoff.take(Signal.COMMIT)
            self.decode_side.commit_here(owner, first, now_s)
            self.end(owner, Signal.ACK)
        else:
            self._commit(prompt, first, now_s)

    def _commit(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        """Ships what has not left, and says what was shipped in all."""
        for part in self._cut(prompt):
            self.out.put(ShipKV(part))
        self._publish(prompt)
        prompt.handoff.take(Signal.COMMIT)
        num_tokens, num_parts = len(prompt.request.prompt), len(prompt.parts)
        layers = layers_of(prompt.mode, self.config)
        manifest = Commit(prompt.owner, first, num_tokens, num_parts, self.config.kv_layout, layers)
        self.out.send(prompt.decode_worker, manifest)
        prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s
        self.out.arm(prompt.handoff)

    def _publish(self, prompt: PrefillSequence) -> None:
        """All its KV is computed: others may read its full pages while it is still on its way."""
        self._compute_no_more(prompt)
        if prompt.names:
            before = prompt.held
            prompt.held, prompt.own = self.shared.publish(prompt.names, prompt.pages, prompt.own, prompt.owner)
            self.shared.release(before)

    def _compute_no_more(self, prompt: PrefillSequence) -> None:
        for name in prompt.names:
            if self._computing.get(name) is prompt:
                del self._computing[name]

    # ------------------------------------------------------------ while the destination waits

    def acknowledged(self, message: Ack) -> None:
        """The destination has it all: the pages may go."""
        owner = message.attempt
        prompt = self.sequences.get(owner)
        parts = [] if prompt is None else prompt.parts
        if not self.end(owner, Signal.ACK) or any(part.resends for part in parts):
            return
        self.wires.shipped(parts, message.wire_s)
        if self.streaming is not None:
            pages = {page for part in parts for page in part.source_pages}
            self.streaming.shipped(len(parts), len(pages), message.wire_s)

    def beat(self, owner: Attempt, now_s: float) -> None:
        """Renews the reservation's lease while this end lives, so that a lease may be short though a prompt is long."""
        prompt = self.sequences.get(owner)
        if prompt is not None:
            self.out.send(prompt.decode_worker, Renew(owner))
            self._beat_later(prompt, now_s)

    def _beat_later(self, prompt: PrefillSequence, now_s: float) -> None:
        if not self._here(prompt):
            self.out.set_timer(now_s + prompt.lease_s / BEATS, timer_of(Timer.RENEW, prompt.owner))

    def resend(self, message: Resend, destination: WorkerId, now_s: float) -> None:
        """Ships a part again: its pages are held until all of them are acknowledged. What lost too much comes raw."""
        prompt = self.sequences.get(message.attempt)
        if prompt is None:
            self.out.send(destination, Abort(message.attempt, "no such prompt"))
        else:
            self._reship(prompt, message.part, now_s)

    def ship_failed(self, owner: Attempt, part: int, now_s: float) -> bool:
        """Ships the part again; False where it has failed too often, or nothing is known of it."""
        prompt = self.sequences.get(owner)
        if prompt is None or part >= len(prompt.parts) or prompt.parts[part].resends >= self.config.part_tries:
            return False
        self._reship(prompt, part, now_s)
        return True

    def _reship(self, prompt: PrefillSequence, part: int, now_s: float) -> None:
        if part >= len(prompt.parts):
            return  # it never left
        again = replace(prompt.parts[part], resends=prompt.parts[part].resends + 1, wire=RAW)
        prompt.parts[part] = again
        self.out.put(ShipKV(again))
        if prompt.handoff.state is State.SHIPPED:
            prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s

    def step_failed(self, step_id: int, reason: str) -> None:
        if self.streaming is not None:
            self.streaming.failed(step_id)
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
        if prompt.tokens_left:
            self._waiting.remove(prompt)
            self.waiting_tokens -= prompt.tokens_left
        self._compute_no_more(prompt)
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
    scored = tuple(prompt.scored) if prompt.num_output == 0 else ()
    return TokenDelta(prompt.owner, prompt.num_output, (first,), scored)
