"""How fast workers were of late, as the ledgers of requests that ended tell: what predictions are made of.

A figure that nobody has renewed for a while is as good as none, so that a worker that was slow once is tried again;
where a worker has none, it is taken to be like the others that have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.request import WorkerId

DECAY = 0.8  # weight of earlier values, with each new one
FORGET_S = 60.0
CHECK_S = 1.0  # interval at which expired values leave the mean


@dataclass(slots=True)
class RecentMeans:
    """One decayed mean per name, which expires `FORGET_S` after its latest value, and the mean over all names."""

    _known: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _sum: float = 0.0
    _checked_s: float = 0.0  # time of the last check for expired values

    def learn(self, name: str, value: float, now_s: float) -> None:
        """Adds a value to the decayed mean of `name`."""
        before = self.of(name, now_s)
        self.replace(name, value if before is None else DECAY * before + (1 - DECAY) * value, now_s)

    def replace(self, name: str, value: float, now_s: float) -> None:
        """Sets the value of `name`, whatever it was."""
        self._sum += value - self._known.get(name, (0.0, 0.0))[0]
        self._known[name] = (value, now_s)

    def of(self, name: str, now_s: float) -> float | None:
        """Returns the mean of `name`; None if it is unknown or expired."""
        known = self._known.get(name)
        return known[0] if known is not None and now_s - known[1] < FORGET_S else None

    def usual(self, now_s: float) -> float | None:
        """Returns the mean over all names; None if nothing is known."""
        if now_s - self._checked_s >= CHECK_S:
            self._keep({name: known for name, known in self._known.items() if now_s - known[1] < FORGET_S})
            self._checked_s = now_s
        return self._sum / len(self._known) if self._known else None

    def guess(self, name: str, now_s: float) -> float | None:
        """Returns the mean of `name`, or over all names if it is unknown."""
        own = self.of(name, now_s)
        return self.usual(now_s) if own is None else own

    def forget(self, worker: WorkerId) -> None:
        """Removes the values of the worker and of its pairs."""
        self._keep({name: known for name, known in self._known.items() if worker not in name.split()})

    def _keep(self, known: dict[str, tuple[float, float]]) -> None:
        self._known, self._sum = known, sum(value for value, _ in known.values())


Counts = tuple[int, int, int]  # tokens of a prompt, run for it, and drawn


@dataclass(slots=True)
class Pace:
    """Seconds a token, by worker; of prompts a token run, padding too; of transfers exposed, by pair."""

    prompt: RecentMeans = field(default_factory=RecentMeans)
    output: RecentMeans = field(default_factory=RecentMeans)
    transfer: RecentMeans = field(default_factory=RecentMeans)
    lengths: RecentMeans = field(default_factory=RecentMeans)  # output tokens of requests

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
