"""How a prompt's KV leaves its prefill worker: cut into parts, whole or streamed, raw or quantised.

A page may leave when no later chunk writes to it. Pages that the destination has cached never leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jdisagg.core.events import WireCost
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.layout.reshard import pages_elsewhere
from jdisagg.core.request import Request
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Compress, Role, TransferMode, WorkerConfig
from jdisagg.policy.worker.sequence import PrefillSequence
from jdisagg.policy.worker.slots import StepTimer


class KVChunk(NamedTuple):
    """Pages `start` to `stop` of a sequence (indices into its page list, not ids), of some layers."""

    start: int
    stop: int
    layers: tuple[int, int] | None  # None: all

    def num_tokens(self, total: int, page_size: int) -> int:
        """Returns the number of tokens that these pages hold of a sequence of `total` tokens."""
        return min(self.stop * page_size, total) - self.start * page_size


def cut_chunks(
    mode: TransferMode, config: WorkerConfig, sent_pages: int, computed: int, total: int, group_pages: int = 1
) -> tuple[KVChunk, ...]:
    """Returns the chunks that leave once `computed` of `total` prompt tokens are computed and `sent_pages` are sent.

    `mode` is WHOLE, CHUNK or LAYER; with LAYER the chunks are in the order in which their layers are computed. Pages
    leave `group_pages` at a time, except the last ones, so that they fill whole pages of the destination.
    """
    last = computed == total
    stop = config.pages_for(total) if last else computed // config.page_size // group_pages * group_pages
    if stop <= sent_pages or (mode is TransferMode.WHOLE and not last):
        return ()
    return tuple(KVChunk(sent_pages, stop, layers) for layers in layers_of(mode, config) or (None,))


def layers_of(mode: TransferMode, config: WorkerConfig) -> tuple[tuple[int, int], ...]:
    """Returns the layers of the parts that leave after one prompt chunk, in order; () if one part holds all layers."""
    return config.layer_groups if mode is TransferMode.LAYER and len(config.layer_groups) > 1 else ()


# Streaming (`--transfer=auto`). A part costs `part_s` and each of its pages `page_s` on the wire; a prompt token costs
# `token_s` to compute. From these follows the exposed time of each mode, part by part: a part leaves when it is
# computed and the link is free, and the time from the last chunk to the last arrival is exposed. Streaming pays if it
# saves more exposed time than its additional parts cost. The same measurements always give the same choices.

DECAY = 0.9  # weight of earlier measurements with each new one
APART = 0.02  # of 1 for uncorrelated parts and pages: below it their costs cannot be separated
MANY = 16  # chunks of the longest prompt that the threshold is computed for
KEEP = 1.25  # hysteresis: the threshold moves only by more than this factor


@dataclass(slots=True)
class TransferFit:
    """seconds = part_s * parts + page_s * pages, by decayed least squares; the prior counts as three transfers."""

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
        else:  # all of one shape: only the sum is known, so both costs are scaled alike
            scale = seconds / max(1e-12, self.part_s * parts + self.page_s * pages)
            step = 1 + (1 - DECAY) * (scale - 1)
            self.part_s, self.page_s = self.part_s * step, self.page_s * step

    def _add(self, parts: float, pages: float, s: float) -> None:
        now = (parts * parts, parts * pages, pages * pages, parts * s, pages * s)
        self._sums = [old + new for old, new in zip(self._sums, now, strict=True)]


class StreamingPolicy:
    """The choice between whole and streamed KV of one prefill worker, and the measured costs behind it."""

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
        """Learns that a step with `tokens` prompt tokens took `seconds`."""
        if tokens > 0 and seconds > 0:
            self.token_s = DECAY * self.token_s + (1 - DECAY) * seconds / tokens

    def shipped(self, parts: int, pages: int, seconds: float) -> None:
        """Learns that `parts` were on the wire for `seconds`; `pages`: in all, a page in several parts counts once."""
        if parts > 0 and seconds > 0:
            self.wire.learn(parts, pages, seconds)
            self._settle()

    def _settle(self) -> None:
        found, now = self._threshold(), self.stream_tokens
        if not now / KEEP <= found <= now * KEEP:
            self.stream_tokens = found

    # ------------------------------------------------------------ what follows

    def describe(self) -> str:
        """Returns the measured costs as text for operators."""
        return (
            f"a part {1e3 * self.wire.part_s:.3g} ms, a page {1e3 * self.wire.page_s:.3g} ms,"
            f" a prompt token {1e3 * self.token_s:.3g} ms: prompts of {self.stream_tokens} tokens or more are streamed"
        )

    def mode(self, prompt_tokens: int) -> TransferMode:
        """Returns how the KV of a prompt of this length leaves."""
        if prompt_tokens < self.stream_tokens:
            return TransferMode.WHOLE
        return min((TransferMode.CHUNK, TransferMode.LAYER), key=lambda mode: self._cost(mode, prompt_tokens))

    def _threshold(self) -> int:
        """Returns the shortest of a few prompt lengths from which on streaming always pays."""
        found, lengths = self.config.max_model_len + 1, _lengths(self.config)
        for tokens in reversed(lengths):
            whole = self._cost(TransferMode.WHOLE, tokens)
            if whole <= min(self._cost(mode, tokens) for mode in (TransferMode.CHUNK, TransferMode.LAYER)):
                return found
            found = tokens
        return found

    def _cost(self, mode: TransferMode, tokens: int) -> float:
        """Returns the exposed seconds, and those that the parts beyond the first cost the worker."""
        exposed_s, parts = self.exposed_s(mode, tokens)
        return exposed_s + self.wire.part_s * max(0, parts - 1)

    def exposed_s(self, mode: TransferMode, tokens: int) -> tuple[float, int]:
        """Returns the seconds from the last token's computation to the last part's arrival, and the number of parts."""
        chunk, groups = self.config.prefill_buckets[-1], max(1, len(self.config.layer_groups))
        sent = parts = 0
        free_s = 0.0
        for start in range(0, tokens, chunk):
            stop = min(tokens, start + chunk)
            cut = cut_chunks(mode, self.config, sent, stop, tokens)
            for index, part in enumerate(cut):
                done = stop if len(cut) == 1 else start + (stop - start) * (index + 1) / groups
                pages = (part.stop - part.start) / len(cut)
                free_s = max(free_s, done * self.token_s) + self.wire.part_s + self.wire.page_s * pages
            parts += len(cut)
            sent = cut[-1].stop if cut else sent
        return free_s - tokens * self.token_s, parts


def _lengths(config: WorkerConfig) -> list[int]:
    """Returns prompt lengths from one page to `MANY` chunks, each half as long again; beyond, nothing changes."""
    longest, lengths = min(config.max_model_len, MANY * config.prefill_buckets[-1]), [config.page_size]
    while lengths[-1] < longest:
        lengths.append(min(longest, lengths[-1] + max(1, lengths[-1] // 2)))
    return lengths


# Compression (`--transfer_compress`). Quantising pays if the link needs longer for the saved bytes than the devices
# need to quantise. The time to pack a page is measured once, before the first request; the link's speed is learnt from
# every handoff. A quantised part that arrives corrupt, or lost more than the bound in a layer, is sent again raw.

GAIN = 1.1  # another codec must be faster than raw by this factor


def choose_wire(costs: Sequence[WireCost], link_page_s: float) -> str:
    """Returns the codec whose pages arrive soonest. costs: raw among them; link_page_s: link seconds per raw page."""
    raw = next(cost for cost in costs if cost.wire == RAW)
    seconds = {cost.wire: cost.pack_s + link_page_s * cost.page_bytes / raw.page_bytes for cost in costs}
    best = min(seconds, key=lambda wire: seconds[wire])
    return best if seconds[best] * GAIN < seconds[RAW] else RAW


class CodecPolicy:
    """The choice of the KV codec of one prefill worker, and the measured speed of its links."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.link = TransferFit(part_s=5e-4, page_s=1e-4)  # a page here is a raw page's bytes
        self.costs: tuple[WireCost, ...] = ()

    def measured(self, costs: tuple[WireCost, ...]) -> None:
        self.costs = costs

    def shipped(self, parts: Iterable[KVTransfer], seconds: float) -> None:
        """Learns that these parts, sent once each, were on the wire for `seconds` in all."""
        sizes = [self._raw_pages(part) for part in parts]
        if sizes and seconds > 0:
            self.link.learn(len(sizes), sum(sizes), seconds)

    def choose(self) -> str:
        """Returns the codec of the next part."""
        if self.config.compress is not Compress.AUTO:
            return RAW if self.config.compress is Compress.NONE else self.config.compress.value
        return choose_wire(self.costs, self.link.page_s) if self.costs else RAW

    def _raw_pages(self, part: KVTransfer) -> float:
        """Returns the number of raw pages of all layers that have as many bytes."""
        sizes = {cost.wire: cost.page_bytes for cost in self.costs}
        share = sizes[part.wire] / sizes[RAW] if part.wire in sizes else 1.0
        if part.layers is not None:
            share *= (part.layers[1] - part.layers[0]) / self.config.layer_groups[-1][1]
        return share * len(part.source_pages)

    def describe(self) -> str:
        """Returns the measured costs as text for operators."""
        costs = ", ".join(f"{cost.wire} {1e3 * cost.pack_s:.3g} ms" for cost in self.costs)
        return f"a raw page {1e3 * self.link.page_s:.3g} ms on the link; packing a page: {costs or 'not measured'}"


class KVSender:
    """How one prefill worker sends KV: whole or streamed, in which codec, and what sending was measured to cost."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        auto = config.role is Role.PREFILL and config.transfer is TransferMode.AUTO
        self.streaming = StreamingPolicy(config) if auto else None
        self.codecs = CodecPolicy(config)

    def mode(self, request: Request) -> TransferMode:
        """Returns how the KV of a prompt leaves; a request of one output token sends nothing before that is known."""
        if request.sampling.max_tokens == 1:
            return TransferMode.WHOLE
        return self.config.transfer if self.streaming is None else self.streaming.mode(len(request.prompt))

    def part(self, prompt: PrefillSequence, chunk: KVChunk, index: int) -> KVTransfer:
        """Returns the transfer of the prompt's `index`th part."""
        return KVTransfer(
            attempt=prompt.owner,
            source=self.config.worker,
            destination=prompt.decode_worker,
            source_pages=prompt.pages[chunk.start : chunk.stop],
            destination_pages=destination_pages(prompt, chunk, self.config.page_size),
            num_tokens=chunk.num_tokens(len(prompt.request.prompt), self.config.page_size),
            part=index,
            layers=chunk.layers,
            wire=self.codecs.choose(),
        )

    def on_ack(self, parts: list[KVTransfer], wire_s: float) -> None:
        """Learns from the parts of a prompt, which were on the wire for `wire_s`, unless one was sent twice."""
        if any(part.resends for part in parts):
            return
        self.codecs.shipped(parts, wire_s)
        if self.streaming is not None:
            pages = {page for part in parts for page in part.source_pages}
            self.streaming.shipped(len(parts), len(pages), wire_s)

    def step_dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.dispatched(step_id, tokens, now_s)

    def step_done(self, step_id: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.done(step_id, now_s)

    def step_failed(self, step_id: int) -> None:
        if self.streaming is not None:
            self.streaming.failed(step_id)


def destination_pages(prompt: PrefillSequence, chunk: KVChunk, page_size: int) -> tuple[int, ...]:
    """Returns the decode pages that hold the tokens of the chunk; the null page for each that is cached there."""
    start, stop = pages_elsewhere(chunk.start, chunk.stop, len(prompt.request.prompt), page_size, prompt.group)
    pages = prompt.asked.decode_pages[start:stop]
    return tuple(NULL_PAGE if start + at < prompt.cached_pages else page for at, page in enumerate(pages))
