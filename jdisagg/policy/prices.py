"""What the KV of some pages costs from each source, and computed, as it was measured of late.

A source that nobody has measured, or not for a while, is tried: what it costs is learnt by that. One that failed is
left alone for a time that doubles with each failure in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.messages import Priced
from jdisagg.core.tiers import Tier

DECAY = 0.9  # of what was known, with each measurement
FORGET_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
COMPUTED = "computed"


@dataclass(slots=True)
class Line:
    """seconds = fixed + each * size, by least squares over measurements of which old ones count less."""

    weight: float = 0.0
    size: float = 0.0  # sums, here and below
    seconds: float = 0.0
    size_size: float = 0.0
    size_seconds: float = 0.0
    learnt_s: float = 0.0  # when the last was made

    def learn(self, size: float, seconds: float, now_s: float) -> None:
        if size <= 0 or seconds <= 0:
            return
        for name, value in (
            ("weight", 1.0),
            ("size", size),
            ("seconds", seconds),
            ("size_size", size * size),
            ("size_seconds", size * seconds),
        ):
            setattr(self, name, DECAY * getattr(self, name) + value)
        self.learnt_s = now_s

    def fit(self) -> tuple[float, float]:
        """(fixed, each), neither negative; all of it is `each` where sizes hardly differ."""
        spread = self.size_size - self.size * self.size / self.weight
        if spread > 1e-6 * self.size_size:
            each = (self.size_seconds - self.size * self.seconds / self.weight) / spread
            fixed = (self.seconds - each * self.size) / self.weight
            if each >= 0 and fixed >= 0:
                return fixed, each
            if each < 0:
                return self.seconds / self.weight, 0.0
        return 0.0, self.seconds / self.size

    def at(self, size: float, now_s: float) -> float | None:
        """Seconds for so much; None where nothing is known."""
        if not self.weight or now_s - self.learnt_s > FORGET_S:
            return None
        fixed, each = self.fit()
        return fixed + each * size


@dataclass(slots=True)
class Trouble:
    """Of a source that fails."""

    pause_s: float
    until_s: float


@dataclass(slots=True)
class Prices:
    """Of one worker. Sizes are pages; a page of all sources holds as many tokens. A source is a tier, or a worker."""

    lines: dict[str, Line] = field(default_factory=dict[str, Line])
    troubles: dict[str, Trouble] = field(default_factory=dict[str, Trouble])
    hit_share: float = 1.0  # of pages asked of the pool, how many it had of late
    fresh: bool = False  # something was learnt since `known` was asked

    def learn(self, source: str, pages: float, seconds: float, now_s: float) -> None:
        if pages > 0 and seconds > 0:
            self.lines.setdefault(source, Line()).learn(pages, seconds, now_s)
            self.fresh = True

    def forget(self, source: str) -> None:
        self.lines.pop(source, None)

    def answered(self, source: str) -> None:
        self.troubles.pop(source, None)

    def failed(self, source: str, now_s: float) -> None:
        before = self.troubles.get(source)
        pause_s = FIRST_PAUSE_S if before is None else min(LONGEST_PAUSE_S, 2 * before.pause_s)
        self.troubles[source] = Trouble(pause_s, now_s + pause_s)

    def usable(self, source: str, now_s: float) -> bool:
        """Whether it may be asked: it does not fail, or has been left alone for long enough."""
        trouble = self.troubles.get(source)
        return trouble is None or now_s >= trouble.until_s

    def asked_pool(self, asked: int, found: int) -> None:
        if asked:
            self.hit_share = DECAY * self.hit_share + (1 - DECAY) * found / asked

    def seconds(self, source: str, pages: int, now_s: float) -> float | None:
        line = self.lines.get(source)
        return None if line is None else line.at(pages, now_s)

    def pays(self, source: str, pages: int, now_s: float) -> bool:
        """Whether fetching so many pages is expected to be quicker than computing them."""
        if not self.usable(source, now_s):
            return False
        fetched, computed = self.seconds(source, pages, now_s), self.seconds(COMPUTED, pages, now_s)
        if fetched is None or computed is None:
            return True
        return fetched < computed * (self.hit_share if source == Tier.POOL else 1.0)

    def known(self, now_s: float) -> Priced:
        """What is known of late, for somebody else to reckon with; a source that is left alone is not in it."""
        self.fresh = False
        lines = {source: line for source, line in self.lines.items() if self.usable(source, now_s)}
        fits = {source: line.fit() for source, line in lines.items() if line.at(1, now_s) is not None}
        return Priced(tuple((str(source), *fits[source]) for source in sorted(fits)))
