"""Which prefill worker and which decode worker take a request: a pure function over views that shows its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """One live worker as the router sees it for one request."""

    worker: WorkerId
    role: Role
    work_tokens: float  # outstanding work, in prompt tokens: what was sent there and has not ended
    served: int  # requests sent there so far, to share the idle hours
    has_room: bool  # a bed for this request, as far as is known (decode) or pages for its prompt at all (prefill)
    avoided: bool = False  # it failed this request before


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair and its rank: pairs that failed this request last, then least outstanding work, then fewest served."""

    prefill: WorkerId
    decode: WorkerId
    avoided: bool
    work_tokens: float
    served: int

    @property
    def score(self) -> tuple[bool, float, int, str, str]:
        return (self.avoided, self.work_tokens, self.served, self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair taken, None where no pair has room, and every pair that was weighed, best first."""

    taken: Candidate | None
    weighed: tuple[Candidate, ...]


def choose_pair(looks: Sequence[WorkerLook]) -> Choice:
    """The pair with the least outstanding work. A colocated worker pairs only with itself."""
    able = [look for look in looks if look.has_room]
    pairs = [
        Candidate(first.worker, second.worker, first.avoided or second.avoided, *_load(first, second))
        for first in able
        for second in able
        if first.role.prefills and second.role.decodes and _fit_together(first, second)
    ]
    weighed = tuple(sorted(pairs, key=lambda pair: pair.score))
    return Choice(weighed[0] if weighed else None, weighed)


def _fit_together(prefill: WorkerLook, decode: WorkerLook) -> bool:
    colocated = Role.COLOCATED in (prefill.role, decode.role)
    return prefill.worker == decode.worker if colocated else True


def _load(prefill: WorkerLook, decode: WorkerLook) -> tuple[float, int]:
    if prefill.worker == decode.worker:
        return prefill.work_tokens, prefill.served
    return prefill.work_tokens + decode.work_tokens, prefill.served + decode.served
