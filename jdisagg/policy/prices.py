"""What the KV of some pages costs from each source, and computed, as it was measured of late.

A source that nobody has measured, or not for a while, is tried: what it costs is learnt by that. One that failed is
left alone for a time that doubles with each failure in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.messages import Priced
from jdisagg.core.tiers import Tier
from jdisagg.policy.router.estimates import Backoff, LinearFit

DECAY = 0.9  # weight of earlier answers of the pool, with each new one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
COMPUTED = "computed"


@dataclass(slots=True)
class Prices:
    """Of one worker. Sizes are pages; a page of all sources holds as many tokens. A source is a tier, or a worker."""

    lines: dict[str, LinearFit] = field(default_factory=dict[str, LinearFit])
    backoffs: dict[str, Backoff] = field(default_factory=dict[str, Backoff])
    hit_share: float = 1.0  # of pages asked of the pool, how many it had of late
    fresh: bool = False  # something was learnt since `known` was asked

    def learn(self, source: str, pages: float, seconds: float, now_s: float) -> None:
        if pages > 0 and seconds > 0:
            self.lines.setdefault(source, LinearFit()).learn(pages, seconds, now_s)
            self.fresh = True

    def forget(self, source: str) -> None:
        self.lines.pop(source, None)

    def answered(self, source: str) -> None:
        self.backoffs.pop(source, None)

    def failed(self, source: str, now_s: float) -> None:
        self.backoffs.setdefault(source, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)).fail(now_s)

    def usable(self, source: str, now_s: float) -> bool:
        """Returns True if the source may be asked: it did not fail, or its pause is over."""
        backoff = self.backoffs.get(source)
        return backoff is None or backoff.is_over(now_s)

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
