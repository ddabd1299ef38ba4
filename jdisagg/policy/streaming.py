"""`--transfer=auto`: what shipping and computing cost, as measured, and from which prompt length on streaming pays.

A part costs `part_s` and each of its pages `page_s` on the wire; a prompt token costs `token_s` to compute. From these
the exposed time of each mode follows by walking through its parts: a part leaves when it is computed and the link is
free, and what lands after the last chunk is exposed. Streaming is worth its parts where it exposes less by more than
they cost beyond one. All of it is arithmetic on what was observed: the same observations give the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.worker_config import TransferMode, WorkerConfig
from jdisagg.policy.parts import pieces
from jdisagg.policy.step_times import StepTimes

DECAY = 0.9  # of what was measured before, with each transfer measured
APART = 0.02  # of 1, where parts and pages say nothing of each other: under it they cannot be told apart
MANY = 16
KEEP = 1.25  # a threshold moves only by more than this factor: it does not flutter


@dataclass(slots=True)
class Fit:
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


class Streaming:
    """What one prefill worker has learnt."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.wire = Fit(part_s=5e-4, page_s=1e-4)
        self.token_s = 1e-4
        self.stream_tokens = self._threshold()
        self._times = StepTimes()

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
