"""How fast workers were of late, as the ledgers of requests that ended tell: what predictions are made of.

A figure that nobody has renewed for a while is as good as none, so that a worker that was slow once is tried again;
where a worker has none, it is taken to be like the others that have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.request import WorkerId

DECAY = 0.8  # of what was known, with each request that ends
FORGET_S = 60.0


@dataclass(slots=True)
class Figures:
    """One figure by name, each with the time of its latest value."""

    _known: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def learn(self, name: str, value: float, now_s: float) -> None:
        before = self.of(name, now_s)
        known = value if before is None else DECAY * before + (1 - DECAY) * value
        self._known[name] = (known, now_s)

    def of(self, name: str, now_s: float) -> float | None:
        value, at_s = self._known.get(name, (0.0, -FORGET_S))
        return value if now_s - at_s < FORGET_S else None

    def usual(self, now_s: float) -> float | None:
        """The mean of those that are known."""
        values = [value for value, at_s in self._known.values() if now_s - at_s < FORGET_S]
        return sum(values) / len(values) if values else None

    def guess(self, name: str, now_s: float) -> float | None:
        own = self.of(name, now_s)
        return self.usual(now_s) if own is None else own

    def forget(self, worker: WorkerId) -> None:
        """Its own, and those of its pairs."""
        self._known = {name: known for name, known in self._known.items() if worker not in name.split()}


Counts = tuple[int, int, int]  # tokens of a prompt, run for it, and drawn


@dataclass(slots=True)
class Pace:
    """Seconds a token, by worker; of prompts a token run, padding too; of transfers exposed, by pair."""

    prompt: Figures = field(default_factory=Figures)
    output: Figures = field(default_factory=Figures)
    transfer: Figures = field(default_factory=Figures)
    lengths: Figures = field(default_factory=Figures)  # output tokens of requests

    def learn(self, ledger: Ledger, prefill: WorkerId, decode: WorkerId, tokens: Counts, now_s: float) -> float | None:
        """Of a request that ended by itself, in one attempt; its mean gap, None where it tells nothing of one."""
        if any(mark is Mark.REQUEUED for mark, _ in ledger.marks):
            return None
        prompt_tokens, tokens_run, output_tokens = tokens
        parts_s = {name: nanoseconds / 1e9 for name, nanoseconds in ledger.parts_ns().items()}
        self.prompt.learn(prefill, parts_s["prefill"] / tokens_run, now_s)
        if prefill != decode:
            self.transfer.learn(f"{prefill} {decode}", parts_s["transfer"] / prompt_tokens, now_s)
        self.lengths.learn("", output_tokens, now_s)
        if output_tokens <= 1:
            return None
        gap_s = (parts_s["decode"] + parts_s["first_step"]) / (output_tokens - 1)
        self.output.learn(decode, gap_s, now_s)
        return gap_s

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        for figures in (self.prompt, self.output, self.transfer):
            figures.forget(worker)

    def expected_tokens(self, max_tokens: int, now_s: float) -> float:
        """Output tokens of a request that may have so many."""
        usual = self.lengths.usual(now_s)
        return max_tokens if usual is None else min(max_tokens, usual)
