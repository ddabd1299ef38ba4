"""What each row of a step drew of each answer, and what befell its request, as an observer of a driver sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.events import EmitTokens, Send
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Preempted, Progress
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.tiers import MovePages, Tier

QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """By one row of a step: its first token's place in the answer, and how many."""

    place: int
    tokens: int


@dataclass
class Rows:
    """Observes a driver: what each row of a step drew, by request. An attempt's first token is its prompt's."""

    of: dict[RequestId, list[Drawn]] = field(default_factory=dict)
    attempts: dict[Attempt, WorkerId] = field(default_factory=dict)  # and the worker that drew of each last
    preempted: Counter[RequestId] = field(default_factory=Counter)
    cached: dict[Attempt, int] = field(default_factory=dict)  # tokens that prefill found
    back: int = 0  # pages that came up from below HBM

    def __call__(self, actor: str, item: Any, now_s: float) -> None:
        match item:
            case EmitTokens(delta, worker) if delta.sampled:
                if delta.attempt in self.attempts:
                    rows = self.of.setdefault(delta.attempt.request_id, [])
                    rows.append(Drawn(delta.index, len(delta.sampled)))
                self.attempts[delta.attempt] = worker
            case Send(message=Preempted(attempt)):
                self.preempted[attempt.request_id] += 1
            case Send(message=Progress(attempt, Mark.PREFILL_STARTED) as progress):
                self.cached[attempt] = progress.cached_tokens
            case MovePages(move) if move.destination is Tier.HBM:
                self.back += len(move.destination_pages)
            case _:
                return

    def forget(self) -> None:
        self.of.clear()
        self.attempts.clear()

    def drawing(self) -> WorkerId:
        """That has most of the answers."""
        last = {attempt.request_id: worker for attempt, worker in self.attempts.items()}
        return Counter(last.values()).most_common(1)[0][0]

    def times(self, request: RequestId) -> int:
        """That it was begun again."""
        return sum(attempt.request_id == request for attempt in self.attempts) - 1

    def found(self, request: RequestId, first: int = 0) -> int:
        """Tokens that its attempts from this one on found there."""
        mine = sorted((each.epoch, cached) for each, cached in self.cached.items() if each.request_id == request)
        return sum(cached for _, cached in mine[first:])


def quarters(rows: Iterable[Drawn], tokens: int, first: int = 0) -> list[list[int]]:
    """What rows drew in each quarter of an answer of so many tokens; their places count from its token `first` on."""
    found: list[list[int]] = [[] for _ in range(QUARTERS)]
    for row in rows:
        found[min(QUARTERS - 1, QUARTERS * (first + row.place) // tokens)].append(row.tokens)
    return found


def mean(drawn: Sequence[int]) -> float | None:
    return sum(drawn) / len(drawn) if drawn else None
