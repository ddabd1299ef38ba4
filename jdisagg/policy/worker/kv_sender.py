"""How a prompt's KV leaves its prefill worker: in which parts, as which wire, and again where one was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jdisagg.core.events import ShipKV, WireCost
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.layout.reshard import pages_elsewhere
from jdisagg.core.messages import Commit
from jdisagg.core.request import Sampled
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Compress, Role, TransferMode, WorkerConfig
from jdisagg.policy.cache.page_pool import PageState, SharedPages
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.worker.handoff import Signal, State
from jdisagg.policy.worker.sequence import PrefillSequence, is_here
from jdisagg.policy.worker.slots import StepTimer

# How a prompt's KV is cut into parts: which pages and layers may leave after a chunk. Pure arithmetic.
#
# A page may leave when no later chunk writes to it. Pages that the destination holds already never leave.


class KVChunk(NamedTuple):
    """Pages `start` to `stop` of a sequence (places in its page list, not ids), of some layers."""

    start: int
    stop: int
    layers: tuple[int, int] | None  # None: all

    def num_tokens(self, total: int, page_size: int) -> int:
        """Whose KV these pages hold, of a sequence of `total` tokens."""
        return min(self.stop * page_size, total) - self.start * page_size


def pieces(
    mode: TransferMode, config: WorkerConfig, sent_pages: int, computed: int, total: int, group_pages: int = 1
) -> tuple[KVChunk, ...]:
    """What leaves once `computed` of `total` prompt tokens are computed and `sent_pages` leading pages are away.

    `mode` is WHOLE, CHUNK or LAYER; pieces of one chunk are in the order in which their layers are computed. Pages
    leave `group_pages` at a time, but for the sequence's last, so that they fill whole pages of the destination.
    """
    last = computed == total
    stop = config.pages_for(total) if last else computed // config.page_size // group_pages * group_pages
    if stop <= sent_pages or (mode is TransferMode.WHOLE and not last):
        return ()
    return tuple(KVChunk(sent_pages, stop, layers) for layers in layers_of(mode, config) or (None,))


def layers_of(mode: TransferMode, config: WorkerConfig) -> tuple[tuple[int, int], ...]:
    """Of the pieces of one chunk, in their order; (): one piece holds all."""
    return config.layer_groups if mode is TransferMode.LAYER and len(config.layer_groups) > 1 else ()


# `--transfer=auto`: what shipping and computing cost, as measured, and from which prompt length on streaming
# pays.
#
# A part costs `part_s` and each of its pages `page_s` on the wire; a prompt token costs `token_s` to compute.
# From these the exposed time of each mode follows by walking through its parts: a part leaves when it is computed
# and the link is free, and what lands after the last chunk is exposed. Streaming is worth its parts where it
# exposes less by more than they cost beyond one. All of it is arithmetic on what was observed: the same
# observations give the same choices.

DECAY = 0.9  # of what was measured before, with each transfer measured
APART = 0.02  # of 1, where parts and pages say nothing of each other: under it they cannot be told apart
MANY = 16
KEEP = 1.25  # a threshold moves only by more than this factor: it does not flutter


@dataclass(slots=True)
class TransferFit:
    """seconds = part_s * parts + page_s * pages, decayed least squares; what was assumed counts as three transfers."""

    part_s: float
    page_s: float
    _sums: list[float] = field(default_factory=list[float])  # parts², parts·pages, pages², parts·s, pages·s

    def __post_init__(self) -> None:
        self._sums = [0.0] * 5
        for parts, pages in ((1, 1), (1, 16), (4, 16)):
            self._add(parts, pages, self.part_s * parts + self.page_s * pages)

    def learn(self, parts: float, pages: float, seconds: float) -> None:
        self._sums = [each * DECAY for each in self._sums]
        self._add(parts, pages, seconds)
        pp, pg, gg, ps, gs = self._sums
        apart = pp * gg - pg * pg
        if apart > APART * pp * gg:
            self.part_s, self.page_s = (ps * gg - gs * pg) / apart, (gs * pp - ps * pg) / apart
            if self.part_s < 0:
                self.part_s, self.page_s = 0.0, gs / gg
            elif self.page_s < 0:
                self.part_s, self.page_s = ps / pp, 0.0
        else:  # all of one shape: what they cost is known, and how it divides is left as it was
            scale = seconds / max(1e-12, self.part_s * parts + self.page_s * pages)
            step = 1 + (1 - DECAY) * (scale - 1)
            self.part_s, self.page_s = self.part_s * step, self.page_s * step

    def _add(self, parts: float, pages: float, s: float) -> None:
        now = (parts * parts, parts * pages, pages * pages, parts * s, pages * s)
        self._sums = [old + new for old, new in zip(self._sums, now, strict=True)]


class StreamingPolicy:
    """What one prefill worker has learnt."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.wire = TransferFit(part_s=5e-4, page_s=1e-4)
        self.token_s = 1e-4
        self.stream_tokens = self._threshold()
        self._times = StepTimer()

    # ------------------------------------------------------------ what is measured

    def dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        self._times.dispatched(step_id, tokens, now_s)

    def done(self, step_id: int, now_s: float) -> None:
        self.computed(*self._times.done(step_id, now_s))

    def failed(self, step_id: int) -> None:
        self._times.failed(step_id)

    def computed(self, tokens: int, seconds: float) -> None:
        """A plan of `tokens` took its machine `seconds`."""
        if tokens > 0 and seconds > 0:
            self.token_s = DECAY * self.token_s + (1 - DECAY) * seconds / tokens

    def shipped(self, parts: int, pages: int, seconds: float) -> None:
        """`parts` with `pages` in all (a page by layer groups counts once) were on the wire for `seconds`."""
        if parts > 0 and seconds > 0:
            self.wire.learn(parts, pages, seconds)
            self._settle()

    def _settle(self) -> None:
        found, now = self._threshold(), self.stream_tokens
        if not now / KEEP <= found <= now * KEEP:
            self.stream_tokens = found

    # ------------------------------------------------------------ what follows

    def describe(self) -> str:
        """What was learnt, for people."""
        return (
            f"a part {1e3 * self.wire.part_s:.3g} ms, a page {1e3 * self.wire.page_s:.3g} ms,"
            f" a prompt token {1e3 * self.token_s:.3g} ms: prompts of {self.stream_tokens} tokens or more are streamed"
        )

    def mode(self, prompt_tokens: int) -> TransferMode:
        """How the KV of such a prompt leaves."""
        if prompt_tokens < self.stream_tokens:
            return TransferMode.WHOLE
        return min((TransferMode.CHUNK, TransferMode.LAYER), key=lambda mode: self._cost(mode, prompt_tokens))

    def _threshold(self) -> int:
        """The fewest tokens, of a few lengths from a page up, from which on streaming always pays."""
        found, lengths = self.config.max_model_len + 1, _lengths(self.config)
        for tokens in reversed(lengths):
            whole = self._cost(TransferMode.WHOLE, tokens)
            if whole <= min(self._cost(mode, tokens) for mode in (TransferMode.CHUNK, TransferMode.LAYER)):
                return found
            found = tokens
        return found

    def _cost(self, mode: TransferMode, tokens: int) -> float:
        """Seconds exposed, and those that its parts beyond the first cost the worker."""
        exposed_s, parts = self.exposed_s(mode, tokens)
        return exposed_s + self.wire.part_s * max(0, parts - 1)

    def exposed_s(self, mode: TransferMode, tokens: int) -> tuple[float, int]:
        """Seconds from the last token's computation to the last part's landing, and the number of parts."""
        chunk, groups = self.config.prefill_buckets[-1], max(1, len(self.config.layer_groups))
        sent = parts = 0
        free_s = 0.0
        for start in range(0, tokens, chunk):
            stop = min(tokens, start + chunk)
            cut = pieces(mode, self.config, sent, stop, tokens)
            for index, piece in enumerate(cut):
                done = stop if len(cut) == 1 else start + (stop - start) * (index + 1) / groups
                pages = (piece.stop - piece.start) / len(cut)
                free_s = max(free_s, done * self.token_s) + self.wire.part_s + self.wire.page_s * pages
            parts += len(cut)
            sent = cut[-1].stop if cut else sent
        return free_s - tokens * self.token_s, parts


def _lengths(config: WorkerConfig) -> list[int]:
    """A page, and half as much again, and so on; what pays at `MANY` chunks pays beyond."""
    longest, lengths = min(config.max_model_len, MANY * config.prefill_buckets[-1]), [config.page_size]
    while lengths[-1] < longest:
        lengths.append(min(longest, lengths[-1] + max(1, lengths[-1] // 2)))
    return lengths


# `--transfer_compress`: what a part's numbers travel as.
#
# Quantising pays where the link needs longer for the bytes that it saves than the devices need to quantise. What
# packing a page costs each way is measured once, before the first request; what the link takes is learnt from
# every handoff. What cannot be taken as compressed (broken on the way, or a layer that lost more than the bound)
# is shipped again raw.

GAIN = 1.1  # a wire is left for another only where that is faster by this factor


def choose_wire(costs: Sequence[WireCost], link_page_s: float) -> str:
    """The wire whose pages arrive soonest. costs: raw among them; link_page_s: seconds the link takes a raw page."""
    raw = next(cost for cost in costs if cost.wire == RAW)
    seconds = {cost.wire: cost.pack_s + link_page_s * cost.page_bytes / raw.page_bytes for cost in costs}
    best = min(seconds, key=lambda wire: seconds[wire])
    return best if seconds[best] * GAIN < seconds[RAW] else RAW


class CodecPolicy:
    """What one prefill worker ships in, and what it has learnt of its links."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.link = TransferFit(part_s=5e-4, page_s=1e-4)  # a page here is a raw page's bytes
        self.costs: tuple[WireCost, ...] = ()

    def measured(self, costs: tuple[WireCost, ...]) -> None:
        self.costs = costs

    def shipped(self, parts: Iterable[KVTransfer], seconds: float) -> None:
        """These parts, shipped once each, were on the wire for `seconds` in all."""
        sizes = [self._raw_pages(part) for part in parts]
        if sizes and seconds > 0:
            self.link.learn(len(sizes), sum(sizes), seconds)

    def choose(self) -> str:
        """What the next part is to travel as."""
        if self.config.compress is not Compress.AUTO:
            return RAW if self.config.compress is Compress.NONE else self.config.compress.value
        return choose_wire(self.costs, self.link.page_s) if self.costs else RAW

    def _raw_pages(self, part: KVTransfer) -> float:
        """How many raw pages of all layers would have as many bytes."""
        sizes = {cost.wire: cost.page_bytes for cost in self.costs}
        share = sizes[part.wire] / sizes[RAW] if part.wire in sizes else 1.0
        if part.layers is not None:
            share *= (part.layers[1] - part.layers[0]) / self.config.layer_groups[-1][1]
        return share * len(part.source_pages)

    def describe(self) -> str:
        """What was learnt, for people."""
        costs = ", ".join(f"{cost.wire} {1e3 * cost.pack_s:.3g} ms" for cost in self.costs)
        return f"a raw page {1e3 * self.link.page_s:.3g} ms on the link; packing a page: {costs or 'not measured'}"


class KVSender:
    """The parts of all prompts of one worker, and what shipping them is found to cost."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: EffectBuffer) -> None:
        self.config, self.shared, self.out = config, shared, out
        auto = config.role is Role.PREFILL and config.transfer is TransferMode.AUTO
        self.streaming = StreamingPolicy(config) if auto else None
        self.wires = CodecPolicy(config)

    def mode(self, prompt: PrefillSequence) -> TransferMode:
        """How this prompt's KV leaves; one that ends with its first token ships nothing before that is known."""
        if is_here(prompt, self.config) or prompt.request.sampling.max_tokens == 1:
            return TransferMode.WHOLE
        if self.streaming is None:
            return self.config.transfer
        return self.streaming.mode(len(prompt.request.prompt))

    def cut(self, prompt: PrefillSequence) -> list[KVTransfer]:
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

    def _part(self, prompt: PrefillSequence, piece: KVChunk, index: int) -> KVTransfer:
        return KVTransfer(
            attempt=prompt.owner,
            source=self.config.worker,
            destination=prompt.decode_worker,
            source_pages=prompt.pages[piece.start : piece.stop],
            destination_pages=pages_there(prompt, piece, self.config.page_size),
            num_tokens=piece.num_tokens(len(prompt.request.prompt), self.config.page_size),
            part=index,
            layers=piece.layers,
            wire=self.wires.choose(),
        )

    def manifest(self, prompt: PrefillSequence, first: Sampled) -> Commit:
        """What was shipped in all, and what else the destination needs."""
        return Commit(
            attempt=prompt.owner,
            first=first,
            num_tokens=prompt.request.prompt_tokens,
            num_parts=len(prompt.parts),
            layout=self.config.kv_layout,
            layers=layers_of(prompt.mode, self.config),
            tail=prompt.tail,
        )

    def commit(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        """Says what was shipped; then the destination is waited for."""
        prompt.handoff.take(Signal.COMMIT)
        self.out.send(prompt.decode_worker, self.manifest(prompt, first))
        prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s
        self.out.arm(prompt.handoff)

    def acknowledged(self, parts: list[KVTransfer], wire_s: float) -> None:
        """All parts of a prompt are in their pages; what they took counts where none was shipped twice."""
        if any(part.resends for part in parts):
            return
        self.wires.shipped(parts, wire_s)
        if self.streaming is not None:
            pages = {page for part in parts for page in part.source_pages}
            self.streaming.shipped(len(parts), len(pages), wire_s)

    def may_reship(self, prompt: PrefillSequence, part: int) -> bool:
        """Whether the part left, and has not failed too often."""
        return part < len(prompt.parts) and prompt.parts[part].resends < self.config.part_tries

    def reship(self, prompt: PrefillSequence, part: int, now_s: float) -> None:
        """Ships a part again: its pages are held until all of them are acknowledged. What lost too much comes raw."""
        if part >= len(prompt.parts):
            return  # it never left
        again = replace(prompt.parts[part], resends=prompt.parts[part].resends + 1, wire=RAW)
        prompt.parts[part] = again
        self.out.put(ShipKV(again))
        if prompt.handoff.state is State.SHIPPED:
            prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s

    # ------------------------------------------------------------ steps, as `auto` times them

    def step_dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.dispatched(step_id, tokens, now_s)

    def step_done(self, step_id: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.done(step_id, now_s)

    def step_failed(self, step_id: int) -> None:
        if self.streaming is not None:
            self.streaming.failed(step_id)


def pages_there(prompt: PrefillSequence, chunk: KVChunk, page_size: int) -> tuple[int, ...]:
    """Returns the decode pages that hold the tokens of the chunk; the null page for each that is cached there."""
    start, stop = pages_elsewhere(chunk.start, chunk.stop, len(prompt.request.prompt), page_size, prompt.group)
    pages = prompt.asked.decode_pages[start:stop]
    return tuple(NULL_PAGE if start + at < prompt.cached_pages else page for at, page in enumerate(pages))
