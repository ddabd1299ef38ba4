"""Contestants against a clock: they take turns, so that a slow minute of the machine is slow for all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

BURST_S = 0.004  # a turn lasts at least this long, so that neither the clock nor a launch counts
MOST_RUNS = 200


@dataclass(frozen=True)
class Contestant:
    """`run` starts `operations` of what is measured and returns something `wait` can wait for."""

    name: str
    run: Callable[[], object]
    operations: int = 1
    wait: Callable[[object], object] = jax.block_until_ready


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one operation: the least of all turns (what a quiet machine gives), the median, and CPU seconds."""

    best_s: float
    median_s: float
    cpu_s: float
    turns_s: tuple[float, ...] = ()  # of each round: contestants' turns of one round are minutes of the same machine

    def over(self, other: Times) -> float:
        """How many times as long as another contestant it took: the median of the rounds' own ratios."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.turns_s, other.turns_s, strict=True))


def burst_of(contestant: Contestant) -> int:
    """Runs of a turn, after one that compiles."""
    contestant.wait(contestant.run())
    began = time.perf_counter()
    contestant.wait(contestant.run())
    return min(MOST_RUNS, max(1, math.ceil(BURST_S / (time.perf_counter() - began))))


def race(contestants: Sequence[Contestant], rounds: int) -> list[Times]:
    """Every contestant once a round; one that needs the device to itself would have no fair turn otherwise."""
    bursts = [burst_of(each) for each in contestants]
    wall: list[list[float]] = [[] for _ in contestants]
    cpu: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds):
        for index, (each, burst) in enumerate(zip(contestants, bursts, strict=True)):
            began, began_cpu = time.perf_counter(), time.process_time()
            out = [each.run() for _ in range(burst)][-1]
            each.wait(out)
            operations = burst * each.operations
            wall[index].append((time.perf_counter() - began) / operations)
            cpu[index].append((time.process_time() - began_cpu) / operations)
    return [Times(min(w), statistics.median(w), min(c), tuple(w)) for w, c in zip(wall, cpu, strict=True)]
