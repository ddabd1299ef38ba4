"""A closed loop of requests: `concurrency` streams, each asking again as soon as it has its answer. Times only.

How a request is made (HTTP, in process) is an `Ask`; what came of it is a `Sample`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.workload import Job


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; times in seconds of one monotonic clock.

    `arrivals_s` has an entry each time tokens came (several may come at once, and half a character shows nothing),
    `num_tokens` is the server's own count. `ledger_ns` is nanoseconds of each phase where the server tells.
    """

    sent_s: float
    arrivals_s: tuple[float, ...] = ()
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    ledger_ns: Mapping[str, int] | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Times between arrivals."""
        return tuple(b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s


Ask = Callable[[Job], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Burst:
    """All samples of one closed loop, and the seconds from its first request to its last answer."""

    concurrency: int
    wall_s: float
    samples: tuple[Sample, ...]


async def closed_loop(
    jobs: Sequence[Job], concurrency: int, ask: Ask, told: Callable[[Sample], object] = lambda _: None
) -> Burst:
    """Asks for all `jobs`, at most `concurrency` at a time. Samples are in the order of their ends."""
    left, samples = iter(jobs), []

    async def stream() -> None:
        for job in left:
            samples.append(await ask(job))
            told(samples[-1])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(stream())
    return Burst(concurrency, time.perf_counter() - began, tuple(samples))
